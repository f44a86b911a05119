"""Dropout for the tests of the kernels."""

SEED = 2**63 + 5, 2**40 + 11
HOW = {"dropout": 0.3, "seed": SEED}  # all 15 bits of a number count
