"""What every CUDA backend stands on: instructions, tiles, compilation, launches."""
