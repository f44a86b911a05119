"""Runs of the Hopper backward in the simulator, with one warpgroup or two, and their yardsticks."""

from dataclasses import replace

import numpy as np
from by_name import SCHEDULE, in_memory, simulate, strides, tensor_maps, words
from sm90_runs import BLOCK, drawn

from nbflash import reference, testing
from nbflash.backends.sm90.backward.config import Sm90BackwardConfig
from nbflash.backends.sm90.backward.convert_dq import convert_dq_sm90_spec
from nbflash.backends.sm90.backward.host import rows_config, tables
from nbflash.backends.sm90.backward.kernel import bwd_sm90_spec
from nbflash.backends.sm90.backward.row_statistics import CHUNK, statistics_sm90_spec
from nbflash.cuda import score_params
from nbflash.definitions import philox
from nbflash.definitions.constants import LOG2_E
from nbflash.inputs.problem import check_forward
from nbflash.schedule.tile_schedule import TileSchedule

# One warpgroup, as cheap as can be; two that share a tile of 128 queries; two that share columns.
ALONE = Sm90BackwardConfig("float16", 16, 1, 64)
TALL = Sm90BackwardConfig("float16", 16, 2, 128)
BROAD = Sm90BackwardConfig("float16", 72, 2, 64)
# dK and dV alone: in one warpgroup or two, and in two that share 64 keys.
COLUMN = replace(ALONE, with_dq=False)
COLUMNS = replace(BROAD, with_dq=False, stages=3)
SHARED = Sm90BackwardConfig("float16", 136, 2, 64, with_dq=False, k_stages=1)
# As on a GPU: a gradient goes through one more product and one more rounded operand.
FACTOR = 3.0


def run(
    cfg,
    mask,
    inputs,
    *,
    scale=None,
    score=None,
    dropout=0.0,
    seed=(0, 0),
    blocks=1,
    results=None,
    dlse=None,
    stats=None,
    statistics=statistics_sm90_spec,
    convert_dq=convert_dq_sm90_spec,
    spec_of=bwd_sm90_spec,
):
    """``(dq, dk, dv)`` on poisoned outputs; dtype and head_dim of ``cfg`` are the problem's.

    Without dQ in the configuration, ``(dk, dv)``. ``results`` are ``(out, lse)``, if not those of
    the reference; ``dlse`` has any order of axes; ``stats`` are what the pass for dQ has left.
    """
    q, k, v, dout = inputs
    p = check_forward(q, k, v, scale)
    code, params = score_params.prepare(score, p, None)
    cfg = replace(cfg, dtype=p.dtype, head_dim=p.head_dim, score=code, dropout=bool(dropout))
    state, dropping = drawn(dropout, seed, inverse=True)
    out, lse = results or reference.attention(q, k, v, mask, scale, score, dropout, seed)
    out, lse = out.astype(q.dtype), np.ascontiguousarray(lse, np.float32)
    dlse = np.zeros_like(lse) if dlse is None else dlse
    schedule = TileSchedule.from_mask(mask, cfg.tile_m, cfg.tile_n).T
    walked, live = tables(schedule, p.batch, p.heads, p.group, p.head_dim, blocks)
    rows = rows_config(cfg)
    n_col, slots = schedule.n_col, p.batch * p.heads * schedule.n_col
    queries = slots * cfg.tile_m
    total = testing.poisoned(queries * rows.lanes * CHUNK)
    of_rows = {"nq": p.nq, "heads": p.heads, "n_col": n_col}
    if stats is None:
        stats = testing.poisoned(slots * 2 * cfg.tile_m)
        simulate(
            statistics(rows),
            rows.statistics_blocks(queries),
            **{"dout": words(dout), "out": words(out), "lse": lse.reshape(-1)},
            **{"dlse": in_memory(dlse), "stats": stats, "dq": total},
            **{"do_stride": strides(dout), "o_stride": strides(out), "l_stride": strides(dlse)},
            **of_rows,
            rows=queries,
        )
        if dropout:  # as the pass for dQ leaves them
            stats.reshape(slots, 2, -1)[:, 1] /= dropping[1]
    dq, dk, dv = (testing.poisoned(x.shape, q.dtype) for x in (q, k, v))
    m, n, factor = cfg.tile_m, cfg.tile_n, philox.factor(dropout)
    simulate(
        spec_of(cfg),
        blocks,
        **tensor_maps(q_map=(q, m), k_map=(k, n), v_map=(v, n), do_map=(dout, m)),
        **{"dq": total, "stats": stats, "dk": words(dk), "dv": words(dv)},
        **{"state": state, "dropping": dropping, "params": params, "kv_stride": strides(dk)},
        **{"nk": p.nk, "heads": p.heads, "heads_kv": p.heads // p.group, "group": p.group},
        **{"n_row": schedule.n_row, "n_col": n_col, "items": len(walked[0]) // 4, "live": live},
        factor=np.float32(p.scale * (1.0 if code else LOG2_E)),
        scale=np.float32(p.scale * factor),
        **dict(zip((*SCHEDULE[:5], "bounds", "bits"), walked, strict=True)),
    )
    if not cfg.with_dq:
        return dk, dv
    simulate(
        convert_dq(rows),
        slots * cfg.consumers,
        **{"source": total, "target": words(dq), "stride": strides(dq)},
        **of_rows,
        scale=np.float32(p.scale * factor),
    )
    return dq, dk, dv


def check(cfg, mask, inputs, *, scale=None, score=None, dropout=0.0, seed=(0, 0), **more):
    """Run and hold every block of the gradients to its budget; returns them."""
    q, k, v, dout = inputs
    how = {"scale": scale, "score": score, "dropout": dropout, "seed": seed}
    got = run(cfg, mask, inputs, **how, **more)
    how["dlse"] = more.get("dlse")
    exact = reference.attention_backward(dout, q, k, v, mask, **how)
    low = testing.low_precision_backward(dout, q, k, v, mask, **how)
    names = ("dq", "dk", "dv")
    for name, *values in zip(*(x[-len(got) :] for x in (names, got, exact, low)), strict=True):
        testing.assert_blocks_within_reference(*values, BLOCK, name=name, factor=FACTOR)
    return got
