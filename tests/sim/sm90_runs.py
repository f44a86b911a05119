"""Runs of the Hopper kernels in the simulator with few warpgroups, and their yardsticks."""

from dataclasses import replace

import ml_dtypes
import numpy as np

from nbflash import launch, reference, testing
from nbflash.constants import LOG2_E
from nbflash.kernels.fwd_sm90 import fwd_sm90_spec
from nbflash.kernels.sm90_config import Sm90Config
from nbflash.problem import check_forward
from nbflash.schedule import TileSchedule
from nbflash.sim.hopper import SimTensorMap

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# One warpgroup, as cheap as can be, and two; on whole tiles, and on halves of tiles.
ALONE = Sm90Config("float16", 16, 1, 64, registers=())
PAIR = Sm90Config("float16", 16, 2, 64)
HALVES, HALVES_PAIR = replace(ALONE, halves=True), replace(PAIR, halves=True)
BLOCK = 64  # rows that are held to a budget of their own: a warpgroup's
LEAST_SCALE = 1e-30  # as nbflash.sm90 passes it: −∞ · scale must stay −∞


def inputs(nq, nk=None, *, batch=1, heads=(1, 1), head_dim=16, dtype="float16", seed=0):
    """q, k, v and dout."""
    nk = nq if nk is None else nk
    return testing.make_qkv(batch, nq, nk, *heads, head_dim, DTYPES[dtype], seed=seed)


def arguments(cfg, mask, q, k, v, out, lse, scale=None):
    """The kernel's, as :class:`nbflash.sm90.Sm90Executor` binds them."""
    p = check_forward(q, k, v, scale)
    schedule = TileSchedule.from_mask(mask, cfg.tile_m, cfg.tile_n)
    work, plane_of = schedule.work(p.batch, p.heads), schedule.plane_of(p.batch, p.heads)
    lengths = np.diff(schedule.row_ptr).reshape(schedule.planes, schedule.n_row)[plane_of]
    rows = (cfg.tile_m, cfg.tile_n, cfg.tile_n, 64)
    tensors = zip((q, k, v, out), rows, strict=True)
    maps = [SimTensorMap(x.view(np.uint16), n) for x, n in tensors]
    strides = tuple(s // out.itemsize for s in out.strides[:3])
    sizes = (p.nq, p.heads, p.group, schedule.n_row, len(work), int(np.count_nonzero(lengths)))
    tables = (work, plane_of, schedule.row_ptr, schedule.col_idx, schedule.kind)
    tables += (schedule.lo, schedule.hi, schedule.bits)
    scale_log2 = np.float32(max(abs(p.scale) * LOG2_E, LEAST_SCALE))
    words = _storage(out).view(np.uint32)
    return (*maps, words, lse.reshape(-1), strides, *sizes, scale_log2, *map(np.ravel, tables))


def _storage(x):
    """All of an array's elements in the order of memory."""
    order = np.argsort([-s for s in x.strides], kind="stable")
    return x.transpose(order).reshape(-1)


def run(cfg, mask, q, k, v, *, scale=None, blocks=1, out=None, spec_of=fwd_sm90_spec):
    """``(out, lse)`` on poisoned outputs; dtype, head_dim and sign of ``cfg`` are the problem's."""
    p = check_forward(q, k, v, scale)
    cfg = replace(cfg, dtype=p.dtype, head_dim=p.head_dim, negate=p.scale < 0)
    out = testing.poisoned(q.shape, q.dtype) if out is None else out
    lse = testing.poisoned((p.batch, p.heads, p.nq), np.float32)
    launch.simulate(spec_of(cfg), blocks, arguments(cfg, mask, q, k, v, out, lse, scale))
    return out, lse


def check(cfg, mask, q, k, v, *, scale=None, **more):
    """Run and hold every block of the results to its budget; returns them."""
    got = run(cfg, mask, q, k, v, scale=scale, **more)
    exact = reference.attention(q, k, v, mask, scale)
    low = testing.low_precision(q, k, v, mask, scale)
    for name, axis, *values in zip(("out", "lse"), (1, 2), got, exact, low, strict=True):
        testing.assert_blocks_within_reference(*values, BLOCK, name=name, axis=axis)
    return got
