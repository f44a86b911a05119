"""What a computing warpgroup of the Hopper backward asks of a tile: its record, P and dS."""

from masks import FULL, INTERVAL
from nbflash.kernels.bwd_sm90_config import RECORD_WORDS
from nbflash.kernels.bwd_sm90_score import make_scored
from nbflash.ptx._asm import inlined, types
from nbflash.ptx.mbarrier import mbarrier_wait
from nbflash.tile.pipeline import make_ring, read_record
from nbflash.tile.wgmma_gradient import (
    make_probabilities,
    make_score_gradients,
    make_statistics,
)


def make_record_of(cfg):
    """``record_of(smem, place, tile)``: of a tile of the stream, once it is there."""
    RECORDS, FULL_Q = cfg.offsets[7], cfg.barriers[0]
    stage_of, phase_of = make_ring(cfg.stages)

    @inlined
    def record_of(smem, place, tile):
        base, words = place
        stage = stage_of(tile)
        mbarrier_wait(base + FULL_Q + 8 * stage, phase_of(tile))
        return read_record(smem, words + RECORDS // 4 + RECORD_WORDS * stage)

    return record_of


def make_statistics_of(cfg):
    """``shifts_of, minus_deltas_of`` of ``(stats, place, stage, pair)``; what dP may start with,
    ``by_keys(minus_deltas)``, and ``less_deltas(dp, …)`` of one that started with zeros.
    """
    TILE_M, STATS, STAT_WORDS = cfg.tile_m, cfg.offsets[5] // 4, cfg.stat_bytes // 4
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

    return shifts_of, minus_deltas_of, by_keys, less_deltas


def make_probabilities_of(cfg):
    """``probabilities_of(s, kind, scales, shifts, smem, place, stage, row, pair, scoring)``: P.

    What is hidden is masked to −∞ before the exponential; ``scales`` are those of a thread's keys,
    ``row`` is the upper key's and ``pair`` the first query's number in the tile; ``scoring`` is
    that of :mod:`.bwd_sm90_score`.
    """
    TILE_N, MASK_BYTES, WORDS = cfg.tile_n, cfg.mask_bytes, -(-cfg.tile_n // 32)
    *_, MASKS, RECORDS, _, _, _ = cfg.offsets
    sizes, FULL_TILES = (cfg.tile_m, TILE_N), cfg.full_tiles
    exponents, interval, bits, weights = make_probabilities(*sizes, cfg.dtype, cfg.score)
    scored, _ = make_scored(cfg)

    @inlined
    def hidden(x, kind, smem, place, stage, row, pair):
        """Exponents of a masked tile."""
        _, words = place
        mask = words + MASKS // 4 + stage * (MASK_BYTES // 4)
        if kind == INTERVAL:
            n_block = smem[words + RECORDS // 4 + RECORD_WORDS * stage + 1]
            return interval(x, smem, mask + pair, types.int32(n_block * TILE_N + row))
        return bits(x, smem, mask + pair * WORDS, types.int32(row))

    @inlined
    def probabilities_of(s, kind, scales, shifts, smem, place, stage, row, pair, scoring):
        s = scored(s, scoring)
        x = exponents(s, scales, shifts)
        if not FULL_TILES and kind != FULL:
            x = hidden(x, kind, smem, place, stage, row, pair)
        return weights(x, s)

    return probabilities_of


def make_gradients_of(cfg):
    """``gradients_of(p, dp, kind)``: dS of a tile, of P and dP − δ; and ``pack``."""
    masked, gradients, pack = make_score_gradients(cfg.tile_m, cfg.dtype)
    FULL_TILES = cfg.full_tiles

    @inlined
    def gradients_of(p, dp, kind):
        if not FULL_TILES and kind != FULL:
            dp = masked(p, dp)
        return gradients(p, dp)

    return gradients_of, pack
