"""Launches: configuration, arguments, options, and the way into numba.cuda."""

import os
import subprocess
import sys

import numpy as np
import pytest
from numba import cuda

from nbflash.cuda import simulator as sim
from nbflash.cuda.simulator.launch import settings
from nbflash.cuda.simulator.patch import check_layout


@cuda.jit
def fill(out):
    x, y = cuda.grid(2)
    width, height = cuda.gridsize(2)
    out[x, y] = x * height + y + 100 * cuda.blockDim.x + 1000 * cuda.gridDim.y + 0 * width


def test_grid_and_block_of_two_axes():
    out = np.zeros((4, 9), int)
    fill[(2, 3), (2, 3)](out)
    np.testing.assert_array_equal(out, np.arange(36).reshape(4, 9) + 3200)


def test_arguments_are_used_in_place():
    def scale(x, factor, shape):
        i = cuda.grid(1)
        if i < shape[0]:
            x[i] *= factor

    memory = np.arange(12.0)
    cuda.jit(scale)[2, 4](memory[::2], 10.0, memory[::2].shape)
    assert memory.tolist() == [0, 1, 20, 3, 40, 5, 60, 7, 80, 9, 100, 11]


def test_device_array_argument():
    x = cuda.to_device(np.arange(4.0))
    cuda.jit(lambda x: x.__setitem__(cuda.threadIdx.x, 7))[1, 4](x)
    assert x.copy_to_host().tolist() == [7, 7, 7, 7]


def test_read_only_argument():
    x = np.zeros(4)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        cuda.jit(lambda x: x.__setitem__(0, 1))[1, 1](x)


def test_device_functions_of_both_decorations():
    @cuda.jit(device=True, inline="always")
    def twice(x):
        return 2 * x

    @cuda.jit
    def thrice(x):
        return 3 * x

    def kernel(out):
        out[0] = twice(1) + thrice(1)

    out = np.zeros(1)
    cuda.jit(kernel)[1, 1](out)
    assert out[0] == 5


def test_compiler_options_are_swallowed():
    options = {
        "fastmath": True,
        "lineinfo": True,
        "launch_bounds": (128, 2),
        "max_registers": 128,
        "forceinline": True,
        "inline": "always",
        "lto": True,
        "opt": True,
        "debug": False,
        "cache": True,
    }
    out = np.zeros(1)
    cuda.jit("void(float64[:])", **options)(lambda out: out.__setitem__(0, 3))[1, 1](out)
    assert out[0] == 3


def test_unknown_compiler_option():
    with pytest.raises(TypeError, match=r"cuda\.jit has no option fast_math"):
        cuda.jit(fast_math=True)


def test_launch_without_configuration():
    with pytest.raises(sim.SimError, match="fill needs a launch configuration"):
        fill(np.zeros((1, 1)))


@pytest.mark.parametrize(
    ("grid", "block", "match"),
    [
        (0, 1, "grid=0"),
        (1, 0, "block=0"),
        (1, (1, 1, 1, 1), r"block=\(1, 1, 1, 1\)"),
        (1, 1025, "1025|limit is 1024"),
    ],
)
def test_impossible_configuration(grid, block, match):
    with pytest.raises((ValueError, sim.SimError), match=match):
        fill[grid, block](np.zeros((1, 1)))


def test_device_code_outside_a_kernel():
    with pytest.raises(sim.SimError, match="outside a kernel launch"):
        cuda.syncthreads()


def test_error_says_which_thread():
    def kernel():
        if cuda.grid(1) == 5:
            raise ArithmeticError("planted")

    with pytest.raises(ArithmeticError) as caught:
        cuda.jit(kernel)[2, 4]()
    assert caught.value.__notes__ == ["thread (1, 0, 0) of block (1, 0, 0): planted"]


def test_floating_point_is_silent_as_on_a_device():
    def kernel(x, out):
        out[0], out[1] = x[0] * x[0], x[1] - x[1]

    out = np.zeros(2, np.float32)
    cuda.jit(kernel)[1, 1](np.array([1e30, np.inf], np.float32), out)
    assert np.isinf(out[0])
    assert np.isnan(out[1])


def test_options_end_with_their_block():
    before = settings()
    with sim.options(seed=9, race=True):
        assert (settings().seed, settings().race) == (9, True)
    assert settings() == before


def test_unknown_option():
    with pytest.raises(TypeError, match="raced"), sim.options(raced=True):
        pass


def test_layout_of_numba_cuda_is_the_one_expected():
    check_layout(cuda)


@pytest.mark.parametrize("missing", ["jit", "stream", "FakeCUDAKernel"])
def test_another_layout_is_reported(monkeypatch, missing):
    monkeypatch.delattr(cuda, missing)
    with pytest.raises(sim.SimError, match=rf"numba-cuda .* has no {missing}"):
        sim.install()


def in_new_process(code, **environment):
    kept = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_install_without_the_simulator():
    result = in_new_process("import nbflash.cuda.simulator as sim; sim.install()")
    assert "Numba's CUDA simulator is off: set NUMBA_ENABLE_CUDASIM=1" in result.stderr


def test_kernel_decorated_before_install_runs_on_the_engine():
    code = """
import numpy as np
from numba import cuda
from nbflash.cuda import simulator as sim

@cuda.jit(device=True)
def first(x):
    return x[0]

@cuda.jit
def kernel(x):
    x[0] = first(cuda.shared.array(1, cuda.float32)) + cuda.shfl_sync(0xffffffff, 1, 0)

sim.install()
x = np.zeros(1)
kernel[1, 32](x)
assert np.isnan(x[0])
"""
    result = in_new_process(code, NUMBA_ENABLE_CUDASIM="1")
    assert result.returncode == 0, result.stderr


def test_tier_refuses_a_process_that_imported_numba_before():
    tier = os.path.dirname(os.path.dirname(__file__))
    code = f"import numba, pytest; pytest.main(['-q', '--collect-only', {tier!r}])"
    result = in_new_process(code)
    assert "run `pytest tests/sim` by itself" in result.stdout + result.stderr
