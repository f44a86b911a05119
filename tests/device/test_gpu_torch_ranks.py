"""Two processes of torch.distributed, each with a GPU, train a model together."""

import importlib.util

import cupy
import pytest
from two_processes import outputs

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)
if cupy.cuda.runtime.getDeviceCount() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)


def kernels(**parameters):
    """Compiled when they are needed, by each process."""
    return []


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_gradients_are_those_of_one_process(way, tmp_path):
    for printed, errors in outputs(f"{way}.py", tmp_path / "meeting", "--device", "cuda"):
        assert printed.endswith("equal\n"), errors
