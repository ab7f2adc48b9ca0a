"""Runs whose clients are divided among Ray actors, each of which has a device of its own."""
