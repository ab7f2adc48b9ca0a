"""The machine, its main memory and its accelerator: what they are, copies, free memory, CUDA graphs."""
