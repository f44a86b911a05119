"""Score functions for the tests of every implementation: `nbflash.scores`' own and custom ones."""

import numpy as np

from nbflash import scores

HEADS = 4


def quadratic(s, b, h, q_idx, kv_idx, weight, by_head, table):
    return by_head[h] * s + weight * s * s / (1 + b) + table[q_idx, kv_idx]


def quadratic_slope(s, b, h, q_idx, kv_idx, weight, by_head, table):
    return by_head[h] + 2 * weight * s / (1 + b)


def scores_for(nq, nk, heads=HEADS):
    """By name; for inputs of these sizes."""
    rng = np.random.default_rng(0)
    by_head, table = rng.standard_normal(heads), rng.standard_normal((nq, nk))
    return {
        "softcap": scores.softcap(1.5),
        "alibi": scores.alibi(np.arange(heads) / heads),
        "relative": scores.relative(rng.standard_normal((heads, 9))),
        "bias": scores.bias(rng.standard_normal((1, heads, nq, nk))),
        "custom": scores.custom(quadratic, quadratic_slope, (0.1, by_head, table)),
        "composed": scores.compose(scores.softcap(2), scores.alibi(0.1), scores.softcap(3)),
    }


NAMES = tuple(scores_for(1, 1))


def code_of(score, dtype="float32"):
    """The ScoreCode of a score in a problem with a positive scale."""
    from nbflash.cuda import score_params
    from nbflash.inputs.problem import check_forward

    q, k = np.zeros((1, 100, HEADS, 8), dtype), np.zeros((1, 120, HEADS, 8), dtype)
    return score_params.prepare(score, check_forward(q, k, k, None), (9, 0))[0]
