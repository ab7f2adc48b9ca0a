"""How a run is carried out: what is measured, what is decided, the plan."""
