"""Hopper's decode."""
