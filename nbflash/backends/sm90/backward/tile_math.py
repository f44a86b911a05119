"""What a computing warpgroup of the Hopper backward asks of a tile: its descriptor, P and dS."""

from collections.abc import Callable
from typing import NamedTuple

from masks import BITS, FULL, INTERVAL
from nbflash.backends.sm90.backward.config import COLUMN_DESCRIPTOR_WORDS
from nbflash.backends.sm90.backward.score import make_scored
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.ptx.mbarrier import mbarrier_wait
from nbflash.cuda.tile.ring import make_ring, read_descriptor
from nbflash.cuda.tile.wgmma.gradient import (
    make_probabilities,
    make_score_gradients,
    make_statistics,
)


def make_descriptor_of(cfg):
    """``descriptor_of(smem, place, tile)``: of a tile of the stream, once it is there."""
    DESCRIPTORS, FULL_Q = cfg.smem.descriptors, cfg.barriers.full_q
    stage_of, phase_of = make_ring(cfg.stages)

    @inlined
    def descriptor_of(smem, place, tile):
        base, words = place
        stage = stage_of(tile)
        mbarrier_wait(base + FULL_Q + 8 * stage, phase_of(tile))
        return read_descriptor(smem, words + DESCRIPTORS // 4 + COLUMN_DESCRIPTOR_WORDS * stage)

    return descriptor_of


class Statistics(NamedTuple):
    """What `make_statistics_of` returns: of a thread's queries in a tile.

    shifts_of(stats, place, stage, pair)         of the exponents
    minus_deltas_of(stats, place, stage, pair)   −δ
    by_keys(minus_deltas)                        what dP may start with
    less_deltas(dp, stats, place, stage, pair)   dP − δ of one that started with zeros
    """

    shifts_of: Callable
    minus_deltas_of: Callable
    by_keys: Callable
    less_deltas: Callable


def make_statistics_of(cfg):
    """`Statistics` of a configuration."""
    TILE_M, STATS, STAT_WORDS = cfg.tile_m, cfg.smem.statistics // 4, cfg.stat_bytes // 4
    values, by_keys, less = make_statistics(TILE_M, late=cfg.panels > 1)

    @inlined
    def shifts_of(stats, place, stage, pair):
        return values(stats, place[1] + STATS + stage * STAT_WORDS + pair)

    @inlined
    def minus_deltas_of(stats, place, stage, pair):
        return values(stats, place[1] + (STATS + TILE_M) + stage * STAT_WORDS + pair)

    @inlined
    def less_deltas(dp, stats, place, stage, pair):
        return less(dp, stats, place[1] + (STATS + TILE_M) + stage * STAT_WORDS + pair)

    return Statistics(shifts_of, minus_deltas_of, by_keys, less_deltas)


def make_probabilities_of(cfg):
    """``probabilities_of(s, kind, scales, shifts, smem, place, stage, row, pair, scoring)``: P.

    What is hidden is masked to −∞ before the exponential; ``scales`` are those of a thread's keys,
    ``row`` is the upper key's and ``pair`` the first query's number in the tile; ``scoring`` is
    that of :mod:`.score`. Where registers are few, exponents are masked in place; where
    they suffice, a copy of everything for each kind of tile is faster.
    """
    TILE_N, MASK_BYTES, WORDS = cfg.tile_n, cfg.mask_bytes, -(-cfg.tile_n // 32)
    MASKS, DESCRIPTORS = cfg.smem.masks, cfg.smem.descriptors
    steps = make_probabilities(cfg.tile_m, TILE_N, cfg.dtype, cfg.score)
    exponents, weights, full = steps.exponents, steps.weights, steps.full
    interval, bits = steps.hide_interval, steps.hide_bits
    p_interval, p_bits = steps.at_once_interval, steps.at_once_bits
    scored, _ = make_scored(cfg)

    @inlined
    def mask_of(kind, smem, place, stage, row, pair):
        """Where the first pair's mask is, and the upper key's number in it."""
        _, words = place
        mask = words + MASKS // 4 + stage * (MASK_BYTES // 4)
        if kind == INTERVAL:
            n_block = smem[words + DESCRIPTORS // 4 + COLUMN_DESCRIPTOR_WORDS * stage + 1]
            return mask + pair, types.int32(n_block * TILE_N + row)
        return mask + pair * WORDS, types.int32(row)

    @inlined
    def all_full(s, kind, scales, shifts, smem, place, stage, row, pair, scoring):
        return full(scored(s, scoring), scales, shifts)

    @inlined
    def in_one_copy(s, kind, scales, shifts, smem, place, stage, row, pair, scoring):
        x = exponents(scored(s, scoring), scales, shifts)
        if kind != FULL:
            if kind == INTERVAL:
                mask, key = mask_of(INTERVAL, smem, place, stage, row, pair)
                x = interval(x, smem, mask, key)
            else:
                mask, key = mask_of(BITS, smem, place, stage, row, pair)
                x = bits(x, smem, mask, key)
        return weights(x)

    @inlined
    def by_kind(s, kind, scales, shifts, smem, place, stage, row, pair, scoring):
        if kind == FULL:
            return full(scored(s, scoring), scales, shifts)
        if kind == INTERVAL:
            mask, key = mask_of(INTERVAL, smem, place, stage, row, pair)
            return p_interval(scored(s, scoring), scales, shifts, smem, mask, key)
        mask, key = mask_of(BITS, smem, place, stage, row, pair)
        return p_bits(scored(s, scoring), scales, shifts, smem, mask, key)

    if cfg.full_tiles:
        return all_full
    return in_one_copy if cfg.masks_in_place else by_kind


def make_gradients_of(cfg):
    """``gradients_of(p, dp, kind)``: dS of a tile, of P and dP − δ; and ``pack``."""
    gradients, masked, pack = make_score_gradients(cfg.tile_m, cfg.dtype)

    @inlined
    def all_full(p, dp, kind):
        return gradients(p, dp)

    @inlined
    def in_one_copy(p, dp, kind):
        ds = gradients(p, dp)
        if kind != FULL:
            ds = masked(p, ds)
        return ds

    @inlined
    def by_kind(p, dp, kind):
        if kind == FULL:
            return gradients(p, dp)
        return masked(p, gradients(p, dp))

    if cfg.full_tiles:
        return all_full, pack
    return (in_one_copy if cfg.masks_in_place else by_kind), pack
