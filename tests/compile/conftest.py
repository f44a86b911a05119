"""The compile tier: kernels for several architectures, with no GPU, driver or CUDA toolkit."""

import gc

import pytest
from numba.cuda.core import config

from nbflash.cuda.ptx import _shared

if config.ENABLE_CUDASIM:
    raise pytest.UsageError(
        "tests/compile needs the real compiler, but Numba's CUDA simulator is on: run "
        "`pytest tests/compile` by itself, without NUMBA_ENABLE_CUDASIM"
    )


def pytest_addoption(parser):
    parser.getgroup("nbflash").addoption(
        "--code",
        metavar="FILE",
        help="append a line for every kernel that is compiled, with a digest of its PTX: what "
        "differs between the sorted files of two commits is code that has changed",
    )


def pytest_configure(config):
    import compiled

    compiled.keep_in(config.cache.mkdir("compiled"))
    compiled.list_in(config.option.code)
    _shared.begin()


def pytest_unconfigure():
    gc.freeze()  # or Python looks through all that Numba made once more before it ends
