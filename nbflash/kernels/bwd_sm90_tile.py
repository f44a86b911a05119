"""What a computing warpgroup of the Hopper backward asks of a tile: its record, P and dS."""

from masks import FULL, INTERVAL
from nbflash.kernels.bwd_sm90_config import RECORD_WORDS
from nbflash.ptx._asm import inlined, types
from nbflash.ptx.mbarrier import mbarrier_wait
from nbflash.tile.pipeline import make_ring, read_record
from nbflash.tile.wgmma_gradient import make_probabilities, make_score_gradients


def make_record_of(cfg):
    """``record_of(smem, place, tile)``: of a tile of the stream, once its Q is there."""
    RECORDS, FULL_Q = cfg.offsets[7], cfg.barriers[0]
    stage_of, phase_of = make_ring(cfg.stages)

    @inlined
    def record_of(smem, place, tile):
        base, words = place
        stage = stage_of(tile)
        mbarrier_wait(base + FULL_Q + 8 * stage, phase_of(tile))
        return read_record(smem, words + RECORDS // 4 + RECORD_WORDS * stage)

    return record_of


def make_probabilities_of(cfg):
    """``probabilities_of(s, kind, scales, smem, stats, place, stage, row, pair)``: P of a tile.

    What is hidden is masked to −∞ before the exponential; ``scales`` are those of a thread's keys,
    ``row`` is the upper key's and ``pair`` the first query's number in the tile.
    """
    TILE_N, STAT_BYTES, MASK_BYTES = cfg.tile_n, cfg.stat_bytes, cfg.mask_bytes
    WORDS = -(-TILE_N // 32)
    *_, STATS, MASKS, RECORDS, _, _, _ = cfg.offsets
    p_full, p_interval, p_bits = make_probabilities(cfg.tile_m, TILE_N)

    @inlined
    def probabilities_of(s, kind, scales, smem, stats, place, stage, row, pair):
        _, words = place
        at = words + STATS // 4 + stage * (STAT_BYTES // 4) + pair
        if kind == FULL:
            return p_full(s, scales, stats, at)
        mask = words + MASKS // 4 + stage * (MASK_BYTES // 4)
        if kind == INTERVAL:
            n_block = smem[words + RECORDS // 4 + RECORD_WORDS * stage + 1]
            key = types.int32(n_block * TILE_N + row)
            return p_interval(s, scales, stats, at, smem, mask + pair, key)
        return p_bits(s, scales, stats, at, smem, mask + pair * WORDS, types.int32(row))

    return probabilities_of


def make_gradients_of(cfg):
    """``gradients_of(p, dp, kind, stats, place, stage, pair)``: dS of a tile; and ``pack``."""
    TILE_M, STATS, STAT_BYTES = cfg.tile_m, cfg.offsets[5], cfg.stat_bytes
    ds_full, ds_masked, pack = make_score_gradients(TILE_M, cfg.dtype)

    @inlined
    def gradients_of(p, dp, kind, stats, place, stage, pair):
        _, words = place
        at = words + (STATS + 4 * TILE_M) // 4 + stage * (STAT_BYTES // 4) + pair
        if kind == FULL:
            return ds_full(p, dp, stats, at)
        return ds_masked(p, dp, stats, at)

    return gradients_of, pack
