"""Who computes what clients do: one after another, or many at once."""
