"""Decode by mma and cp.async."""
