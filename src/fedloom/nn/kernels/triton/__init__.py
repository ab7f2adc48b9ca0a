"""Kernels in Triton's language; imported only where Triton is installed."""
