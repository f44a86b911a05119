"""Products of a warp: mma."""
