"""Kernels for schedules without masked tiles give the bits of those that can mask."""

import math
from dataclasses import replace

import numpy as np
import pytest
import sm90_bwd_runs
import sm90_dq_runs
import sm90_runs
from scipy.sparse import csr_array
from score_cases import scores_for

import masks
from nbflash import reference, scores, testing
from nbflash.backends.sm90.backward.choice import for_tiles
from nbflash.cuda import simulator as sim
from nbflash.schedule.tile_schedule import TileSchedule

FORWARD = {
    "halves": sm90_runs.HALVES,
    "halves-pair": sm90_runs.HALVES_PAIR,
    "whole": sm90_runs.ALONE,
}
BACKWARD = {
    "alone": (sm90_bwd_runs, sm90_bwd_runs.ALONE),
    "tall": (sm90_bwd_runs, sm90_bwd_runs.TALL),
    "broad": (sm90_bwd_runs, sm90_bwd_runs.BROAD),
    "column": (sm90_bwd_runs, sm90_bwd_runs.COLUMN),
    "columns": (sm90_bwd_runs, sm90_bwd_runs.COLUMNS),
    "shared": (sm90_bwd_runs, sm90_bwd_runs.SHARED),
    "dq": (sm90_dq_runs, sm90_dq_runs.ALONE),
    "dq-by-q": (sm90_dq_runs, sm90_dq_runs.BY_Q),
    "dq-deep": (sm90_dq_runs, sm90_dq_runs.DEEP),
}
HEADS = 2, 1
BLOCKS = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 0]], bool)  # an empty row and an empty column


def problem(cfg, name, poison=None, heads=HEADS):
    """A configuration of its own, and a mask all of whose tiles are full; queries end anywhere."""
    step = max(cfg.tile_m, cfg.tile_n)
    mask = {
        "one-query": lambda: masks.dense(1, cfg.tile_n),
        "ragged": lambda: masks.dense(cfg.tile_m + 1, 2 * cfg.tile_n),
        "empty": lambda: masks.from_dense(np.zeros((cfg.tile_m + 1, cfg.tile_n + 1), bool)),
        "blocks": lambda: masks.from_scipy(csr_array(BLOCKS), block=step),
    }[name]()
    assert TileSchedule.from_mask(mask, cfg.tile_m, cfg.tile_n).full_tiles
    values = sm90_runs.inputs(*mask.shape, heads=heads, head_dim=cfg.head_dim)
    if poison is not None:
        for x in values[1:3]:
            x[:, 5, 0, 3] = poison
    return replace(cfg, full_tiles=True), mask, values


# Races are looked for once a configuration.
masked = pytest.mark.parametrize("name", ["one-query", "ragged", "blocks", "empty"])


@masked
@pytest.mark.parametrize("config", FORWARD)
def test_forward(config, name):
    cfg, mask, (q, k, v, _) = problem(FORWARD[config], name)
    with sim.options(race=name == "blocks", seed=len(name)):
        got = sm90_runs.check(cfg, mask, q, k, v, blocks=2)
    for x, same in zip(got, sm90_runs.run(FORWARD[config], mask, q, k, v), strict=True):
        np.testing.assert_array_equal(x, same)


@masked
@pytest.mark.parametrize("config", BACKWARD)
def test_backward(config, name):
    runs, usual = BACKWARD[config]
    cfg, mask, values = problem(usual, name)
    with sim.options(race=name == "blocks", seed=len(name)):
        got = runs.check(cfg, mask, values, blocks=2)
    for x, same in zip(got, runs.run(usual, mask, values), strict=True):
        np.testing.assert_array_equal(x, same)


# Block maps where it is cheap; races with them.
EDGES = [(name, "ragged") for name, (runs, _) in BACKWARD.items() if runs is sm90_bwd_runs]
EDGES += [("tall", "one-key"), ("alone", "blocks"), ("column", "blocks")]


