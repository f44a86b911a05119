"""Dropout in the Hopper kernels, in the simulator."""

from dataclasses import replace

import numpy as np
import pytest
import sm90_bwd_runs
import sm90_dq_runs
from dropout_cases import HOW, SEED
from sm90_runs import ALONE, DTYPES, HALVES, HALVES_PAIR, PAIR, check, inputs, run

import masks
from nbflash import scores
from nbflash.cuda import simulator as sim
from nbflash.definitions import philox
from nbflash.testing import mask_gallery

T = 64
THREE = replace(ALONE, tile_n=96)  # groups of keys, of which one has no neighbour
CONFIGS = {
    "alone": ALONE,
    "pair": PAIR,
    "three": THREE,
    "halves": HALVES,
    "halves-pair": HALVES_PAIR,
}
LENGTHS = ((5, 9), (T + 9, 2 * T), (2 * T, 2 * T - 3))
MASKS = ("dense", "causal", "checkerboard", "per-batch-per-head")


@pytest.mark.parametrize("config", CONFIGS)
def test_forward(config):
    """N below a tile, more queries than keys and fewer; masks, dtypes and shares are dealt out."""
    for i, lengths in enumerate(LENGTHS, list(CONFIGS).index(config)):
        name = MASKS[i % len(MASKS)]
        several = max(lengths) < T or name == "per-batch-per-head"
        batch, heads = (2, (4, 2)) if several else (1, (2, 1))
        q, k, v, _ = inputs(*lengths, batch=batch, heads=heads, dtype=tuple(DTYPES)[i % 2])
        mask = mask_gallery(*lengths, batch=batch, heads=heads[0])[name]
        how = {"dropout": (0.1, 0.5, 0.9)[i % 3], "seed": SEED, "scale": (None, -0.4)[i % 2]}
        with sim.options(seed=i, race=i % 3 == 0):
            check(CONFIGS[config], mask, q, k, v, blocks=1 + i % 3, **how)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.96])
@pytest.mark.parametrize("config", ["pair", "three", "halves"])
def test_the_mask_is_that_of_philox(config, p):
    """Equal scores and a unit matrix for V: the results are the elements of P themselves."""
    n, heads = 2 * T + 9, 2
    q = np.zeros((1, n, heads, T), np.float16)
    kept = philox.kept((1, heads, n, n), p, SEED).transpose(0, 2, 1, 3)
    for first in (0, T, n - T):
        columns = np.eye(n, T, -first, np.float16)[:, None]
        v = np.ascontiguousarray(np.broadcast_to(columns, q.shape))
        out, _ = run(CONFIGS[config], masks.dense(n), q, q, v, dropout=p, seed=SEED)
        np.testing.assert_array_equal(out != 0, kept[..., first : first + T])


def test_after_a_score_function():
    score = scores.compose(scores.softcap(2), scores.alibi(0.1))
    for config in (ALONE, HALVES):
        check(config, masks.causal(T + 9), *inputs(T + 9)[:3], score=score, **HOW)
    for form in ("column", "dq"):
        runs, cfg = BACKWARD[form]
        runs.check(cfg, masks.causal(T + 9), inputs(T + 9), score=score, **HOW)


BACKWARD = {
    "column": (sm90_bwd_runs, sm90_bwd_runs.COLUMN),
    "columns": (sm90_bwd_runs, sm90_bwd_runs.COLUMNS),
    "shared": (sm90_bwd_runs, sm90_bwd_runs.SHARED),
    "dq": (sm90_dq_runs, sm90_dq_runs.ALONE),
    "dq-pair": (sm90_dq_runs, sm90_dq_runs.PAIR),
}


@pytest.mark.parametrize("form", BACKWARD)
def test_backward(form):
    """As the forward: lengths, masks, dtypes, numbers of heads, shares and scales are dealt out."""
    runs, cfg = BACKWARD[form]
    for i, lengths in enumerate(((5, 9), (T + 9, T + 6)), list(BACKWARD).index(form)):
        heads, dtype = ((2, 1), (2, 2))[i % 2], tuple(DTYPES)[i // 2 % 2]
        values = inputs(*lengths, batch=2, heads=heads, head_dim=cfg.head_dim, dtype=dtype)
        mask = mask_gallery(*lengths, batch=2, heads=2)[MASKS[i % len(MASKS)]]
        more = {"dropout": (0.1, 0.5, 0.9)[i % 3], "seed": SEED, "blocks": 1 + i % 3}
        scale = -1.6 * cfg.head_dim**-0.5 if i % 3 == 0 else None
        with sim.options(seed=i, race=i % 3 == 0):
            runs.check(cfg, mask, values, scale=scale, **more)
