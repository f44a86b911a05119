"""The kernels that executors launch are those of a spec: what it asks for, by each way."""

import numpy as np
import pytest
from logged_device import Array, Logged

import masks
from nbflash import scores
from nbflash.backends.simt.executor import SimtExecutor
from nbflash.backends.sm80.executor import Sm80Executor
from nbflash.backends.sm90 import executor as sm90_executor
from nbflash.backends.sm90.backward.config import backward_configs, columns_configs
from nbflash.backends.sm90.executor import Sm90Executor
from nbflash.cuda import score_params
from nbflash.definitions.constants import LOG2_E
from nbflash.inputs import arrays
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import Problem

EXECUTORS = {"simt": SimtExecutor, "sm80": Sm80Executor, "sm90": Sm90Executor}
N, HEADS, DIM, SCALE = 256, 2, 64, 0.375
WHOLE, RAGGED = masks.butterfly(N, 128), masks.dense(N, N - 6)
MASKS = {"whole": WHOLE, "ragged": RAGGED, "causal": masks.causal(N)}
FUNCTIONS = {
    "none": None,
    "softcap": scores.softcap(3.0),
    "by place": scores.alibi(np.ones(HEADS)),
}


def launches(impl, mask, way, *, score=None, dropout=0.0, capability=(9, 0), dim=DIM, **how):
    """What runs of a forward, a backward, or one in two passes; the bound score, and the spec."""
    nk = mask.shape[1]
    q, k = Array((1, N, HEADS, dim), np.float16), Array((1, nk, 1, dim), np.float16)
    strides = tuple((*arrays.strides(x), 1) for x in (q, k, k))
    problem = Problem(1, N, nk, HEADS, 1, dim, "float16", SCALE, strides, "cuda", 0, 16)
    spec, device = AttentionSpec(problem, mask, score, dropout), Logged(capability)
    executor, lse = EXECUTORS[impl](spec, device=device, **how), Array((1, HEADS, N), np.float32)
    if way == "forward":
        executor.forward(q, k, k, q, lse, seed=(1, 2))
    else:
        given = q, q, k, k, q, lse, lse, q, k, k
        if impl == "sm90" and way == "backward" and not dropout and not how:
            executor.two_passes = False
        executor.backward(*given, way == "two passes", seed=(1, 2))
    code, _ = score_params.prepare(score, problem, capability)
    found = [x for x in device.launches if x.kernel.removeprefix("nbflash_")[:3] in ("fwd", "bwd")]
    in_two = way == "two passes" or (way == "backward" and executor.two_passes)
    assert len(found) == 1 + bool(in_two) or dim > 128
    assert {(x.config.dtype, x.config.head_dim) for x in device.launches} == {("float16", dim)}
    return found, code, executor


ways = pytest.mark.parametrize("way", ["forward", "backward", "two passes"])
each = pytest.mark.parametrize("impl", EXECUTORS)


@ways
@each
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_scores_and_dropout(impl, way, name, dropout, cupy):
    """A function takes natural scores: kernels without one multiply with log2 e as well."""
    found, code, _ = launches(impl, MASKS["causal"], way, score=FUNCTIONS[name], dropout=dropout)
    factor = SCALE * (LOG2_E if code is None else 1.0)
    for launch in found:
        assert launch.config.score == code, launch.kernel
        assert launch.config.dropout is bool(dropout), launch.kernel
        names = {"scale", "factor", "q_factor"} & launch.values.keys()
        assert factor in [pytest.approx(launch[x], rel=1e-6) for x in names], launch.kernel


@ways
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("impl", ["sm80", "sm90"])
def test_tiles_without_a_mask(impl, way, name, cupy):
    """On Hopper keys past the last one are no mask of a pass over columns."""
    found, *_ = launches(impl, MASKS[name], way)
    for launch in found:
        by_columns = launch.kernel == "nbflash_bwd_sm90"
        full = name == "whole" or (name == "ragged" and by_columns)
        halves = getattr(launch.config, "halves", True)
        assert launch.config.full_tiles is (full and halves), launch.kernel
        if by_columns:
            assert launch.config.edge is (name == "ragged" and way == "backward")
        if launch.kernel == "nbflash_bwd_sm90_dq":
            (columns,) = (x for x in found if x.kernel == "nbflash_bwd_sm90")
            assert launch.config.stats_m == columns.config.tile_m


@pytest.mark.parametrize("name", FUNCTIONS)
def test_scores_by_place_are_walked_from_the_diagonal_outwards(name, cupy, monkeypatch):
    """By the Hopper forward alone: its rows would rescale their sums at every tile."""
    walked, right = [], sm90_executor.row_tables
    monkeypatch.setattr(
        sm90_executor, "row_tables", lambda s, *more: walked.append(s) or right(s, *more)
    )
    _, _, executor = launches("sm90", MASKS["causal"], "forward", score=FUNCTIONS[name])
    (found,), usual = walked, executor.schedule
    expected = usual.outwards if name == "by place" else usual
    assert (found.col_idx == expected.col_idx).all()
    assert (usual.outwards.col_idx != usual.col_idx).any()


@pytest.mark.parametrize("way", ["backward", "two passes"])
@pytest.mark.parametrize(("dropout", "rows"), [(0.0, 16), (0.25, 32)])
def test_dropout_takes_rows_by_32(way, dropout, rows, cupy):
    """Where shared memory is small, a tile has 16 of 256 columns without it."""
    how = {"dropout": dropout, "capability": (8, 6), "dim": 256}
    found, *_ = launches("sm80", MASKS["causal"], way, **how)
    assert min(launch.config.length for launch in found) == rows


@pytest.mark.parametrize("table", [backward_configs, columns_configs])
def test_a_backward_that_is_given_has_what_the_spec_asks_for(table, cupy):
    """The functions of its score, and in two passes dropout."""
    config = table("float16", DIM)[-1]
    more = {"dropout": 0.0 if config.with_dq else 0.25, "backward": config}
    way = "backward" if config.with_dq else "two passes"
    found, code, _ = launches("sm90", MASKS["causal"], way, score=FUNCTIONS["by place"], **more)
    (main,) = (x for x in found if x.kernel == "nbflash_bwd_sm90")
    assert main.config.score == code
    assert main.config.dropout is (not config.with_dq)
    assert (main.config.tile_m, main.config.tile_n) == (config.tile_m, config.tile_n)