@pytest.mark.parametrize(("config", "name"), EDGES)
def test_backward_past_the_last_key(config, name):
    """Of scores so far below 0 that 2^shift overflows where there are no keys."""
    runs, usual = BACKWARD[config]
    step = max(usual.tile_m, usual.tile_n)
    mask = {
        "one-key": lambda: masks.dense(usual.tile_m, 1),
        "ragged": lambda: masks.dense(usual.tile_m + 1, 2 * usual.tile_n - 7),
        "blocks": lambda: (
            masks.dense(3 * step, 3 * step) & masks.from_scipy(csr_array(BLOCKS.T), block=step)
        ),
    }[name]()
    if name == "blocks":
        mask = masks.restrict(mask, None, np.arange(3 * step - 9))
    schedule = TileSchedule.from_mask(mask, usual.tile_m, usual.tile_n)
    cfg = for_tiles(usual, schedule.T)
    assert (cfg.full_tiles, cfg.edge) == (True, usual.with_dq)
    q, k, v, dout = sm90_runs.inputs(*mask.shape, heads=HEADS, head_dim=cfg.head_dim)
    scale = 8 / cfg.head_dim
    values = abs(q) + 5, -(abs(k) + 5), v, dout
    with sim.options(race=name == "blocks", seed=len(name)):
        got = runs.check(cfg, mask, values, scale=scale, blocks=2)
    for x, same in zip(got, runs.run(usual, mask, values, scale=scale), strict=True):
        np.testing.assert_array_equal(x, same)


@pytest.mark.parametrize("name", ["softcap", "alibi", "composed"])
@pytest.mark.parametrize("config", ["alone", "tall", "column", "shared", "dq"])
def test_backward_of_scores(config, name):
    runs, usual = BACKWARD[config]
    cfg, mask, values = problem(usual, "ragged")
    score = scores_for(*mask.shape, HEADS[0])[name]
    with sim.options(race=name == "composed", seed=len(name)):
        got = runs.check(cfg, mask, values, score=score, blocks=2)
    for x, same in zip(got, runs.run(usual, mask, values, score=score), strict=True):
        np.testing.assert_array_equal(x, same)


def _later_is_hidden(s, b, h, q_idx, kv_idx):
    return s if kv_idx <= q_idx else -math.inf


def _slope_of_what_is_seen(s, b, h, q_idx, kv_idx):
    return 1.0 if kv_idx <= q_idx else math.nan


@pytest.mark.parametrize("config", ["alone", "tall", "column", "shared"])
def test_a_function_may_hide_pairs(config):
    """With any slope, in tiles that the mask does not touch."""
    runs, usual = BACKWARD[config]
    cfg, mask, values = problem(usual, "ragged")
    q, k, v, dout = values
    score = scores.custom(_later_is_hidden, _slope_of_what_is_seen)
    seen = masks.from_function(lambda q, kv: kv <= q, *mask.shape)
    results = reference.attention(q, k, v, seen)
    got = runs.run(cfg, mask, values, score=score, results=results)
    ref = reference.attention_backward(dout, q, k, v, seen)
    low = testing.low_precision_backward(dout, q, k, v, seen)
    for x, y, z in zip(got[::-1], ref[::-1], low[::-1], strict=False):
        testing.assert_within_reference(x, y, z, factor=3.0)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("config", FORWARD)
def test_forward_of_a_key_that_everybody_sees(config, poison):
    cfg, mask, (q, k, v, _) = problem(FORWARD[config], "ragged", poison, heads=(4, 2))
    out, _ = sm90_runs.run(cfg, mask, q, k, v)
    bad = np.isnan(out.astype(np.float32)).any(-1)
    assert bad[:, :, :2].all()  # the queries of its head
    assert not bad[:, :, 2:].any()


@pytest.mark.parametrize("config", BACKWARD)
def test_backward_of_a_key_that_everybody_sees(config):
    runs, usual = BACKWARD[config]
    cfg, mask, values = problem(usual, "ragged", np.nan, heads=(4, 2))
    with np.errstate(invalid="ignore"):
        got = runs.run(cfg, mask, values)
    for x in got if isinstance(got, tuple) else (got,):
        heads = x.shape[2] // 2
        bad = np.isnan(x.astype(np.float32)).any(-1)
        assert bad[:, :, :heads].all()
        assert not bad[:, :, heads:].any()
