"""Small calls of the CUDA kernels in the simulator, by the public API, against plain definitions.

The kernels have tiles of a few rows: those of the tables take seconds for any call.
"""

import contextlib
import dataclasses
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from fuzzing import checked_calls, drawn_problems
from fuzzing.drawn_decode import check as check_decoded
from fuzzing.drawn_decode import contiguous
from fuzzing.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simt_runs import Geometry

import nbflash
from nbflash.backends.simt import executor
from nbflash.backends.simt.configs import SimtConfig
from nbflash.backends.simt.decode_host import SimtPartial
from nbflash.planning import cache

pytestmark = pytest.mark.drawn
SIDES = st.integers(0, 12)
GEOMETRIES = st.sampled_from(
    [Geometry(), Geometry(tx=4), Geometry(rm=8), Geometry(ty=1, rm=8, rn=8)]
)


@contextlib.contextmanager
def of(geometry, call):
    """Kernels of a geometry in the place of those of the tables, and no plan of any other."""
    problem = SimpleNamespace(dtype=call.q.dtype.name, head_dim=call.q.shape[-1])
    base = geometry.base(problem)
    forward = lambda dtype, head_dim, **how: SimtConfig(**base)
    backward = lambda dtype, head_dim, *, deterministic, **how: geometry.backward(problem)(
        deterministic, False
    )
    with (
        patch.object(executor, "forward_config", forward),
        patch.object(executor, "backward_configs", backward),
        patch.object(cache, "plans", cache.PlanCache(16)),
    ):
        yield


@examples(8)
@given(drawn_problems.calls(SIDES, small=True), GEOMETRIES, st.booleans())
def test_attention(call, geometry, deterministic):
    def run(call):
        with of(geometry, call):
            return checked_calls.run(call, impl="simt", deterministic=deterministic)

    checked_calls.check(call, run)


config_for = SimtPartial.config_for


def of_a_warp(*given):
    """The configuration of the table, for one warp."""
    return dataclasses.replace(config_for(*given), warps=1)


@examples(4)
@given(contiguous(most=12))
def test_decode(given):
    q, k, v, lengths, options, plain = given
    with patch.object(SimtPartial, "config_for", staticmethod(of_a_warp)):
        got = nbflash.decode(q, k, v, lengths, impl="simt", return_lse=True, **options)
    held = [(k[b, :n], v[b, :n]) for b, n in enumerate(lengths)]
    check_decoded(got, q, held, plain)
