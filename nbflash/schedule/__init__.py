"""Which tiles there are, of which kind, and in which order they are worked on."""
