"""Data sets, partitions, and the division of samples among clients."""
