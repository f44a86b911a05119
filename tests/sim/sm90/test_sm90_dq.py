"""The pass for dQ in the simulator in each configuration; the statistics that it leaves."""

import numpy as np
import pytest
from sm90_dq_runs import ALONE, BY_Q, DEEP, PAIR, check, check_statistics, run
from sm90_runs import DTYPES, inputs

from nbflash import reference
from nbflash.cuda import simulator as sim
from nbflash.testing import code_word_oracle, mask_gallery

T = 64
CONFIGS = {"alone": ALONE, "pair": PAIR, "by-q": BY_Q, "deep": DEEP}
configs = pytest.mark.parametrize("config", CONFIGS)


@configs
@pytest.mark.parametrize("name", ["causal", "dead-scattered", "global-local", "window", "dense"])
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


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("name", "head_dim"), [("causal", 16), ("dead-scattered", 72)])
def test_statistics_for_the_pass_over_columns(name, head_dim, config):
    """Of every query of a row tile that has tiles, and of those past the end; dLSE transposed."""
    cfg, (nq, nk) = CONFIGS[config], (2 * T + 5, T + 9)
    mask, mine = mask_gallery(nq, nk)[name], inputs(nq, nk, heads=(2, 1), head_dim=head_dim)
    check_statistics(cfg, mask, mine)
