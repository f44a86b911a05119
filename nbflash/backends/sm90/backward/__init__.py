"""Hopper's backward pass, by columns, and by rows for dQ."""
