"""Which way the Hopper backward takes: it follows from the tiles alone, without a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
from score_cases import code_of

import masks
from nbflash import scores
from nbflash.backends.sm90.backward.choice import (
    columns_config,
    dq_config,
    in_two_passes,
    one_pass_config,
)
from nbflash.backends.sm90.backward.config import SUM_KEYS, two_passes_are_faster
from nbflash.inputs.attention_spec import AttentionSpec

N = 8192
MASKS = {
    "dense": masks.dense(N),
    "causal": masks.causal(N),
    "butterfly": masks.butterfly(N, block=128),
    "local": masks.local(N, block=128, width=4),
    "window": masks.window(N, left=512, right=0),
    "random-64": masks.random(N, block=64, density=0.125, seed=0),
}


def spec_of(name, head_dim, dropout=0.0):
    mask = MASKS[name]
    problem = SimpleNamespace(dtype="bfloat16", head_dim=head_dim, nk=mask.shape[1])
    return AttentionSpec(problem, mask, dropout=dropout)


def takes_two(name, head_dim, code=None, dropout=0.0):
    return in_two_passes(spec_of(name, head_dim, dropout), code)


def tiles_of_two(name, head_dim):
    """Tiles of the pass over columns and of that over rows."""
    spec = spec_of(name, head_dim)
    return [(c.tile_m, c.tile_n) for c in (columns_config(spec), dq_config(spec))]


SLOPELESS, CAPPED = code_of(scores.alibi(0.5), "float16"), code_of(scores.softcap(5), "float16")
SLOPED = code_of(scores.compose(scores.softcap(5), scores.alibi(0.5)), "float16")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_short_rows_take_two_passes(head_dim):
    assert not takes_two("dense", head_dim)
    assert not takes_two("causal", head_dim)
    assert takes_two("butterfly", head_dim)
    assert takes_two("local", head_dim)
    assert takes_two("window", head_dim)


def test_blocks_of_64_take_two_passes_in_tiles_of_64():
    """1024 keys a query, 1920 in tiles of 64 × 128, 3400 in those of 128 × 128."""
    assert takes_two("random-64", 128)
    for head_dim in (64, 128):
        assert tiles_of_two("random-64", head_dim) == [(64, 64), (64, 64)]
        assert tiles_of_two("butterfly", head_dim) == [(64, 128), (128, 128)]
        assert tiles_of_two("dense", head_dim) == [(64, 128), (128, 128)]


def test_wide_heads_have_no_tiles_of_64():
    assert tiles_of_two("random-64", 192) == [(64, 64), (128, 64)]


def test_tanh_of_both_passes_costs_narrow_heads_one():
    assert takes_two("random-64", 64)
    assert not takes_two("random-64", 64, CAPPED)
    assert takes_two("random-64", 128, CAPPED)


@pytest.mark.parametrize("name", MASKS)
def test_wide_heads_have_no_other_way(name):
    assert takes_two(name, 136)


def test_narrow_heads_take_one_pass_sooner():
    assert two_passes_are_faster(128, 1400, 1400, 1400)
    assert not two_passes_are_faster(64, 1400, 1400, 1400)


def test_rows_without_keys_cost_the_sum():
    assert two_passes_are_faster(128, 0, 0, 0)
    assert two_passes_are_faster(128, 0, SUM_KEYS / 2, SUM_KEYS / 2)
    assert not two_passes_are_faster(128, 0, SUM_KEYS, SUM_KEYS)


@pytest.mark.parametrize("code", [SLOPELESS, CAPPED, SLOPED])
def test_scores_at_128_columns_take_one_pass(code):
    assert not takes_two("dense", 128, code)
    assert not takes_two("causal", 128, code)


def test_slopes_leave_no_registers_for_128_queries():
    """But those that follow from S', as long as no tile is masked."""

    def tile_of(name, code):
        return one_pass_config(spec_of(name, 64), code).tile_m

    assert [tile_of("dense", x) for x in (SLOPELESS, CAPPED, SLOPED)] == [128, 128, 64]
    assert [tile_of("causal", x) for x in (SLOPELESS, CAPPED, SLOPED)] == [128, 64, 64]
    assert not any(takes_two("causal", 64, x) for x in (SLOPELESS, CAPPED, SLOPED))


def test_tiles_of_64_queries_in_one_pass_are_for_slopes():
    def tile_of(name, code=None):
        config = one_pass_config(spec_of(name, 64), code)
        return config.tile_m, config.tile_n

    assert tile_of("random-64") == tile_of("random-64", SLOPELESS) == (128, 128)
    assert tile_of("random-64", CAPPED) == (64, 64)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_blocks_of_64_of_any_density_take_two_passes(share):
    mask = masks.random(4096, block=64, density=share, seed=0)
    problem = SimpleNamespace(dtype="bfloat16", head_dim=64, nk=4096)
    assert in_two_passes(AttentionSpec(problem, mask))
    assert not in_two_passes(AttentionSpec(problem, masks.dense(4096)))


BIAS = code_of(scores.bias(np.zeros((1, 1, N, N), np.float32)), "float16")
RELATIVE = code_of(scores.relative(np.zeros((16, 2049), np.float32)), "float16")


def _own(s, b, h, q_idx, kv_idx):
    return s - 1.0


def test_untimed_functions_need_more_than_a_few_dead_blocks():
    own = code_of(scores.custom(_own), "float16")
    spec = spec_of("window", 128)
    assert [columns_config(spec, code).tile_n for code in (None, CAPPED, own)] == [64, 64, 128]
    assert columns_config(spec_of("random-64", 128), own).tile_n == 64


def test_reading_by_place_takes_small_tiles():
    """Whatever the mask: the passes that deterministic=True takes."""
    spec = spec_of("dense", 128)
    tiles = [(columns_config(spec, x).tile_n, dq_config(spec, x).tile_n) for x in (BIAS, RELATIVE)]
    assert tiles == [(64, 64), (128, 64)]
    spec = spec_of("dense", 64)
    assert (columns_config(spec, BIAS).tile_n, dq_config(spec, BIAS).tile_n) == (128, 128)


@pytest.mark.parametrize("code", [BIAS, RELATIVE])
def test_reading_in_both_passes_costs_more_than_one(code):
    assert not takes_two("causal", 128, code)
    assert not takes_two("dense", 128, code)
    assert takes_two("random-64", 128, code)
    assert not takes_two("window", 128, code)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_dropout_takes_two(head_dim):
    assert takes_two("dense", head_dim, dropout=0.1)


@pytest.mark.parametrize(
    ("scores", "head_dim", "cost"),
    [
        *(("plain", 8, 1.2), ("plain", 64, 1.2), ("plain", 65, 1.1), ("plain", 128, 1.1)),
        *(("softcap", 64, 1.7), ("softcap", 128, 1.2), ("reading", 64, 1.2), ("reading", 128, 1.5)),
    ],
)
def test_what_a_key_of_two_passes_costs(scores, head_dim, cost):
    """As it was measured, by scores and width: at the border of 3 and 4 of 7 products."""
    within = 0.999 * (10_000 + SUM_KEYS) / cost
    for rows, columns in ((within, within), (within * 7 / 3, 0), (0, within * 7 / 4)):
        beyond = 1.002 * rows, 1.002 * columns
        assert two_passes_are_faster(head_dim, 10_000, rows, columns, scores)
        assert not two_passes_are_faster(head_dim, 10_000, *beyond, scores)
