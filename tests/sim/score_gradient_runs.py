"""Runs of the SIMT kernel for the gradients of a score's arrays, in the simulator."""

import numpy as np
from simt_runs import Geometry

import masks
from nbflash import reference, scores, testing
from nbflash.backends.simt import score_gradient_host as simt_score
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import check_forward
from nbflash.testing import make_qkv

HEADS = 4
TILE = Geometry()  # 8 × 8
DROPOUT = {"dropout": 0.3, "seed": (5, 6)}


def run(geometry, mask, inputs, score, *, module=simt_score, scale=None, dlse=None, **how):
    """The gradients, on poisoned memory, from the executor of ``module``."""
    q, k, v, dout = inputs
    problem = check_forward(q, k, v, scale)
    clean = [np.nan_to_num(x.astype(np.float64)) for x in (q, k, v)]
    out, lse = reference.attention(*clean, mask, scale, score, **how)
    out, lse = out.astype(q.dtype), lse.astype(problem.lse_dtype)
    fitted = geometry.fitted(problem.dtype, problem.head_dim)
    spec = AttentionSpec(problem, mask, score, how.get("dropout", 0.0))
    executor = module.SimtScoreBackward(spec, backward=fitted.backward(problem))
    shapes = [part.shape for parts in score.parts for part in parts]
    sums = tuple(testing.poisoned(shape, problem.lse_dtype) for shape in shapes)
    dlse = np.zeros_like(lse) if dlse is None else dlse.astype(lse.dtype)
    executor(dout, q, k, v, out, lse, dlse, sums, how.get("seed"))
    return sums


def _plus(s, b, h, q_idx, kv_idx, table):
    return s + table[q_idx, kv_idx]


def _one(s, b, h, q_idx, kv_idx, table):
    return 1.0


def _inside(s, b, h, q_idx, kv_idx, table):
    return (q_idx, kv_idx), 1


def _next_row(s, b, h, q_idx, kv_idx, table):
    return (q_idx, kv_idx if 0 < kv_idx < 3 else kv_idx + table.shape[1]), 1


def _row_behind(s, b, h, q_idx, kv_idx, table):
    return (q_idx if 0 < kv_idx < 3 else q_idx + table.shape[0], kv_idx), 1


def _row_before(s, b, h, q_idx, kv_idx, table):
    return (q_idx if 0 < kv_idx < 3 else q_idx - 2 * table.shape[0], kv_idx), 1


OUTSIDE = _next_row, _row_behind, _row_before


def check_outside(module, part, nq, nk):
    """Raise unless scores with an index outside leave NaN at the first element, and no trace."""
    inputs = make_qkv(1, nq, nk, 1, 1, 8)
    exact, got = (
        run(TILE, masks.dense(nq, nk), inputs, score, module=module)[0]
        for score in (
            scores.custom(_plus, _one, (np.zeros((nq, nk)),), (p,)) for p in (_inside, part)
        )
    )
    exact[:, 0], exact[:, 3:], exact[0, 0] = 0, 0, np.nan
    np.testing.assert_array_equal(got, exact)
