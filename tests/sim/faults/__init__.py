"""Planted faults that are written down, as data, of the families that have many."""
