"""Between main memory and the accelerator: copies, free memory, CUDA graphs."""
