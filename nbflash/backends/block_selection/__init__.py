"""Kernels that choose blocks on a CUDA device: means, their products, the best of a row."""
