"""Score functions in the Hopper kernels, in the simulator."""

from dataclasses import replace

import numpy as np
import pytest
import sm90_bwd_runs
import sm90_dq_runs
from score_cases import NAMES, scores_for
from sm90_runs import ALONE, DTYPES, HALVES, HALVES_PAIR, PAIR, check, inputs, run

import masks
from nbflash import scores
from nbflash.cuda import simulator as sim
from nbflash.testing import mask_gallery

T = 64
CONFIGS = {"alone": ALONE, "pair": PAIR, "halves": HALVES, "halves-pair": HALVES_PAIR}
WIDE = 72  # more than a panel: S begins as ALiBi
# N below a tile, whole tiles, ragged; more queries than keys and fewer.
LENGTHS = ((5, 9), (T - 1, T), (T + 9, 2 * T), (2 * T, 2 * T - 3))
MASKS = ("dense", "causal", "checkerboard", "window", "dead-scattered", "per-batch-per-head")


@pytest.mark.parametrize(
    ("name", "config", "head_dim"),
    [
        *((name, config, 16) for name in NAMES for config in CONFIGS),
        ("alibi", "alone", WIDE),
        ("alibi", "pair", WIDE),
    ],
)
def test_forward(name, config, head_dim):
    """Lengths, masks with FULL, INTERVAL and BITS tiles, dtypes and scales are dealt out."""
    start = NAMES.index(name) + list(CONFIGS).index(config)
    for i in (start, start + 2):
        lengths = LENGTHS[i % len(LENGTHS)]
        batch = 1 + i // 2 % 2
        sizes = {"batch": batch, "heads": (2, 1), "head_dim": head_dim}
        q, k, v, _ = inputs(*lengths, **sizes, dtype=tuple(DTYPES)[i % 2])
        mask = mask_gallery(*lengths, batch=batch, heads=2)[MASKS[i % len(MASKS)]]
        score, scale = scores_for(*lengths, 2)[name], -0.4 if i % 3 == 0 else None
        with sim.options(seed=i, race=i % 5 == 0):
            check(CONFIGS[config], mask, q, k, v, scale=scale, score=score, blocks=1 + i % 3)


@pytest.mark.parametrize("config", ["pair", "halves"])
@pytest.mark.parametrize("name", NAMES)
def test_garbage_where_nothing_attends(name, config):
    """Whatever a function makes of a hidden NaN; queries that see nothing."""
    nq, nk = T + 9, 2 * T
    mask = masks.from_function(lambda q, kv: (kv != 3) & (kv < nk - 2) & (q > 1), nq, nk)
    clean = inputs(nq, nk, heads=(2, 1))[:3]
    dirty = [x.copy() for x in clean]
    for x, hidden in zip(dirty, ([0, 1], [3, nk - 2], [3, nk - 1]), strict=True):
        x[:, hidden] = np.nan
    score = scores_for(nq, nk, 2)[name]
    out, lse = run(CONFIGS[config], mask, *dirty, score=score)
    expected, expected_lse = run(CONFIGS[config], mask, *clean, score=score)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    assert np.isneginf(lse[..., :2]).all()


BACKWARD = {
    "one-pass": (sm90_bwd_runs.check, sm90_bwd_runs.ALONE),
    "tall": (sm90_bwd_runs.check, sm90_bwd_runs.TALL),
    "column": (sm90_bwd_runs.check, sm90_bwd_runs.COLUMN),
    "columns": (sm90_bwd_runs.check, sm90_bwd_runs.COLUMNS),
    "shared": (sm90_bwd_runs.check, sm90_bwd_runs.SHARED),
    "dq": (sm90_dq_runs.check, sm90_dq_runs.ALONE),
    "dq-pair": (sm90_dq_runs.check, sm90_dq_runs.PAIR),
}


@pytest.mark.parametrize("form", BACKWARD)
@pytest.mark.parametrize("name", NAMES)
def test_backward(name, form):
    """As the forward: lengths, masks, dtypes, numbers of heads and scales are dealt out."""
    check_gradients, cfg = BACKWARD[form]
    start = 2 * NAMES.index(name) + list(BACKWARD).index(form)
    for i, lengths in enumerate(((5, 9), (T + 9, T)), start):
        heads = (2, 1) if i % 2 else (2, 2)
        dtype = tuple(DTYPES)[i // 2 % 2]
        mask_name = MASKS[i % len(MASKS)]
        several = max(lengths) < T or mask_name == "per-batch-per-head"
        batch = 1 + i // 2 % 2 if several else 1
        sizes = {"batch": batch, "heads": heads, "head_dim": cfg.head_dim}
        values = inputs(*lengths, **sizes, dtype=dtype)
        mask = mask_gallery(*lengths, batch=batch, heads=2)[mask_name]
        score = scores_for(*lengths, 2)[name]
        scale = -1.6 * cfg.head_dim**-0.5 if i % 3 == 0 else None
        with sim.options(seed=i, race=i % 4 == 0):
            more = {"scale": scale, "score": score, "blocks": 1 + i % 3}
            check_gradients(cfg, mask, values, **more)


@pytest.mark.parametrize("form", ["one-pass", "tall", "column", "dq"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_beside_garbage(name, form):
    """A hidden NaN leaves no trace in any gradient, whatever a function makes of it."""
    check_gradients, cfg = BACKWARD[form]
    nq, nk = T + 9, T
    mask = masks.from_function(lambda q, kv: (kv != 3) & (kv < nk - 2) & (q > 1), nq, nk)
    clean, score = inputs(nq, nk, heads=(2, 1)), scores_for(nq, nk, 2)[name]
    dirty = [x.copy() for x in clean]
    for x, hidden in zip(dirty, ([0, 1], [3, nk - 2], [3, nk - 1], [0, 1]), strict=True):
        x[:, hidden] = np.nan
    with np.errstate(invalid="ignore"):
        check_gradients(cfg, mask, dirty, score=score)


@pytest.mark.parametrize("config", ["alone", "halves"])
def test_a_scale_of_zero_leaves_the_score(config):
    """And a maximum that grows from tile to tile, by ALiBi's slope alone."""
    q, k, v, _ = inputs(T, 4 * T)
    for scale in (0.0, 2.0):
        check(CONFIGS[config], masks.dense(T, 4 * T), q, k, v, scale=scale, score=scores.alibi(0.3))


def test_narrow_and_wide_heads():
    for head_dim, config in ((8, replace(ALONE, q_stages=1)), (72, ALONE), (128, PAIR)):
        q, k, v, _ = inputs(T + 1, T + 1, head_dim=head_dim, dtype="bfloat16")
        check(config, masks.causal(T + 1), q, k, v, score=scores_for(1, 1, 1)["composed"])
