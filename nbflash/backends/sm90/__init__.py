"""Hopper: kernels of wgmma, TMA and mbarriers, and what binds them."""
