"""The frameworks tier: nbflash.torch, nbflash.huggingface and nbflash.jax on the CPU."""

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Two devices of one CPU, for shard_map.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

# Warnings of other packages are theirs to mend; ours are errors, see setup.cfg.
FOREIGN = ("torch", "transformers", "jax", "functorch", "huggingface_hub")


def pytest_configure(config):
    for package in FOREIGN:
        config.addinivalue_line("filterwarnings", rf"default:::{package}(\..*)?")


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers."""
    import torch

    torch.manual_seed(0)
