"""The frameworks tier: nbflash.torch, nbflash.huggingface and nbflash.jax on the CPU.

``NBFLASH_TEST_DEVICE=cuda make test-frameworks`` runs what takes any device on a GPU, where arrays
are CuPy's.
"""

import os

import pytest

DEVICE = os.environ.get("NBFLASH_TEST_DEVICE", "cpu")
os.environ.setdefault("JAX_PLATFORMS", DEVICE)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch and CuPy are there, too
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Two devices of one CPU, for shard_map.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

# Of one process on one device, whichever: no stand-ins for CUDA, no ranks, no examples.
_OF_TORCH = "attention compile decode eager gradients operators options scores"
ANY_DEVICE = (
    "test_huggingface*.py",
    "test_jax.py",
    "test_tensors_in_tensors_out.py",
    *(f"test_torch_{name}.py" for name in _OF_TORCH.split()),
)


def pytest_ignore_collect(collection_path):
    """Whether a file of tests is of the CPU alone, and the device another."""
    if DEVICE != "cpu" and collection_path.name.startswith("test_"):
        return not any(map(collection_path.match, ANY_DEVICE)) or None
    return None


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


@pytest.fixture
def one_thread():
    """torch on one core: two tests run side by side."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
