"""Kernels that choose blocks on a CUDA device: means of blocks, and the best blocks of a row."""
