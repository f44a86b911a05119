"""Hopper's forward pass."""
