"""Kernels in CUDA C++ for NVIDIA's Hopper GPUs (compute capability 9.0); other GPUs do not use them."""
