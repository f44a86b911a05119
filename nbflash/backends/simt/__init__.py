"""CUDA devices without tensor cores: kernels, configurations, and what binds them."""
