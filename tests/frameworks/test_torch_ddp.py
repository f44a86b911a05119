"""Two processes on the CPU train a model together: each has a copy of it, or a half."""

import pytest
from two_processes import outputs


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_gradients_are_those_of_one_process(way, tmp_path):
    for printed, errors in outputs(f"{way}.py", tmp_path / "meeting"):
        assert printed == "equal\n", errors
