"""Runs of the Hopper kernels in the simulator with few warpgroups, and their yardsticks."""

from dataclasses import replace

import ml_dtypes
import numpy as np
from by_name import SCHEDULE, simulate, strides, tensor_maps, words

from nbflash import reference, testing
from nbflash.backends.sm90.forward.config import Sm90Config
from nbflash.backends.sm90.forward.kernel import fwd_sm90_spec
from nbflash.cuda import score_params
from nbflash.cuda.tile.wgmma.dropout import dropping_of
from nbflash.definitions.constants import LEAST_SCALE, LOG2_E
from nbflash.inputs.problem import check_forward
from nbflash.schedule.tile_schedule import TileSchedule

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# One warpgroup, as cheap as can be, and two; on whole tiles, and on halves of tiles.
ALONE = Sm90Config("float16", 16, 1, 64, registers=())
PAIR = Sm90Config("float16", 16, 2, 64)
HALVES, HALVES_PAIR = replace(ALONE, halves=True), replace(PAIR, halves=True)
BLOCK = 64  # rows that are held to a budget of their own: a warpgroup's
# Of what raises the scores, for the upper and lower 8 rows of each warp.
SHARES = (1, 0.125), (0, 1), (0.125, 0), (1, 0)


def inputs(nq, nk=None, *, batch=1, heads=(1, 1), head_dim=16, dtype="float16", seed=0):
    """q, k, v and dout."""
    nk = nq if nk is None else nk
    return testing.make_qkv(batch, nq, nk, *heads, head_dim, DTYPES[dtype], seed=seed)


def ordered(x, *axes):
    """``x`` with its axes in another order in memory."""
    return np.ascontiguousarray(x.transpose(axes)).transpose(np.argsort(axes))


def drawn(dropout, seed, inverse=False):
    """The kernels' arguments ``state`` and ``dropping``."""
    if not dropout:
        return (), ()
    return (*map(np.uint64, seed), np.zeros(2, np.uint64)), dropping_of(dropout, inverse)


def arguments(cfg, mask, q, k, v, out, lse, scale=None, params=(), drawing=((), ())):
    """The kernel's by name, as :class:`nbflash.backends.sm90.executor.Sm90Executor` binds them."""
    p = check_forward(q, k, v, scale)
    schedule = TileSchedule.from_mask(mask, cfg.tile_m, cfg.tile_n)
    if cfg.score and cfg.score.by_place:
        schedule = schedule.outwards
    work, plane_of = schedule.work(p.batch, p.heads), schedule.plane_of(p.batch, p.heads)
    lengths = np.diff(schedule.row_ptr).reshape(schedule.planes, schedule.n_row)[plane_of]
    tables = (work, plane_of, schedule.row_ptr, schedule.col_idx, schedule.kind)
    tables += (schedule.lo, schedule.hi, schedule.bits)
    n = cfg.tile_n
    return {
        **tensor_maps(q_map=(q, cfg.tile_m), k_map=(k, n), v_map=(v, n), o_map=(out, 64)),
        "out": words(out),
        "lse": lse.reshape(-1),
        "q": words(q),
        "k": words(k),
        **{"o_stride": strides(out), "q_stride": strides(q), "k_stride": strides(k)},
        **{"nq": p.nq, "nk": p.nk, "heads": p.heads, "group": p.group},
        **{"n_row": schedule.n_row, "items": len(work), "live": int(np.count_nonzero(lengths))},
        "scale": np.float32(max(abs(p.scale) * (1.0 if cfg.score else LOG2_E), LEAST_SCALE)),
        **dict(zip(SCHEDULE, map(np.ravel, tables), strict=True)),
        "params": params,
        **dict(zip(("state", "dropping"), drawing, strict=True)),
    }


def run(
    cfg,
    mask,
    q,
    k,
    v,
    *,
    scale=None,
    score=None,
    dropout=0.0,
    seed=(0, 0),
    blocks=1,
    out=None,
    spec_of=fwd_sm90_spec,
):
    """``(out, lse)`` on poisoned outputs; dtype, head_dim and sign of ``cfg`` are the problem's."""
    p = check_forward(q, k, v, scale)
    code, params = score_params.prepare(score, p, None)
    cfg = replace(cfg, dtype=p.dtype, head_dim=p.head_dim, negate=p.scale < 0, score=code)
    cfg = replace(cfg, dropout=bool(dropout))
    out = testing.poisoned(q.shape, q.dtype) if out is None else out
    lse = testing.poisoned((p.batch, p.heads, p.nq), np.float32)
    how = scale, params, drawn(dropout, seed)
    simulate(spec_of(cfg), blocks, **arguments(cfg, mask, q, k, v, out, lse, *how))
    return out, lse


def raise_scores(q, k, levels, scale):
    """Add ``share · level · |scale|`` to the scores from key ``first`` on, in place.

    ``levels`` is of pairs ``(first, level)``; the shares are a warp's.
    """
    q[..., 0] = np.resize(np.repeat(SHARES, 8), q.shape[1])[:, None]
    k[..., 0] = 0
    for first, level in levels:
        k[:, first:, :, 0] = np.copysign(level, scale)


def precise(q, k, v, mask, scale, score=None, dropout=0.0, seed=(0, 0)):
    """The yardstick of scores so large that rounding them would excuse anything: O alone is."""
    wide = (x.astype(np.float32) for x in (q, k, v))
    out, lse = testing.low_precision(*wide, mask, scale, score, dropout, seed)
    return out.astype(q.dtype), lse


def check(cfg, mask, q, k, v, *, yardstick=testing.low_precision, blocks=1, out=None, **more):
    """Run and hold every block of the results to its budget; returns them."""
    spec_of = more.pop("spec_of", fwd_sm90_spec)
    got = run(cfg, mask, q, k, v, blocks=blocks, out=out, spec_of=spec_of, **more)
    exact = reference.attention(q, k, v, mask, **more)
    low = yardstick(q, k, v, mask, **{"scale": None, **more})
    for name, axis, *values in zip(("out", "lse"), (1, 2), got, exact, low, strict=True):
        testing.assert_blocks_within_reference(*values, BLOCK, name=name, axis=axis)
    return got
