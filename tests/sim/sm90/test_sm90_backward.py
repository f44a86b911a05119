"""The passes over columns in the simulator in each configuration; how work is shared out."""

from dataclasses import replace

import numpy as np
import pytest
from sm90_bwd_runs import ALONE, BROAD, COLUMN, COLUMNS, SHARED, TALL, check, run
from sm90_runs import DTYPES, inputs

from nbflash.cuda import simulator as sim
from nbflash.schedule.work_list import ordered
from nbflash.testing import code_word_oracle, mask_gallery

T = 64
CONFIGS = {
    "alone": ALONE,
    "tall": TALL,
    "broad": BROAD,
    "deep": replace(ALONE, stages=4),
    "column": COLUMN,
    "columns": COLUMNS,
    "shared": SHARED,
}
configs = pytest.mark.parametrize("config", CONFIGS)


@configs
@pytest.mark.parametrize("name", ["causal", "dead-scattered", "global-local", "dense"])
def test_configurations(name, config):
    cfg = CONFIGS[config]
    nq, nk = 2 * cfg.tile_m + 1, cfg.tile_n + 1
    mask = mask_gallery(nq, nk, batch=1)[name]
    check(cfg, mask, inputs(nq, nk, head_dim=cfg.head_dim), blocks=2)


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        ("alone", 8),
        ("tall", 64),
        ("broad", 104),
        ("broad", 128),
        ("column", 96),
        ("columns", 64),
        ("columns", 128),
        ("shared", 192),
        ("shared", 256),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(config, dtype, head_dim):
    cfg = CONFIGS[config]
    nq, nk = cfg.tile_m + 1, T + 1
    values = inputs(nq, nk, head_dim=head_dim, dtype=dtype)
    check(cfg, mask_gallery(nq, nk)["butterfly-or-local-causal"], values)


@configs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["dense", "checkerboard", "dead-scattered"])
def test_saturated_softmax_scatters(name, dtype, config):
    """Bit for bit: no tolerance."""
    nq, nk = 70, 129
    mask, cfg = mask_gallery(nq, nk)[name], CONFIGS[config]
    words = code_word_oracle(nq, cfg.head_dim, nk, mask, DTYPES[dtype])
    values = words.q, words.k, words.v, words.dout
    *others, dv = run(cfg, mask, values, scale=words.scale)
    np.testing.assert_array_equal(dv, words.dv)
    for x in others:
        assert not x.any()


@configs
@pytest.mark.parametrize("name", ["causal", "dead-scattered"])
def test_no_races(name, config):
    cfg, seed = CONFIGS[config], len(name) % 3
    n = cfg.tile_m + cfg.tile_n + 1
    with sim.options(race=True, seed=seed):
        check(cfg, mask_gallery(n)[name], inputs(n, head_dim=cfg.head_dim), blocks=1 + seed)


@pytest.mark.parametrize("blocks", [1, 3, 132])
def test_work_is_shared_out(blocks):
    """Every item once, what is empty last, no block with much more than its share."""
    rng = np.random.default_rng(blocks)
    length = np.sort(rng.integers(0, 60, 2000))[::-1]
    work = np.column_stack([np.arange(2000), rng.integers(0, 32, 2000)])
    got = ordered(work, length, 4, blocks)
    assert sorted(got[:, 0]) == list(range(2000))
    live, load = np.count_nonzero(length), np.zeros(blocks)
    assert (length[got[live:, 0]] == 0).all()
    for round_ in range(-(-live // blocks)):
        for block in range(blocks):
            at = round_ * blocks + (block if round_ % 2 == 0 else blocks - 1 - block)
            if at < live:
                load[block] += length[got[at, 0]]
    assert load.max() - load.min() <= length.max()
