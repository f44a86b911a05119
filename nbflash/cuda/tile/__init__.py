"""Tiles and fragments: what the kernels are written in."""
