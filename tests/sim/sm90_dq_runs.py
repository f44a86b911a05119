"""Runs of the pass for dQ in the simulator, with one warpgroup or two, and their yardsticks."""

from dataclasses import replace

import numpy as np
from by_name import SCHEDULE, in_memory, simulate, strides, tensor_maps, words
from sm90_bwd_runs import FACTOR
from sm90_runs import BLOCK, drawn

from nbflash import reference, testing
from nbflash.backends.sm90.backward.dq_config import Sm90DqConfig
from nbflash.backends.sm90.backward.dq_kernel import bwd_sm90_dq_spec
from nbflash.cuda import score_params
from nbflash.definitions import philox
from nbflash.definitions.constants import LOG2_E
from nbflash.inputs.problem import check_forward
from nbflash.schedule.tile_schedule import TileSchedule
from nbflash.schedule.work_list import row_tables

# One warpgroup, as cheap as can be, and dQ leaves through the place of its dO, or of its Q; two,
# and both ways; one with every ring of another length.
ALONE = Sm90DqConfig("float16", 16, 1, 64)
ALONE_BY_Q = replace(ALONE, q_stages=2)
PAIR = Sm90DqConfig("float16", 16, 2, 64, stats_m=128)
BY_Q = replace(PAIR, q_stages=2)
DEEP = Sm90DqConfig("float16", 72, 1, 128, 3, 1, 2, 2, registers=())


def statistics_for(cfg, q):
    """Room for what the pass over columns reads."""
    batch, nq, heads, _ = q.shape
    return testing.poisoned(2 * batch * heads * -(-nq // cfg.stats_m) * cfg.stats_m)


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
    spec_of=bwd_sm90_dq_spec,
):
    """dQ on a poisoned output; dtype and head_dim of ``cfg`` are the problem's.

    ``results`` are ``(out, lse)``, if not those of the reference; ``dlse`` has any order of axes;
    the statistics for the pass over columns are left in ``stats``.
    """
    q, k, v, dout = inputs
    p = check_forward(q, k, v, scale)
    code, params = score_params.prepare(score, p, None)
    cfg = replace(cfg, dtype=p.dtype, head_dim=p.head_dim, score=code, dropout=bool(dropout))
    state, dropping = drawn(dropout, seed)
    out, lse = results or reference.attention(q, k, v, mask, scale, score, dropout, seed)
    out, lse = out.astype(q.dtype), np.ascontiguousarray(lse, np.float32)
    dlse = np.zeros_like(lse) if dlse is None else dlse
    stats = statistics_for(cfg, q) if stats is None else stats
    schedule = TileSchedule.from_mask(mask, cfg.tile_m, cfg.tile_n)
    walked, live = row_tables(schedule, p, blocks)
    dq, n = testing.poisoned(q.shape, q.dtype), cfg.tile_n
    boxes = {"q_map": (q, 64), "k_map": (k, n), "v_map": (v, n), "do_map": (dout, 64)}
    simulate(
        spec_of(cfg),
        blocks,
        **tensor_maps(**boxes, dq_map=(dq, 64)),
        **{"dq": words(dq), "out": words(out), "lse": lse.reshape(-1)},
        **{"dlse": in_memory(dlse), "stats": stats},
        **{"o_stride": strides(out), "l_stride": strides(dlse), "stride": strides(dq)},
        **{"nq": p.nq, "heads": p.heads, "group": p.group, "n_row": schedule.n_row},
        **{"items": len(walked[0]) // 2, "live": live},
        factor=np.float32(p.scale * (1.0 if code else LOG2_E)),
        scale=np.float32(p.scale * philox.factor(dropout)),
        **dict(zip(SCHEDULE, walked, strict=True)),
        **{"state": state, "dropping": dropping, "params": params},
    )
    return dq


def check(cfg, mask, inputs, *, scale=None, score=None, dropout=0.0, seed=(0, 0), **more):
    """Run and hold dQ to its budget; returns it."""
    q, k, v, dout = inputs
    how = {"scale": scale, "score": score, "dropout": dropout, "seed": seed}
    got = run(cfg, mask, inputs, **how, **more)
    how["dlse"] = more.get("dlse")
    exact, _, _ = reference.attention_backward(dout, q, k, v, mask, **how)
    low, _, _ = testing.low_precision_backward(dout, q, k, v, mask, **how)
    testing.assert_blocks_within_reference(got, exact, low, BLOCK, name="dq", factor=FACTOR)
    return got


def check_statistics(cfg, mask, inputs, **more):
    """Run with a dLSE, transposed, and look at the statistics of every query, and of none.

    Every row tile has tiles; out is float16.
    """
    q, k, v, dout = inputs
    batch, nq, heads, head_dim = q.shape
    out, lse = reference.attention(q, k, v, mask)
    out, lse = out.astype(np.float16), lse.astype(np.float32)
    dlse = np.random.default_rng(0).standard_normal((nq, batch, heads), np.float32)
    dlse = dlse.transpose(1, 2, 0)
    stats = testing.poisoned((batch, heads, -(-nq // cfg.stats_m), 2, cfg.stats_m))
    check(cfg, mask, inputs, results=(out, lse), dlse=dlse, stats=stats.reshape(-1), **more)
    shift, minus_delta = stats.transpose(3, 0, 1, 2, 4).reshape(2, batch, heads, -1)
    assert np.isneginf(shift[..., nq:]).all()
    assert (minus_delta[..., nq:] == 0).all()
    dead = np.isneginf(lse)
    assert np.isneginf(shift[..., :nq][dead]).all()
    np.testing.assert_array_equal(shift[..., :nq][~dead], -np.float32(LOG2_E) * lse[~dead])
    terms = (dout.astype(np.float64) * out).transpose(0, 2, 1, 3)
    error = np.abs(minus_delta[..., :nq] - (dlse - terms.sum(-1)))
    rounding = np.finfo(np.float32).eps * (np.abs(terms).sum(-1) * head_dim + np.abs(dlse))
    assert (error <= rounding)[~dead].all()
