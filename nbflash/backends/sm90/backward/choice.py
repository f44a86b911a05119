"""Which configurations the Hopper backward of a spec has, and whether it takes one pass or two."""

from dataclasses import replace

from nbflash.backends.block_plan.host import fitting, schedule_of
from nbflash.backends.sm90.backward.config import (
    backward_configs,
    columns_configs,
    two_passes_are_faster,
)
from nbflash.backends.sm90.backward.dq_config import completed, dq_configs
from nbflash.cuda.tile.dropout import dropout_of
from nbflash.definitions import score_functions

# Of the large tiles of columns and of rows above 64 columns, with functions that read an array by
# place: 64 × 64 tiles, at 0.92, keep fewer addresses. Causal, in large and in 64 × 64 tiles: 92 and
# 214 TFLOP/s with a bias, 184 and 215 with relative positions; in one pass 277 and 338 (bf16,
# N = 8192, d=128, 16 heads, batch 2, NVIDIA H200, 2026-11-27).
_READING = {score_functions.bias: (0.35, 0.53), score_functions.relative: (1.0, 0.6)}

# Of 64 × 64 tiles above 64 columns, with functions of one's own, which have not been timed. ptxas
# spills 400 to 600 bytes where tiles are masked; with softcap and ALiBi, 236 and 120 bytes, they
# lose nothing.
_UNTIMED = 0.85


def for_tiles(config, schedule):
    """The configuration for the tiles of a schedule, transposed or not.

    Without dQ nobody sums over keys, and those past the last one are not stored.
    """
    edge = config.with_dq and schedule.full_but_edge and not schedule.full_tiles
    return replace(config, full_tiles=schedule.full_but_edge, edge=edge)


def one_pass_config(spec, score=None):
    """The configuration of one pass whose tiles take the least time; None where there is no kernel.

    ``score`` is the ScoreCode of the spec's score. Without slopes two passes are faster wherever
    tiles smaller than those of the first row would be.
    """
    if spec.dropout:
        return None
    rows = backward_configs(spec.problem.dtype, spec.problem.head_dim)
    sloped, found = score is not None and score.has_slope, []
    for config in rows if sloped else rows[:1]:
        config = replace(config, score=score)
        if config.why_not():  # which may not hold where no tile is masked
            config = for_tiles(config, schedule_of(None, spec, config.tile_m, config.tile_n))
        if not config.why_not():
            found.append(config)
    return least_work(found, spec.mask)


def columns_config(spec, score=None):
    """The configuration of a pass over columns whose tiles take the least time."""
    configs = columns_configs(spec.problem.dtype, spec.problem.head_dim)
    configs = [replace(config, score=score, dropout=dropout_of(spec)) for config in configs]
    return least_work(_as_fast_as(configs, score, 0), spec.mask)


def dq_config(spec, score=None):
    """The configuration of a pass over rows whose tiles take the least time."""
    configs = dq_configs(spec.problem.dtype, spec.problem.head_dim)
    configs = [completed(config, score, dropout_of(spec)) for config in configs]
    return least_work(_as_fast_as(configs, score, 1), spec.mask)


def _as_fast_as(configs, score, by_rows):
    """Configurations of one of two passes, largest tiles first, with their speed for a score."""
    first, *smaller = configs
    if score is None or first.panels == 1:
        return configs
    first = replace(first, speed=first.speed * _speed_of_reading(score, by_rows))
    if not (by_rows or score.own):
        smaller = [replace(config, speed=_UNTIMED * config.speed) for config in smaller]
    return [first, *smaller]


def _speed_of_reading(score, by_rows):
    return min(_READING.get(fn, (1.0, 1.0))[by_rows] for fn, _ in score.functions)


def least_work(configs, mask):
    """The configuration whose tiles take the least time; None of none."""
    configs = fitting(configs, mask)
    if len(configs) < 2:
        return next(iter(configs), None)
    return min(configs, key=lambda config: cost_of_a_row(mask, config))


def cost_of_a_row(mask, config):
    """Keys that a query meets on average in the tiles that are walked, over their speed."""
    live, _ = mask.live_tiles(config.tile_m, config.tile_n)
    rows = len(mask.planes) * -(-mask.shape[0] // config.tile_m)
    return live * config.tile_n / rows / config.speed


def in_two_passes(spec, score=None):
    """Whether dQ is computed by itself, row by row: 7 products for 5, and the same bits always.

    Where rows are short, the sum of dQ costs more than two products: it is cleared, added to and
    rounded once a row, however few its tiles.
    """
    one_pass = one_pass_config(spec, score)
    if one_pass is None:
        return True
    configs = one_pass, dq_config(spec, score), columns_config(spec, score)
    costs = (cost_of_a_row(spec.mask, config) for config in configs)
    return two_passes_are_faster(spec.problem.head_dim, *costs, _kind_of(score))


def _kind_of(score):
    if score is not None and "softcap" in score.forms:
        return "softcap"
    reading = score is not None and any(fn in _READING for fn, _ in score.functions)
    return "reading" if reading else "plain"
