"""What all implementations mean by the same.

Constants, random bits, 8-bit caches, score functions and their chains, types of the public API.
"""
