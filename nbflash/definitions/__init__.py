"""What all implementations mean by the same: constants, random bits, 8-bit caches, score chains."""
