"""The NaN watch: keys whose V, or K in the pass for dQ, is not finite.

P is 0 where a score is masked, but 0 · NaN would reach O. So three warps of the producer's
warpgroup look at the operand of every masked tile before the consumers do:

    TMA ──► raw ──► key → zeros, its bit in bad_keys ──► full ──► consumers: m or l of a row that
            (the watch waits)                       (it arrives)  attends such a key becomes NaN

Full tiles skip it: nothing is masked, NaN goes where it belongs, and TMA completes "full" itself.
"""

from masks import FULL
from nbflash.backends.sm90.shared.config import BAD_WORDS, CLEANERS
from nbflash.backends.sm90.shared.tile_stream import tiles_of_round
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.mbarrier import bar_sync, fence_proxy_async, mbarrier_arrive, mbarrier_wait
from nbflash.cuda.tile.finite import make_clean_row, poisoned
from nbflash.cuda.tile.ring import divmod_int32, rounds_of
from nbflash.cuda.tile.tracing import FULL_WARP, load, unrolled
from nbflash.cuda.tile.warp_math import lanes_of
from nbflash.cuda.tile.wgmma.gemm import ROW_BYTES
from nbflash.cuda.tile.wgmma.softmax import make_keep

THREADS = 96


def make_clean_key(cfg):
    """``clean_key(smem, at, key)``: whether row ``key`` of the V at word ``at`` holds anything but
    numbers; it becomes a row of zeros then.
    """
    clean_row = make_clean_row(cfg.dtype, cfg.panels, cfg.tile_n * ROW_BYTES // 4)

    @inlined
    def clean_key(smem, at, key):
        return clean_row(smem, types.int32(at + key * 32), types.int32(key))

    return clean_key


def make_clean_stream(cfg, threads=THREADS):
    """``clean_stream(smem, place, sizes, schedule, thread)``, for the last ``threads``.

    A key whose V is not finite becomes one of zeros, and a bit that the consumers look at. The
    configuration says which operand plays V, and how many stages it has. Consumers wait for this,
    so that nothing here may wait long: global memory is asked for 32 rows at once, and for 32 kinds
    of a row's tiles, a lane each.
    """
    TILE_N, KV_BYTES, WORDS, THREADS = cfg.tile_n, cfg.kv_bytes, -(-cfg.tile_n // 32), threads
    V, BAD, STAGES = cfg.cleaned.at, cfg.cleaned.bad_keys, cfg.cleaned.stages
    FULL_V, RAW_V = cfg.cleaned.full, cfg.cleaned.raw
    clean_key = make_clean_key(cfg)

    @inlined
    def clean_tile(smem, place, stage, phase, thread):
        base, words = place
        v, word = types.int32(words + (V + stage * KV_BYTES) // 4), types.int32(thread >> 5)
        mbarrier_wait(base + RAW_V + 8 * stage, phase)
        while word < WORDS:
            key = types.int32(32 * word + (thread & 31))
            bad = key < TILE_N and clean_key(smem, v, key)
            found = lanes_of(bad)
            if thread & 31 == 0:
                smem[words + BAD // 4 + BAD_WORDS * stage + word] = found
            word = types.int32(word + THREADS // 32)
        fence_proxy_async()
        bar_sync(CLEANERS, THREADS)
        if thread == 0:
            mbarrier_arrive(base + FULL_V + 8 * stage)

    @inlined
    def clean_stream(smem, place, sizes, schedule, thread):
        lane, stage, phases = types.int32(thread & 31), types.int32(0), types.int32(0)
        rounds, kind = rounds_of(sizes[3], types.int32(cuda.gridDim.x)), schedule[4]
        round_, begins, ends = types.int32(0), types.int32(0), types.int32(0)
        while round_ < rounds:
            nth = types.int32(round_ & 31)
            if nth == 0:
                _, _, begins, ends = tiles_of_round(types.int32(round_ + lane), sizes, schedule)
            t, end = cuda.shfl_sync(FULL_WARP, begins, nth), cuda.shfl_sync(FULL_WARP, ends, nth)
            while t < end:
                masked = lanes_of(t + lane < end and kind[t + lane] != FULL)
                while masked != 0:
                    _, at = divmod_int32(types.int32(stage + cuda.ffs(masked) - 1), STAGES)
                    masked = types.int32(masked & (masked - 1))
                    clean_tile(smem, place, at, phases >> at & 1, thread)
                    phases = types.int32(phases ^ (1 << at))
                _, stage = divmod_int32(types.int32(stage + min(end - t, 32)), STAGES)
                t = types.int32(t + 32)
            round_ = types.int32(round_ + 1)

    return clean_stream


def make_bad_of(cfg):
    """``bad_of(smem, words, stage, keep, thread)``: which of a thread's scores count and meet a key
    that is not finite, as a word for each of its rows.
    """
    BAD_USED, BAD = -(-cfg.tile_n // 32), cfg.cleaned.bad_keys
    *_, gather = make_keep(cfg.tile_m, cfg.tile_n)

    @unrolled
    def load_bad(smem, at):
        return tuple(load(smem, at + i) for i in range(BAD_USED))

    @inlined
    def bad_of(smem, words, stage, keep, thread):
        packed = load_bad(smem, words + BAD // 4 + BAD_WORDS * stage)
        mine = types.uint32(gather(packed, types.int32(2 * (thread % 4))))
        return types.uint32(keep[0] & mine), types.uint32(keep[1] & mine)

    return bad_of


def make_nan_watch(cfg, masked):
    """``nan_watch(l, kind, smem, words, stage, keep, thread)``: l after a tile whose V is in
    ``stage``; of full tiles as it was.
    """
    bad_of = make_bad_of(cfg)

    @inlined
    def nan_watch(l, kind, smem, words, stage, keep, thread):
        if masked and kind != FULL:
            l = poisoned(l, bad_of(smem, words, stage, keep, thread))
        return l

    return nan_watch
