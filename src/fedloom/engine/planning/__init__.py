"""Choosing the execution plan of a run by measuring a few steps."""
