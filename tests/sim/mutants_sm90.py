"""Faults of the Hopper forward kernel and of its computing warpgroups: (module, Mutant)."""

from mutants import Mutant
from mutants_sm90_load import FINITE, LOAD, LOADING, PIPELINE, swapped, without
from mutants_sm90_tile import CONFIG, FWD, GEMM, KEPT, SOFTMAX, STORE, TILES, WARPS

COMPUTE = "nbflash.kernels.sm90_compute"
# In the order of their imports.
CHAIN = (PIPELINE, FINITE, WARPS, GEMM, KEPT, STORE, SOFTMAX, CONFIG, LOAD, COMPUTE, FWD)
START_OF_O = "start = types.uint32(base + stage * Q_BYTES + turn * 64 * ROW_BYTES)"
SEND_O = "tma_store_4d(o_map, panel * PANEL, row * TILE_M + 64 * turn, h, b, source)"
UPPER, LOWER = "if upper < nq:", "if upper + 8 < nq:"
IN_STORE, IN_FINISH = "\n" + " " * 8, "\n" + " " * 12
ROW = (
    Mutant("l of one lane", "        l = row_total(l)\n", ""),
    Mutant("O in stage 0", START_OF_O, START_OF_O.replace(" + stage * Q_BYTES", "")),
    Mutant("O over the first 64", START_OF_O, START_OF_O.replace(" + turn * 64 * ROW_BYTES", "")),
    without("fence before O leaves", "fence_proxy_async()"),
    without("barrier before O leaves", "bar_sync(STORERS + turn, 128)"),
    swapped(
        "fence after the barrier",
        "fence_proxy_async()" + IN_STORE,
        "bar_sync(STORERS + turn, 128)" + IN_STORE,
    ),
    Mutant("barrier of both warpgroups", "bar_sync(STORERS + turn, 128)", "bar_sync(STORERS, 128)"),
    Mutant("barrier of 64 threads", "(STORERS + turn, 128)", "(STORERS + turn, 64)"),
    Mutant("O of the first warpgroup", "if thread % 128 == 0:", "if thread == 0:"),
    Mutant("O sent by every warp", "if thread % 128 == 0:", "if thread % 32 == 0:"),
    Mutant("first panel of O", "range(PANELS)", "range(1)"),
    Mutant("panels of O in one place", SEND_O, SEND_O.replace("panel * PANEL", "0")),
    Mutant(
        "panels of O from one place", "start + types.uint32(panel * TILE_M * ROW_BYTES)", "start"
    ),
    Mutant("panels of O of 64 rows", "panel * TILE_M * ROW_BYTES", "panel * 64 * ROW_BYTES"),
    Mutant("O on top of the first 64", SEND_O, SEND_O.replace(" + 64 * turn", "")),
    Mutant("O of row tile 0", SEND_O, SEND_O.replace("row * TILE_M + ", "")),
    Mutant("h and b of O swapped", SEND_O, SEND_O.replace("h, b", "b, h")),
    without("commit of O's copy", "bulk_commit()"),
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
    Mutant("bounds past the last row", "min(upper + 8, nq - 1)", "upper + 8"),
    Mutant(
        "bounds of plane 0", "row_of_thread(thread), plane * nq\n", "row_of_thread(thread), 0\n"
    ),
    Mutant("plane of the head before", "plane = plane_of[bh]", "plane = plane_of[max(bh - 1, 0)]"),
    Mutant(
        "bounds of row tile 0",
        "row * TILE_M + row_of_thread(thread), plane",
        "row_of_thread(thread), plane",
    ),
    Mutant(
        "bounds of the upper row", "first + min(upper + 8, nq - 1)", "first + min(upper, nq - 1)"
    ),
    Mutant("low ends for high ends", "row_bounds(hi, plane", "row_bounds(lo, plane"),
    Mutant("interval of the upper row", "(lows[1], highs[1]", "(lows[0], highs[0]"),
    Mutant("interval of the next keys", "(lows[0], highs[0], n0", "(lows[0], highs[0], n0 + 8"),
    Mutant("bits of the next tile", "hide(kind - BITS)", "hide(kind - BITS + 1)"),
    Mutant("bits of the upper row", BITS_OF, BITS_OF.replace(" + 8", "")),
    Mutant("bits of other columns", "quad = 2 * (thread % 4)\n", "quad = 2 * (thread % 4 ^ 1)\n"),
    Mutant("bits taken for an interval", "if kind == INTERVAL:", "if kind >= INTERVAL:"),
    Mutant(
        "interval taken for a full tile",
        "if kind == FULL:\n            return",
        "if kind <= INTERVAL:\n            return",
    ),
    Mutant("bad keys of stage 0", "BAD // 4 + BAD_WORDS * stage)", "BAD // 4)"),
    Mutant("bad keys of other columns", GATHERED, GATHERED.replace("% 4", "% 4 ^ 1")),
    Mutant("bad keys of the upper row", "(keep[1] & mine)", "(keep[0] & mine)"),
    Mutant("bad keys that are hidden", "(keep[0] & mine)", "(mine)"),
    Mutant(
        "bad keys of the first 32",
        "BAD_USED, (_, _, BAD, _, _) = cfg.tile_m, cfg.tile_n // 32",
        "BAD_USED, (_, _, BAD, _, _) = cfg.tile_m, 1",
    ),
    Mutant("nobody poisoned", "select(equal(b, 0), x, math.nan)", "x"),
)
ARRIVE_K = "mbarrier_arrive(base + EMPTY_K + 8 * stage)"
ARRIVE_V = "mbarrier_arrive(base + EMPTY_V + 8 * is_there)"
ARRIVE_Q = "mbarrier_arrive(base + EMPTY_Q + 8 * stage)"
WAIT_K = "mbarrier_wait(base + FULL_K + 8 * stage, phase)"
WAIT_V = "mbarrier_wait(base + FULL_V + 8 * v_stage, v_phase)"
WAIT_Q = "mbarrier_wait(base + FULL_Q + 8 * q_stage, q_phase)"
WAIT, HOLD, FENCE, COMMIT = (
    "wait_all()\n",
    "wgmma_hold(l[0] + l[1])\n",
    "wgmma_fence()\n",
    "wgmma_commit()\n",
)
LINE = " " * 12
RELEASE = f"if lead == 0:\n{LINE}    {ARRIVE_K}\n"
RELEASE_V = f"{LINE}    if not first or is_there >= 0:\n{LINE}        {ARRIVE_V}\n"
SETTLED = "acc, s_b = settled(acc), settled(s_b)\n"
WAITED = HOLD + LINE + WAIT + LINE + SETTLED + LINE
NEXT_K = "k_of(base, stage) + NEXT_HALF"
LATE_RELEASE = "row != PAST and not following[0] & FIRST:"
STEP = (
    without("wait for full K", WAIT_K),
    Mutant("full K of the other phase", WAIT_K, WAIT_K.replace(", phase", ", phase ^ 1")),
    Mutant("full K of stage 0", WAIT_K, WAIT_K.replace(" + 8 * stage", "")),
    Mutant("record of stage 0", "RECORDS // 4 + RECORD_WORDS * stage)", "RECORDS // 4)"),
    Mutant(
        "record of this tile again", "smem, place, after[0], after[1]", "smem, place, stage, phase"
    ),
    Mutant("K of stage 0", "lower(base + K, 16) + stage *", "lower(base + K, 16) + 0 *"),
    Mutant(
        "V of stage 0", "lower(base + V, KV_PANEL) + stage *", "lower(base + V, KV_PANEL) + 0 *"
    ),
    Mutant("panels of V", "lower(base + V, KV_PANEL)", "lower(base + V, 16)"),
    Mutant("K for V", "lower(base + V, KV_PANEL)", "lower(base + K, KV_PANEL)"),
    Mutant("V for K", "lower(base + K, 16)", "lower(base + V, 16)"),
    Mutant(
        "first half of V twice", "issue_pv(acc, p, v_ago + NEXT_HALF)", "issue_pv(acc, p, v_ago)"
    ),
    Mutant("first half of the last V twice", "ago[0] + NEXT_HALF", "ago[0]"),
    Mutant("second half of V twice", "v_of(base, v_stage))", "v_of(base, v_stage) + NEXT_HALF)"),
    Mutant("first half of K twice", NEXT_K, "k_of(base, stage)"),
    Mutant("half of a half", "HALF * ROW_BYTES >> 4", "HALF * ROW_BYTES >> 5"),
    Mutant(
        "V of this tile in both halves",
        "issue_pv(acc, p, v_ago",
        "issue_pv(acc, p, v_of(base, v_stage)",
    ),
    Mutant("V of the tile before in both halves", "p, v_of(base, v_stage))", "p, v_ago)"),
    Mutant("next K from this tile", "k_of(base, after[0])", "k_of(base, stage)"),
    Mutant("Q of stage 0", "words + stage * (Q_BYTES // 4) + row", "words + row"),
    Mutant("wide Q of stage 0", "lower(base + stage * Q_BYTES + turn", "lower(base + turn"),
    without("Q of the next row", "q_now = q_of(smem, place, q_stage, turn, thread)"),
    *(without(f"fence before product {i}", FENCE.strip(), 4, i) for i in range(4)),
    *(without(f"commit of product {i}", COMMIT.strip(), 4, i) for i in range(4)),
    *(without(f"wait for product {i}", WAIT.strip(), 4, i) for i in range(4)),
    Mutant("S in two hands", SETTLED, "acc, _ = settled(acc), settled(s_b)\n"),
    Mutant("settled before the wait", WAIT + LINE + SETTLED, SETTLED + LINE + WAIT),
    Mutant("K released too early", WAITED + RELEASE, RELEASE + LINE + WAITED + "if lead == 0:\n"),
    Mutant(
        "V released too early",
        WAITED + RELEASE + RELEASE_V,
        f"if lead == 0:\n{RELEASE_V}{LINE}{WAITED}{RELEASE}",
    ),
    Mutant("no mask on the first half", "s_a = keep_a(s_a, keep)", "pass"),
    Mutant("no mask on the second half", "s_b = keep_b(s_b, keep)", "pass"),
    Mutant("mask of the second half first", "s_a = keep_a(s_a", "s_a = keep_b(s_a"),
    Mutant("mask of the first half again", "s_b = keep_b(s_b", "s_b = keep_a(s_b"),
    without("wait for full V", WAIT_V),
    Mutant("full V of the other phase", WAIT_V, WAIT_V.replace("v_phase", "v_phase ^ 1")),
    Mutant("full V of K's stage", WAIT_V, WAIT_V.replace("v_stage", "stage")),
    Mutant("full V in K's phase", WAIT_V, WAIT_V.replace("v_phase", "phase")),
    Mutant("empty V awaited", WAIT_V, WAIT_V.replace("FULL_V", "EMPTY_V")),
    without("release of K", ARRIVE_K),
    Mutant("release of the next K", ARRIVE_K, ARRIVE_K.replace("stage", "after[0]")),
    without("release of V", ARRIVE_V),
    Mutant("release of this V", ARRIVE_V, ARRIVE_V.replace("is_there", "v_stage")),
    Mutant("release of a V before the first", "if not first or is_there >= 0:", "if True:"),
    Mutant("no release of V where a row begins", "if not first or is_there >= 0:", "if not first:"),
    Mutant("releases of every warp", RELEASE, RELEASE.replace("lead", "lead % 32")),
    Mutant("full tiles poisoned", "if masked and kind != FULL:", "if masked:"),
    Mutant("bad keys of K's stage", "bad_of(smem, words, v_stage", "bad_of(smem, words, stage"),
    Mutant(
        "finish before the first row",
        f"if row != PAST:\n{LINE}        finish",
        f"if True:\n{LINE}        finish",
    ),
    Mutant("finishes with the next m", "finish_row(acc, m_ago,", "finish_row(acc, m,"),
    Mutant(
        "finishes with the next l", "finish_row(acc, m_ago, l_ago,", "finish_row(acc, m_ago, l,"
    ),
    Mutant("O goes on into the next row", "acc = O_START\n", "pass\n"),
    Mutant(
        "O not rescaled by the first half",
        f"elif grown:\n{LINE}    acc = scale_fragment(acc, alpha)",
        "elif grown:\n                pass",
    ),
    Mutant(
        "O not rescaled by the second half",
        f"{LINE}if grown:\n{LINE}    acc = scale_fragment(acc, alpha)\n",
        "",
    ),
    Mutant("Q never changes", "if following[0] & FIRST:", "if False:"),
    Mutant("Q changes with every tile", "if following[0] & FIRST:", "if True:"),
    without("next stage of Q", "q_stage, q_phase = advance_q(q_stage, q_phase)"),
    without("wait for full Q", WAIT_Q),
    Mutant("full Q of the other phase", WAIT_Q, WAIT_Q.replace("q_phase", "q_phase ^ 1")),
    Mutant("straight: no release of Q", "mbarrier_arrive(base + EMPTY_Q + 8 * q_stage)", "pass"),
    Mutant("no release of Q after a row of one tile", "elif first and row != PAST:", "elif False:"),
    Mutant("release of no Q", "elif first and row != PAST:", "elif first:"),
    Mutant("no release of Q", LATE_RELEASE, "False:"),
    Mutant("two releases of Q", LATE_RELEASE, "row != PAST:"),
    Mutant("release of a Q before the first", LATE_RELEASE, "not following[0] & FIRST:"),
    Mutant(
        "releases of Q by every warp",
        "STAGED and lead == 0 and row",
        "STAGED and lead % 32 == 0 and row",
    ),
    Mutant(
        "release of this Q",
        f"FIRST:\n{LINE}    release_q(base, q_ago)",
        f"FIRST:\n{LINE}    release_q(base, q_stage)",
    ),
    Mutant(
        "release of this Q after one tile",
        f"release_q(base, q_ago)\n{LINE}    q_stage",
        f"release_q(base, q_stage)\n{LINE}    q_stage",
    ),
    without("wait for O's copy", "bulk_wait_read()", 2),
    Mutant(
        "Q released while O leaves",
        f"bulk_wait_read(){IN_STORE}{ARRIVE_Q}",
        f"{ARRIVE_Q}{IN_STORE}bulk_wait_read()",
    ),
    without("arrival for Q", ARRIVE_Q),
    Mutant("arrival for Q of stage 0", ARRIVE_Q, ARRIVE_Q.replace(" + 8 * stage", "")),
    Mutant("P of the first half again", "return (acc, pack(weights), s_a", "return (acc, p, s_a"),
    Mutant(
        "seen of the first half",
        "return (acc, pack(weights), s_a, m, l, seen), following",
        "return (acc, pack(weights), s_a, m, l, types.uint32(ALL)), following",
    ),
)
RAISED = "m = m[0] + risen[0], m[1] + risen[1]"
SHRUNK = "l = l[0] * alpha[0], l[1] * alpha[1]"
SEEN = "if upper and below else"
STATISTICS = (
    Mutant("one of two rows has met a key", SEEN, "if upper or below else"),
    Mutant("the upper row has met a key", SEEN, "if upper else"),
    Mutant("the lower row has met a key", SEEN, "if below else"),
    Mutant("every row has met a key", "seen_of(best, PAIR)", "types.uint32(ALL)"),
    Mutant("m never outgrown", "types.float32(1)), outgrown(e, seen)", "types.float32(1)), False"),
    Mutant("m not raised", RAISED, "pass"),
    Mutant("m raised by the other row", RAISED, "m = m[0] + risen[1], m[1] + risen[0]"),
    Mutant("l not rescaled", SHRUNK, "pass"),
    Mutant("l rescaled by the other row", SHRUNK, "l = l[0] * alpha[1], l[1] * alpha[0]"),
    Mutant(
        "l of a lane for the row's",
        "best, total = row_max(e), row_total(l)",
        "best, total = row_max(e), l",
    ),
    Mutant("P of the old m", "weights = exponentials(e)\n        return", "pass\n        return"),
    Mutant("exponents not lowered", "e, alpha, seen = lowered(e, risen),", "e, alpha, seen = e,"),
    Mutant(
        "alpha forgotten",
        "seen, grown, alpha\n\n",
        "seen, grown, (types.float32(1), types.float32(1))\n\n",
    ),
    Mutant(
        "first half not summed",
        "return weights, m, row_sum(PAIR, weights)",
        "return weights, m, PAIR",
    ),
)
KEPT_ON = "row, bh, q_ago = next_row, next_bh, q_stage"
STREAM = (
    without("wait for the first Q", "mbarrier_wait(base + FULL_Q, 0)"),
    Mutant("one warpgroup's rows", " + turn * 64 * ROW_BYTES, 16)", ", 16)"),
    Mutant(
        "END not noticed by the first",
        "        if kind != END:\n            row",
        "        if True:\n            row",
    ),
    Mutant("END not noticed", "while kind != END:", "while True:"),
    Mutant(
        "full tiles that begin no row",
        "                if kind == FULL:\n                    keep",
        "                if kind & ~FIRST == FULL:\n                    keep",
    ),
    Mutant(
        "masked tiles taken for full ones",
        "                if kind == FULL:\n                    keep",
        "                if not kind & FIRST:\n                    keep",
    ),
    Mutant("no row begins", "elif kind & FIRST:", "elif kind == FIRST | FULL:"),
    Mutant("FIRST left in the kind", "kind & ~FIRST, (row,", "kind, (row,"),
    Mutant("finishes the next row", "(row, bh, result, q_ago)", "(next_row, bh, result, q_ago)"),
    Mutant("finishes the next head", "(row, bh, result, q_ago)", "(row, next_bh, result, q_ago)"),
    Mutant(
        "finishes in this row's stage", "(row, bh, result, q_ago)", "(row, bh, result, q_stage)"
    ),
    Mutant(
        "bounds of the row before",
        "                    bounds = bounds_of(masking, next_row",
        "                    bounds_of(masking, next_row",
    ),
    Mutant(
        "bounds of the head before",
        "bounds_of(masking, next_row, next_bh, thread)",
        "bounds_of(masking, next_row, bh, thread)",
        1,
        2,
    ),
    Mutant("row not kept", KEPT_ON, "bh, q_ago = next_bh, q_stage"),
    Mutant("head not kept", KEPT_ON, "row, q_ago = next_row, q_stage"),
    Mutant("stage not kept", KEPT_ON, "row, bh = next_row, next_bh"),
    Mutant("stage kept too late", KEPT_ON, "row, bh, q_ago = next_row, next_bh, q[1]"),
    Mutant(
        "tile before in K's stage",
        "ago = v_of(base, now[2]), now[2]",
        "ago = v_of(base, now[0]), now[2]",
    ),
    Mutant(
        "tile before released in K's stage",
        "ago = v_of(base, now[2]), now[2]",
        "ago = v_of(base, now[2]), now[0]",
    ),
    Mutant(
        "K's stage does not advance", "now = advance(now[0], now[1]) +", "now = (now[0], now[1]) +"
    ),
    Mutant("V's stage does not advance", "+ advance_v(now[2], now[3])", "+ (now[2], now[3])"),
    Mutant("V's ring as long as K's", "+ advance_v(now[2], now[3])", "+ advance(now[2], now[3])"),
    Mutant("last product left out", "acc = issue_pv(acc, p, ago[0] + NEXT_HALF)", "pass"),
    Mutant(
        "last row not finished",
        "finish_row(settled(acc), m, l, row, bh",
        "row == PAST and finish_row(settled(acc), m, l, row, bh",
    ),
    Mutant("end before O has left", "if STAGED and lead == 0:", "if False:"),
)
MUTANTS = (
    *LOADING,
    *TILES,
    *((COMPUTE, mutant) for mutant in (*ROW, *MASKING, *STEP, *STATISTICS, *STREAM)),
)
