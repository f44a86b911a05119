"""Small calls of the CUDA kernels in the simulator, by the public API, against plain definitions.

The kernels have tiles of a few rows: those of the tables take seconds for any call.
"""

import contextlib
import dataclasses
from types import SimpleNamespace
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
import simt_runs
import sm80_runs
from fuzzing import checked_calls, drawn_problems
from fuzzing.drawn_decode import check as check_decoded
from fuzzing.drawn_decode import contiguous
from fuzzing.examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st

import nbflash
from nbflash.backends.simt import executor as simt
from nbflash.backends.simt.configs import SimtConfig
from nbflash.backends.simt.decode_host import SimtPartial
from nbflash.backends.sm80 import executor as sm80
from nbflash.backends.sm80.config import Sm80BackwardConfig, Sm80Config, passes_of
from nbflash.backends.sm80.decode.host import Sm80Partial
from nbflash.planning import cache

pytestmark = pytest.mark.drawn
SIDES, HEAD_DIMS = st.integers(0, 12), st.integers(1, 9)
#: What kernels of tensor cores take.
OF_16_BITS = {
    "dtypes": (np.float16, ml_dtypes.bfloat16),
    "head_dims": st.sampled_from([8, 16, 24, 40]),
}
MOST_DROPOUT = 0.96


@contextlib.contextmanager
def in_place_of_tables(module, **functions):
    """Functions that choose configurations, and no plan of any other."""
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(patch.object(module, name, function))
        stack.enter_context(patch.object(cache, "plans", cache.PlanCache(16)))
        yield


def simt_tiles(geometry, call):
    """In `in_place_of_tables`."""
    problem = SimpleNamespace(dtype=call.q.dtype.name, head_dim=call.q.shape[-1])
    base = geometry.base(problem)
    return {
        "forward_config": lambda dtype, head_dim, **how: SimtConfig(**base),
        "backward_configs": lambda dtype, head_dim, *, deterministic, **how: geometry.backward(
            problem
        )(deterministic, False),
    }


def sm80_tiles(geometry, call):
    """In `in_place_of_tables`: dropout takes tiles of 32 rows."""
    width = max(geometry.width, 32) if call.options.get("dropout") else geometry.width
    of = call.q.dtype.name, call.q.shape[-1], geometry.warps, geometry.m_tiles, width
    backward = Sm80BackwardConfig(*of, geometry.walk_stages)

    def passes(dtype, head_dim, *, deterministic, **how):
        return [passes_of(backward, deterministic=deterministic, vector_red=geometry.vector_red)]

    return {
        "forward_configs": lambda *given, **how: [Sm80Config(*of, geometry.stages)],
        "backward_configs": passes,
    }


def check(call, module, tiles, impl, deterministic):
    # The kernel for gradients of a score's arrays has the tiles of its table.
    arrays = any(stage.array is not None for stage in call.drawn.stages)
    assume(not (arrays and isinstance(call.mask, nbflash.BlockMap)))

    def run(call):
        with in_place_of_tables(module, **tiles):
            return checked_calls.run(call, impl=impl, deterministic=deterministic)

    checked_calls.check(call, run)


@examples(8)
@given(
    drawn_problems.calls(SIDES, head_dims=HEAD_DIMS, small=True),
    st.sampled_from([{}, {"tx": 4}, {"rm": 8}, {"ty": 1, "rm": 8, "rn": 8}]),
    st.booleans(),
)
def test_attention(call, geometry, deterministic):
    tiles = simt_tiles(simt_runs.Geometry(**geometry), call)
    check(call, simt, tiles, "simt", deterministic)


@examples(3)
@given(
    drawn_problems.calls(st.integers(0, 36), **OF_16_BITS, small=True),
    st.sampled_from([{}, {"warps": 2}, {"m_tiles": 2}, {"width": 32, "stages": 3}]),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
def test_attention_by_mma(call, geometry, walk_stages, vector_red, deterministic):
    assume(call.options.get("dropout", 0) < MOST_DROPOUT)
    assume(call.options.get("scale") != 0)  # which they take as 1e-30: an LSE of one key is not 0
    how = {"walk_stages": walk_stages, "vector_red": vector_red}
    tiles = sm80_tiles(sm80_runs.Geometry(**geometry, **how), call)
    check(call, sm80, tiles, "sm80", deterministic)


def decoded(given, impl):
    q, k, v, lengths, options, plain = given
    got = nbflash.decode(q, k, v, lengths, impl=impl, return_lse=True, **options)
    held = [(k[b, :n], v[b, :n]) for b, n in enumerate(lengths)]
    check_decoded(got, q, held, plain)


def of_warps(partial, warps):
    """A patch: the configurations of the table, for so many warps."""
    config_for = partial.config_for
    of = lambda *given: dataclasses.replace(config_for(*given), warps=warps)
    return patch.object(partial, "config_for", staticmethod(of))


@examples(4)
@given(contiguous(most=12))
def test_decode(given):
    with of_warps(SimtPartial, 1):
        decoded(given, "simt")


@examples(2)
@given(contiguous(40, **OF_16_BITS), st.integers(1, 2))
def test_decode_by_mma(given, warps):
    with of_warps(Sm80Partial, warps):
        decoded(given, "sm80")


@examples(2)
@given(contiguous(40, **OF_16_BITS, bare=True))
def test_decode_by_wgmma(given):
    decoded(given, "sm90")
