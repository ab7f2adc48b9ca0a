"""Architectures, by the names that the papers' experiments use."""
