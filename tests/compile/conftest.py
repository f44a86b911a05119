"""The compile tier: kernels for several architectures, with no GPU, driver or CUDA toolkit."""

import pytest
from numba.cuda.core import config

if config.ENABLE_CUDASIM:
    raise pytest.UsageError(
        "tests/compile needs the real compiler, but Numba's CUDA simulator is on: run "
        "`pytest tests/compile` by itself, without NUMBA_ENABLE_CUDASIM"
    )


def pytest_configure(config):
    import compiled

    compiled.keep_in(config.cache.mkdir("compiled"))
