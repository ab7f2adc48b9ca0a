"""Where samples come from and whose they are."""
