"""The pass for dQ in the simulator: lengths, masks, heads, scales, garbage, schedules."""

from dataclasses import replace

import numpy as np
import pytest
from sm90_dq_runs import ALONE, BY_Q, DEEP, PAIR, check, check_statistics, run
from sm90_runs import DTYPES

from nbflash import reference, sim
from nbflash.testing import code_word_oracle, make_qkv, mask_gallery

T = 64
EDGES = (1, 2, T - 1, T, T + 1, 2 * T - 1, 2 * T + 1)
CONFIGS = {"alone": ALONE, "pair": PAIR, "by-q": BY_Q, "deep": DEEP}
configs = pytest.mark.parametrize("config", CONFIGS)


def inputs(nq, nk=None, *, batch=1, heads=(1, 1), head_dim=16, dtype="float16", seed=0):
    """q, k, v and dout."""
    nk = nq if nk is None else nk
    return make_qkv(batch, nq, nk, *heads, head_dim, DTYPES[dtype], seed=seed)


@pytest.mark.parametrize("nk", EDGES)
@pytest.mark.parametrize("nq", EDGES)
def test_lengths(nq, nk):
    """Every pair, with masks, dtypes, schedules and numbers of blocks that change from one to the
    next, half of them with race detection."""
    at = EDGES.index(nq) + 2 * EDGES.index(nk)
    name = ("dense", "causal", "checkerboard", "window")[at % 4]
    dtype = tuple(DTYPES)[nq % 2]
    with sim.options(seed=at, race=at % 2 == 1):
        check(ALONE, mask_gallery(nq, nk)[name], inputs(nq, nk, dtype=dtype), blocks=1 + at % 3)


@pytest.mark.parametrize("name", mask_gallery(2, 2))
def test_gallery(name):
    """Rows that are whole and ragged, with and without tiles, in one block and in three."""
    nq, nk = 2 * T - 3, T + 9
    mask, seed = mask_gallery(nq, nk)[name], len(name)
    sizes = {"batch": mask.batch or 1, "heads": (mask.heads or 1, 1)}
    values = inputs(nq, nk, **sizes, dtype=tuple(DTYPES)[seed % 2])
    with sim.options(seed=seed):
        check(ALONE, mask, values, blocks=1 + 2 * (seed % 2))


@configs
@pytest.mark.parametrize("name", ["causal", "dead-scattered", "global-local", "dense"])
def test_configurations(name, config):
    cfg = CONFIGS[config]
    nq, nk = 2 * cfg.tile_m + 1, 2 * cfg.tile_n + 1
    mask = mask_gallery(nq, nk, batch=1)[name]
    with sim.options(race=name != "dense", seed=len(name)):
        check(cfg, mask, inputs(nq, nk, head_dim=cfg.head_dim), blocks=2)


@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(dtype, head_dim):
    n = T + 1
    cfg = PAIR if head_dim <= 128 else ALONE
    check(
        cfg,
        mask_gallery(n)["butterfly-or-local-causal"],
        inputs(n, n, head_dim=head_dim, dtype=dtype),
    )


