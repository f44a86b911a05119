"""The frameworks tier: nbflash.torch, nbflash.huggingface and nbflash.jax on the CPU.

``NBFLASH_TEST_DEVICE=cuda`` runs it on a GPU, where arrays are CuPy's: ``make test-device`` does.
"""

import os

import pytest

DEVICE = os.environ.get("NBFLASH_TEST_DEVICE", "cpu")
os.environ.setdefault("JAX_PLATFORMS", DEVICE)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch and CuPy are there, too
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Two devices of one CPU, for shard_map.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

# Warnings of other packages are theirs to mend; ours are errors, see setup.cfg.
FOREIGN = ("torch", "transformers", "jax", "functorch", "huggingface_hub")


def pytest_configure(config):
    if DEVICE != "cpu":
        import torch

        torch.set_default_device(DEVICE)
    for package in FOREIGN:
        config.addinivalue_line("filterwarnings", rf"default:::{package}(\..*)?")


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers."""
    import torch

    torch.manual_seed(0)
