"""Tensor cores of every GPU since compute capability 8.0: mma, ldmatrix, cp.async."""