@pytest.mark.parametrize("name", ["per-head", "per-batch", "per-batch-per-head", "padding"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
def test_heads_and_batches(heads, name):
    nq, nk = T + 1, T - 1
    mask = mask_gallery(nq, nk, batch=2, heads=heads[0])[name]
    with sim.options(seed=sum(heads), race=heads == (4, 2)):
        check(ALONE, mask, inputs(nq, nk, batch=2, heads=heads), blocks=2)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", ["dead-first", "dead-last", "dead-keys", "empty"])
@pytest.mark.parametrize("config", ["alone", "pair"])
def test_rows_that_attend_nothing(config, name, blocks):
    n = 3 * CONFIGS[config].tile_m - 5
    with sim.options(seed=blocks):
        check(CONFIGS[config], mask_gallery(n, T)[name], inputs(n, T), blocks=blocks)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales(dtype, scale):
    n = T + 3
    check(ALONE, mask_gallery(n)["causal"], inputs(n, dtype=dtype), scale=scale)


@pytest.mark.parametrize("shift", [120.0, -120.0, 1000.0, -1000.0])
@pytest.mark.parametrize("name", ["dense", "causal", "dead-scattered"])
def test_shifted_scores(name, shift):
    """exp(0 − LSE) overflows where a score that does not exist is not masked."""
    q, k, v, dout = inputs(T + 5, T + 9, head_dim=64, dtype="bfloat16")
    q[..., -1], k[..., -1] = 8, shift
    check(ALONE, mask_gallery(T + 5, T + 9)[name], (q, k, v, dout))


@configs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["dense", "checkerboard", "dead-scattered"])
def test_saturated_softmax(name, dtype, config):
    """One key takes everything: dS is 0, bit for bit."""
    nq, nk = 70, 129
    mask, cfg = mask_gallery(nq, nk)[name], CONFIGS[config]
    words = code_word_oracle(nq, cfg.head_dim, nk, mask, DTYPES[dtype])
    assert not run(cfg, mask, (words.q, words.k, words.v, words.dout), scale=words.scale).any()


@configs
def test_schedules_do_not_change_a_bit(config):
    cfg = CONFIGS[config]
    n = cfg.tile_m + cfg.tile_n + 1
    mask, values = mask_gallery(n)["dead-scattered"], inputs(n, head_dim=cfg.head_dim)
    runs = []
    for seed in range(3):
        with sim.options(race=True, seed=seed):
            runs.append(run(cfg, mask, values, blocks=1 + seed).tobytes())
    assert len(set(runs)) == 1


@pytest.mark.parametrize(
    ("which", "poison"),
    [("q", np.nan), ("k", np.inf), ("k", np.nan), ("v", np.nan), ("dout", np.inf)],
)
@pytest.mark.parametrize("name", ["window", "dead-scattered", "checkerboard", "dense"])
def test_one_poisoned_row(name, which, poison):
    """Rows that do not meet it keep their gradient bit for bit; the others show it."""
    n, bad = 2 * T + 1, T + 2
    mask, clean = mask_gallery(n)[name], inputs(n)
    q, k, v, _ = clean
    dirty = [x.copy() for x in clean]
    dirty["qkv".find(which)][:, bad] = poison
    keep = mask.dense()
    rows = keep[:, bad] if which in "kv" else np.arange(n) == bad
    out, lse = (x.copy() for x in reference.attention(q, k, v, mask))
    before = run(ALONE, mask, clean, results=(out, lse))
    out[:, rows] = np.nan
    if which != "dout":
        lse[..., rows] = np.where(keep[rows].any(axis=1), np.nan, -np.inf)
    after = run(ALONE, mask, dirty, results=(out, lse))
    np.testing.assert_array_equal(after[:, ~rows], before[:, ~rows])
    assert not np.isfinite(after[:, rows & keep.any(axis=1)]).any()


@pytest.mark.parametrize("name", ["window", "dead-scattered", "checkerboard", "dense"])
def test_a_key_that_no_statistic_shows(name):
    """K is −∞ where its weight is 0: LSE and O are finite, 0 · ∞ is not."""
    n, bad = 2 * T + 1, T + 2
    mask, (q, k, v, dout) = mask_gallery(n)[name], inputs(n)
    q[..., 0], k[..., 0] = np.abs(q[..., 0]) + 1, 0
    out, lse = reference.attention(q, k, v, mask)
    before = run(ALONE, mask, (q, k, v, dout), results=(out, lse))
    k[:, bad, :, 0] = -np.inf
    after = run(ALONE, mask, (q, k, v, dout), results=(out, lse))
    rows = mask.dense()[:, bad]
    np.testing.assert_array_equal(after[:, ~rows], before[:, ~rows])
    assert np.isnan(after[:, rows][..., 0]).all()


@pytest.mark.parametrize("name", ["padding", "dead-keys", "documents"])
def test_what_nothing_attends_may_hold_anything(name):
    n = 2 * T + 1
    mask, clean = mask_gallery(n)[name], inputs(n, batch=2, heads=(2, 1))
    results = reference.attention(*clean[:3], mask)
    before = run(PAIR, mask, clean, blocks=2, results=results)
    keep = np.broadcast_to(mask.dense(), (2, 2, n, n))
    unseen, idle = ~keep.any(axis=(1, 2)), ~keep.any(axis=3).transpose(0, 2, 1)
    q, k, v, dout = (x.copy() for x in clean)
    k[unseen], v[unseen], q[idle], dout[idle] = np.nan, np.inf, np.inf, np.nan
    after = run(PAIR, mask, (q, k, v, dout), blocks=2, results=results)
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (2, 0, 1, 3)])
def test_layouts(axes):
    n, back = T + 1, np.argsort(axes)
    values = [np.ascontiguousarray(x.transpose(axes)).transpose(back) for x in inputs(n, batch=2)]
    check(replace(ALONE, q_stages=2), mask_gallery(n)["causal"], values)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("name", "head_dim"), [("causal", 16), ("dead-scattered", 72)])
def test_statistics_for_the_pass_over_columns(name, head_dim, config):
    """Of every query of a row tile that has tiles, and of those past the end; dLSE transposed."""
    cfg, (nq, nk) = CONFIGS[config], (2 * T + 5, T + 9)
    mask, mine = mask_gallery(nq, nk)[name], inputs(nq, nk, heads=(2, 1), head_dim=head_dim)
    check_statistics(cfg, mask, mine)
