"""One run, several in one, comparisons and sweeps."""
