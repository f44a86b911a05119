"""Faults of the Hopper forward kernel and of its computing warpgroups: (module, Mutant)."""

from mutants import Mutant, swapped

from .sm90_forward_producer import FINITE, LOAD, LOADING, PIPELINE, STREAM, WATCH
from .sm90_mainloops import HALVES, RECOVERY, UPDATE, WHOLE
from .sm90_online_softmax import SCORES, STATE
from .sm90_tiles import CONFIG, FWD, GEMM, KEPT, SHARED, SOFTMAX, STORE, TILES, WARPS

COMPUTE = "nbflash.backends.sm90.forward.consumer"
ROW_OF, RINGS_OF, RECOVERY_OF, HALVES_OF, WHOLE_OF = (
    f"nbflash.backends.sm90.forward.{name}"
    for name in ("epilogue", "rings", "recovery", "mainloop_overlap", "mainloop_pingpong")
)
ONLINE_OF, MASKING_OF = (
    f"nbflash.backends.sm90.shared.{name}" for name in ("online_softmax", "masking")
)
# In the order of their imports.
FORMS = ROW_OF, RINGS_OF, ONLINE_OF, RECOVERY_OF, HALVES_OF, WHOLE_OF, COMPUTE
PRODUCER = STREAM, WATCH, LOAD
TILE = PIPELINE, FINITE, WARPS, GEMM, KEPT, STORE, SOFTMAX
CHAIN = (*TILE, SHARED, CONFIG, *PRODUCER, MASKING_OF, *FORMS, FWD)
START_OF_O = "start = types.uint32(base + stage * Q_BYTES + warpgroup * 64 * ROW_BYTES)"
SEND_O = "tma_store_4d(o_map, panel * PANEL, row * TILE_M + 64 * warpgroup, h, b, source)"
UPPER, LOWER = "if upper < nq:", "if upper + 8 < nq:"
IN_STORE = "\n" + " " * 8
ROW = (
    Mutant("l of one lane", "        l = row_total(l)\n", ""),
    Mutant("O in stage 0", START_OF_O, START_OF_O.replace(" + stage * Q_BYTES", "")),
    Mutant(
        "O over the first 64", START_OF_O, START_OF_O.replace(" + warpgroup * 64 * ROW_BYTES", "")
    ),
    swapped(
        "fence after the barrier",
        "fence_proxy_async()" + IN_STORE,
        "bar_sync(STORERS + warpgroup, 128)" + IN_STORE,
    ),
    Mutant(
        "barrier of both warpgroups", "bar_sync(STORERS + warpgroup, 128)", "bar_sync(STORERS, 128)"
    ),
    Mutant("barrier of 64 threads", "(STORERS + warpgroup, 128)", "(STORERS + warpgroup, 64)"),
    Mutant("O of the first warpgroup", "if thread % 128 == 0:", "if thread == 0:"),
    Mutant("O sent by every warp", "if thread % 128 == 0:", "if thread % 32 == 0:"),
    Mutant("first panel of O", "range(PANELS)", "range(1)"),
    Mutant("panels of O in one place", SEND_O, SEND_O.replace("panel * PANEL", "0")),
    Mutant(
        "panels of O from one place", "start + types.uint32(panel * TILE_M * ROW_BYTES)", "start"
    ),
    Mutant("panels of O of 64 rows", "panel * TILE_M * ROW_BYTES", "panel * 64 * ROW_BYTES"),
    Mutant("O on top of the first 64", SEND_O, SEND_O.replace(" + 64 * warpgroup", "")),
    Mutant("O of row tile 0", SEND_O, SEND_O.replace("row * TILE_M + ", "")),
    Mutant("h and b of O swapped", SEND_O, SEND_O.replace("h, b", "b, h")),
    Mutant("b and h of a row swapped", "(b, h) = row * TILE_M", "(h, b) = row * TILE_M"),
    Mutant("straight: head 0", "b * o_stride[0] + h * o_stride[2]", "b * o_stride[0]"),
    Mutant("straight: batch 0", "b * o_stride[0] + h * o_stride[2]", "h * o_stride[2]"),
    Mutant("straight: row past the end", UPPER, "if upper <= nq:", 0, 2),
    Mutant("straight: lower row past the end", LOWER, UPPER, 0, 2),
    Mutant("straight: last row left out", LOWER, "if upper + 9 < nq:", 0, 2),
    Mutant("straight: rows swapped", "packed[2 * j + which]", "packed[2 * j + 1 - which]"),
    Mutant(
        "straight: quad in one place",
        "upper * o_stride[1]) // 2 + quad",
        "upper * o_stride[1]) // 2",
    ),
    Mutant("straight: 4 rows below", "(upper + 8) * o_stride[1]", "(upper + 4) * o_stride[1]"),
    Mutant("straight: row tile 0", "upper, quad = row * TILE_M +", "upper, quad ="),
    Mutant("lse past the end", UPPER, "if upper <= nq:", 1, 2),
    Mutant("lse of the lower row past the end", LOWER, UPPER, 1, 2),
    Mutant("lse of the last row left out", LOWER, "if upper + 9 < nq:", 1, 2),
    Mutant("lse of the other row", "= values[0]", "= values[1]"),
    Mutant("lse 4 rows below", "lse[bh * nq + upper + 8]", "lse[bh * nq + upper + 4]"),
    Mutant("lse of head 0", "lse[bh * nq + upper] =", "lse[upper] ="),
    Mutant("lse of row tile 0", "upper, (b, h) = row * TILE_M + row_of", "upper, (b, h) = row_of"),
    Mutant("lse by every other quad", "if thread % 4 == 0:", "if thread % 8 == 0:"),
)
BITS_OF = "keep_bits(bits, tile, r + 8, quad)"
GATHERED = "types.int32(2 * (thread % 4))))"
MASKING = (
    Mutant("bounds past the last row", "min(types.int32(upper + 8), end)", "upper + 8"),
    Mutant(
        "bounds of plane 0", "row_of_thread(thread)), plane * nq\n", "row_of_thread(thread)), 0\n"
    ),
    Mutant("plane of the head before", "plane = plane_of[bh]", "plane = plane_of[max(bh - 1, 0)]"),
    Mutant(
        "bounds of row tile 0",
        "row * TILE_M + row_of_thread(thread)), plane",
        "row_of_thread(thread)), plane",
    ),
    Mutant("bounds of the upper row", "min(types.int32(upper + 8), end)", "min(upper, end)"),
    Mutant("low ends for high ends", "row_bounds(hi, plane", "row_bounds(lo, plane"),
    Mutant("interval of the upper row", "(lows[1], highs[1]", "(lows[0], highs[0]"),
    Mutant("interval of the next keys", "(lows[0], highs[0], n0", "(lows[0], highs[0], n0 + 8"),
    Mutant("bits of the next tile", "opaque(kind - BITS)", "opaque(kind - BITS + 1)"),
    Mutant("bits of the upper row", BITS_OF, BITS_OF.replace(" + 8", "")),
    Mutant(
        "bits of other columns",
        "quad = types.int32(2 * (thread & 3))",
        "quad = types.int32(2 * (thread & 3 ^ 1))",
    ),
    Mutant("bits taken for an interval", "if kind == INTERVAL:", "if kind >= INTERVAL:"),
    Mutant(
        "interval taken for a full tile",
        "or kind == FULL:\n            return",
        "or kind <= INTERVAL:\n            return",
    ),
)
BAD_KEYS = (
    Mutant("bad keys read in stage 0", "BAD // 4 + BAD_WORDS * stage)", "BAD // 4)"),
    Mutant("bad keys of other columns", GATHERED, GATHERED.replace("% 4", "% 4 ^ 1")),
    Mutant("bad keys of the upper row", "(keep[1] & mine)", "(keep[0] & mine)"),
    Mutant("bad keys that are hidden", "(keep[0] & mine)", "(mine)"),
    Mutant(
        "bad keys of the first 32",
        "BAD_USED, BAD = -(-cfg.tile_n // 32),",
        "BAD_USED, BAD = 1,",
    ),
    Mutant("bad keys of whole words", "BAD = -(-cfg.tile_n // 32)", "BAD = cfg.tile_n // 32"),
    Mutant("nobody poisoned", "l = poisoned(l, bad_of", "_ = poisoned(l, bad_of"),
    Mutant("full tiles poisoned", "if masked and kind != FULL:", "if masked:"),
)
ARRIVE_Q = "mbarrier_arrive(base + EMPTY_Q + 8 * stage)"
WAIT_K = "mbarrier_wait(base + FULL_K + 8 * stage, phase)"
STAGES = (
    Mutant("empty V awaited", "FULL_V + 8 * stage, phase", "EMPTY_V + 8 * stage, phase"),
    Mutant("full K of stage 0", WAIT_K, WAIT_K.replace(" + 8 * stage", "")),
    Mutant(
        "descriptor of stage 0", "DESCRIPTORS // 4 + DESCRIPTOR_WORDS * stage)", "DESCRIPTORS // 4)"
    ),
    Mutant("K of stage 0", "lower(base + K, 16) + stage *", "lower(base + K, 16) + 0 *"),
    Mutant(
        "V of stage 0", "lower(base + V, KV_PANEL) + stage *", "lower(base + V, KV_PANEL) + 0 *"
    ),
    Mutant("panels of V", "lower(base + V, KV_PANEL)", "lower(base + V, 16)"),
    Mutant("K for V", "lower(base + V, KV_PANEL)", "lower(base + K, KV_PANEL)"),
    Mutant("V for K", "lower(base + K, 16)", "lower(base + V, 16)"),
    Mutant(
        "Q released while O leaves",
        f"    bulk_wait_read(){IN_STORE}{ARRIVE_Q}",
        f"    {ARRIVE_Q}{IN_STORE}bulk_wait_read()",
    ),
    Mutant("arrival for Q of stage 0", ARRIVE_Q, ARRIVE_Q.replace(" + 8 * stage", "")),
)
KEPT_ON = "m_block, bh = next_block, next_bh"
WHERE = "tile = kind, (n0, m_block, bh)"
BOUNDS = "keep_of(kind, n0, next_block, next_bh, masking"
STREAM = (
    *(
        Mutant(f"{name} that starts at key 0", WHERE, WHERE.replace("n0", "zero"), which, 2)
        for which, name in enumerate(("a full tile", "a masked tile"))
    ),
    *(
        Mutant(f"{name} of row tile 0", WHERE, WHERE.replace("m_block", "zero"), which, 2)
        for which, name in enumerate(("a full tile", "a masked tile"))
    ),
    Mutant(
        "END not noticed by the first",
        "        if kind != END:\n            m_block",
        "        if True:\n            m_block",
    ),
    Mutant("END not noticed", "while kind != END:", "while True:"),
    Mutant(
        "full tiles that begin no row",
        "if kind == FULL and straight(",
        "if kind & ~FIRST == FULL and straight(",
    ),
    Mutant(
        "masked tiles taken for full ones",
        "if kind == FULL and straight(",
        "if not kind & FIRST and straight(",
    ),
    Mutant("no row begins", "or kind & FIRST:", "or kind == FIRST | FULL:"),
    Mutant("FIRST left in the kind", "kind & ~FIRST, (m_block,", "kind, (m_block,"),
    Mutant("finishes the next row", "(m_block, bh, result)", "(next_block, bh, result)"),
    Mutant("finishes the next head", "(m_block, bh, result)", "(m_block, next_bh, result)"),
    Mutant("bounds of the row before", BOUNDS, BOUNDS.replace("next_block", "m_block")),
    Mutant("bounds of the head before", BOUNDS, BOUNDS.replace("next_bh", "bh")),
    Mutant("row not kept", KEPT_ON, "bh = next_bh"),
    Mutant("head not kept", KEPT_ON, "m_block = next_block"),
    Mutant(
        "tile before in K's stage",
        "prior = v_of(base, now[2]), now[2]",
        "prior = v_of(base, now[0]), now[2]",
    ),
    Mutant(
        "tile before released in K's stage",
        "prior = v_of(base, now[2]), now[2]",
        "prior = v_of(base, now[2]), now[0]",
    ),
    Mutant(
        "K's stage does not advance", "now = advance(now[0], now[1]) +", "now = (now[0], now[1]) +"
    ),
    Mutant("V's stage does not advance", "+ advance_v(now[2], now[3])", "+ (now[2], now[3])"),
    Mutant("V's ring as long as K's", "+ advance_v(now[2], now[3])", "+ advance(now[2], now[3])"),
    Mutant(
        "last product in stage 0",
        "last(state, prior[0], warpgroup)",
        "last(state, v_of(base, zero), warpgroup)",
    ),
    Mutant(
        "last row not finished",
        "finish_row(acc_o, m_i, l_i, m_block, bh",
        "m_block == PAST and finish_row(acc_o, m_i, l_i, m_block, bh",
    ),
    Mutant("end before O has left", "if STAGED and lead == 0:", "if False:"),
    Mutant(
        "last O through stage 0",
        "(q[1], base, warpgroup, thread)",
        "(zero, base, warpgroup, thread)",
    ),
)
MUTANTS = (
    *LOADING,
    *TILES,
    *((ROW_OF, mutant) for mutant in ROW),
    *((MASKING_OF, mutant) for mutant in MASKING),
    *((WATCH, mutant) for mutant in BAD_KEYS),
    *((RINGS_OF, mutant) for mutant in STAGES),
    *((ONLINE_OF, mutant) for mutant in (*STATE, *UPDATE)),
    *((RECOVERY_OF, mutant) for mutant in (*SCORES, *RECOVERY)),
    *((HALVES_OF, mutant) for mutant in HALVES),
    *((WHOLE_OF, mutant) for mutant in WHOLE),
    *((COMPUTE, mutant) for mutant in STREAM),
)
