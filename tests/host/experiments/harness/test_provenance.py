"""Where a number comes from."""

import numpy as np

from experiments.harness.provenance import provenance


def test_provenance_names_commit_device_and_versions():
    found = provenance("cpu")
    assert found["commit"]
    assert found["device"].endswith("cores")
    assert found["numpy"] == np.__version__
    assert all(isinstance(value, str) for value in found.values())
