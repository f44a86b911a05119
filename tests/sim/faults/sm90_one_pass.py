"""Faults of the computing warpgroups of the Hopper backward in one pass, as data."""

from mutants import Mutant, lines, swapped, without

COMPUTE = "nbflash.backends.sm90.backward.one_pass"


IN_SHARE = "\n" + " " * 8
EMPTY = (
    Mutant("empty columns past the end", "min(TILE_N, nk - n_block * TILE_N)", "TILE_N"),
    Mutant("empty columns of head 0", "b * stride[0] + h_kv * stride[2]", "b * stride[0]"),
    without("dK of empty columns", "dk[at] = zero"),
    without("dV of empty columns", "dv[at] = zero"),
    Mutant("empty columns of the work list", "types.int32(live + cuda.b", "types.int32(cuda.b"),
)
FIRST_END, NEXT_END = "kind), left_of(n_block, nk, thread)", "kind), left_of(following, nk, thread)"
ENDING = (
    Mutant("keys past the end add to dQ", "if not EDGE:", "if True:"),
    Mutant("lower key past the end as the upper", "left > i % 2 * 8", "left > 0"),
    Mutant("first key past the end adds to dQ", "left > i % 2 * 8", "left >= i % 2 * 8"),
    Mutant("end of the first keys", "nk - n_block * TILE_N - row", "nk - row"),
    Mutant("end of a thread's keys", "nk - n_block * TILE_N - row", "nk - n_block * TILE_N"),
    Mutant("end of the first column", FIRST_END, FIRST_END.replace("n_block", "0")),
    Mutant("end of the column before", NEXT_END, FIRST_END),
)
SHARED_ROW = "base + DS + warpgroup * 64 * ROW_BYTES"
DS_FULL = "if CONSUMERS == 2:\n            bar_arrive(DS_FULL + 1 - warpgroup, 256)\n"
WAIT_DS = "bar_sync(DS_FREE + warpgroup, 128 * CONSUMERS)"
ARRIVE_DQ = "bar_arrive(DQ_FULL + warpgroup, DQ_THREADS)\n\n    @inlined\n    def ahead"
PLACE_OF_PART = "words + DQ // 4 + warpgroup * PART + (thread & 127) * 4"
SHARING = (
    Mutant("nobody poisoned", "scale, math.nan)", "scale, scale)"),
    Mutant("lower key as the upper", "for i in (0, 8))", "for i in (0, 0))"),
    Mutant("bad keys of stage 0", "BAD // 4 + BAD_WORDS * k_stage + (", "BAD // 4 + ("),
    Mutant("bad keys of word 0", " + (key >> 5))] >>", ")] >>"),
    Mutant(
        "bad keys of full tiles",
        "if FULL_TILES:\n            return scale",
        "if False:\n            return scale",
    ),
    Mutant("bad key 0", ">> (key & 31)", ">> 0"),
    Mutant(
        "keys of the first warpgroup",
        "lower(base + K + warpgroup * 64 * ROW",
        "lower(base + K + 0 * ROW",
    ),
    Mutant(
        "K in stage 0", "64 * ROW_BYTES, 16) + k_stage * (KV_BYTES >> 4)\n", "64 * ROW_BYTES, 16)\n"
    ),
    Mutant("Q in stage 0", "lower(base, 16) + stage * (Q_BYTES >> 4)", "lower(base, 16)"),
    Mutant("dS in one place", SHARED_ROW, "base + DS"),
    Mutant("dS of one for both", WAIT_DS, WAIT_DS.replace(" + warpgroup", "")),
    Mutant("dS not announced", DS_FULL, ""),
    Mutant(
        "dS announced before its fence",
        f"fence_proxy_async(){IN_SHARE}{DS_FULL}",
        f"{DS_FULL}{IN_SHARE}fence_proxy_async()\n",
    ),
    Mutant("dS announced to oneself", "DS_FULL + 1 - warpgroup", "DS_FULL + warpgroup"),
    Mutant(
        "parts of dQ in one place", PLACE_OF_PART, PLACE_OF_PART.replace("warpgroup * PART + ", "")
    ),
    Mutant(
        "fence after dQ's arrival",
        "fence_proxy_async()" + IN_SHARE + ARRIVE_DQ,
        ARRIVE_DQ.replace(")\n\n", ")" + IN_SHARE + "fence_proxy_async()\n\n", 1),
    ),
    Mutant("dQ announced to the first", ARRIVE_DQ, ARRIVE_DQ.replace(" + warpgroup", "")),
    Mutant("slots in one place", "SLOTS // 4 + warpgroup] = slot", "SLOTS // 4] = slot"),
    Mutant("slot of the first warpgroup", "if is_leader(thread):", "if thread == 0:"),
)
WAIT_DO = "mbarrier_wait(base + FULL_DO + 8 * stage, phase_of(tile))"
PART_OF_K = "lower(base + K + warpgroup * PART_K, KV_PANEL) + k_stage * (KV_BYTES >> 4)"
START_OF_DP = "issue_dp(by_keys(minus_deltas), v, dout)"
WAIT_FULL = "bar_sync(DS_FULL + warpgroup, 128 * CONSUMERS)"
STEP = (
    Mutant("δ of the first stage", "at = stage_of(tile)\n", "at = stage_of(tile) * 0\n"),
    Mutant("panels of dS above 64 queries", "KV_PANEL if TILE_M > 64 else 0", "0"),
    Mutant("panels of K at 64 queries", "0 if TILE_M > 64 else KV_PANEL", "0"),
    Mutant("a panel of K for each 64 queries", "0 if TILE_M > 64 else KV_PANEL", "KV_PANEL"),
    Mutant("first panel of K", PART_OF_K, PART_OF_K.replace("warpgroup * PART_K", "0")),
    Mutant("dQ with K of stage 0", PART_OF_K, "lower(base + K + warpgroup * PART_K, KV_PANEL)"),
    Mutant("first queries' dS", "DS + warpgroup * PART_DS", "DS"),
    Mutant("V of the first warpgroup", "base + V + warpgroup * 64 * ROW_BYTES", "base + V"),
    Mutant("dO of stage 0", WAIT_DO, WAIT_DO.replace(" + 8 * stage", "")),
    Mutant(
        "dP with dO of stage 0",
        "lower(base + DO, 16) + stage * (Q_BYTES >> 4)",
        "lower(base + DO, 16)",
    ),
    Mutant(
        "dV with dO of stage 0",
        "Q_PANEL) + stage * (Q_BYTES >> 4))\n        if",
        "Q_PANEL))\n        if",
    ),
    Mutant("dP without δ", START_OF_DP, "issue_scores(S_START, v, dout)"),
    Mutant("no δ, late", "dp = less_deltas(dp, stats, place, stage, pair)", "pass"),
    Mutant(
        "late shifts of stage 0",
        "shifts_of(stats, place, stage, pair)",
        "shifts_of(stats, place, 0, pair)",
    ),
    Mutant(
        "late δ of stage 0",
        "less_deltas(dp, stats, place, stage,",
        "less_deltas(dp, stats, place, 0,",
    ),
    Mutant(
        "mask of the first key",
        "smem, place, stage, row, pair, scoring)",
        "smem, place, stage, row * 0, pair, scoring)",
    ),
    Mutant("dP not settled", "dp = after_wait(dp)", "pass"),
    Mutant("dS not shared", "share_scores(ds, warpgroup, place, thread)", "pass"),
    Mutant("P shared for dS", "share_scores(ds, warpgroup", "share_scores(pack(p), warpgroup"),
    Mutant(
        "early dV of V", "issue_acc(acc_dv, packed, dout)", "issue_acc(acc_dv, packed, v)", 0, 2
    ),
    Mutant("dK of dO", "issue_acc(acc_dk, ds, q)", "issue_acc(acc_dk, ds, dout)"),
    Mutant(
        "dK with Q of stage 0",
        "lower(base, Q_PANEL) + stage * (Q_BYTES >> 4)",
        "lower(base, Q_PANEL)",
    ),
    Mutant("dS of the first for both", WAIT_FULL, WAIT_FULL.replace(" + warpgroup", "")),
)
RELEASE_V = "mbarrier_arrive(base + EMPTY_V)"
RELEASE_Q = "mbarrier_arrive(base + EMPTY_Q + 8 * stage_of(tile))"
RELEASE_K = "mbarrier_arrive(base + EMPTY_K + 8 * (k_stage_of(types.int32(column - one))))"
START = lines(8, "if CONSUMERS == 2:", "    bar_arrive(DS_FREE + 1 - warpgroup, 256)")
FREE = lines(20, "if CONSUMERS == 2:", "    bar_arrive(DS_FREE + 1 - warpgroup, 256)")
WAIT_DV, WAIT_DQ = lines(20, "wait_all_but_two()"), lines(20, "wait_all_but_one()")
FIRST_S, WAIT_S = lines(12, "wait_all()", "s = after_wait(s)"), lines(20, "wait_all()")
SETTLED = lines(20, "acc_dk, dq = after_wait(acc_dk), after_wait(dq)")
WAIT_EMPTY = lines(20, "bar_sync(DQ_EMPTY + warpgroup, DQ_THREADS)")
RELEASES = lines(20, "if leader:", f"    {RELEASE_Q}")
NEXT = lines(20, "tile += one")
AHEAD = lines(20, "minus_deltas, shifts = ahead(stats, place, tile, thread)")
SHARE = lines(20, "share_part(dq, slot, warpgroup, smem, stats, place, thread)")
DESCRIPTOR = lines(
    20,
    "_, n_block, bh, slot = read_descriptor(",
    "    smem, words + DESCRIPTORS // 4 + COLUMN_DESCRIPTOR_WORDS * stage_of(tile)",
    ")",
)
COLUMN = lines(24, "column += one")
EARLY_K = lines(
    24,
    "if leader:",
    "    mbarrier_arrive(base + EMPTY_K + 8 * k_stage_of(types.int32(column - one)))",
)
SCALES = "scales = first_scales(smem, place, column, unit, thread)"
NEXT_SCALES = lines(24, "if kind != END:", f"    {SCALES}")
NEXT_SCORES = "warpgroup, place, stage_of(types.int32(tile + one)), k_stage_of(column)"
SUMS, NO_SUMS = "acc_dk, acc_dv = ACC_START, ACC_START", "if column == 0:"
NOT_YET = lines(16, "ends = False")
STREAM = (
    Mutant("dS not free at first", START, ""),
    Mutant("dS free for oneself", START, START.replace("1 - warpgroup", "warpgroup")),
    Mutant("first S left in flight", FIRST_S, lines(12, "s = after_wait(s)")),
    Mutant("S left in flight", WAIT_S, ""),
    Mutant("first S not settled", FIRST_S, lines(12, "wait_all()")),
    Mutant("sums of the column before", SUMS, f"{NO_SUMS}\n{lines(20, SUMS)}"),
    Mutant("dQ with the first K", "tile, k_stage_of(column), smem", "tile, 0, smem"),
    Mutant(
        "this tile again",
        "descriptor_of(smem, place, types.int32(tile + one))",
        "descriptor_of(smem, place, tile)",
    ),
    Mutant("V released by every warp", lines(24, "if leader:"), lines(24, "if thread % 32 == 0:")),
    Mutant("V released before dP", NOT_YET, NOT_YET + lines(16, "if leader:", f"    {RELEASE_V}")),
    Mutant("column never ends", "column += one", "column += 0 * one"),
    Mutant("next K not awaited", NEXT_SCALES, ""),
    Mutant(
        "S with the last K",
        NEXT_SCORES,
        NEXT_SCORES.replace("(column)", "(types.int32(column - ends))"),
    ),
    Mutant("S of this tile", NEXT_SCORES, NEXT_SCORES.replace("types.int32(tile + one)", "tile")),
    Mutant("dV left in flight", WAIT_DV, ""),
    Mutant("dV not settled", "acc_dv = after_wait(acc_dv)\n", "pass\n"),
    Mutant("dQ left in flight", WAIT_DQ, ""),
    Mutant("dQ not settled", SETTLED, lines(20, "acc_dk = after_wait(acc_dk)")),
    Mutant("dK not settled", SETTLED, lines(20, "dq = after_wait(dq)")),
    Mutant("dS never free again", FREE, ""),
    Mutant("dS free before dQ", WAIT_DQ + SETTLED + FREE, FREE + WAIT_DQ + SETTLED),
    Mutant("no wait until dQ has been read", WAIT_EMPTY, ""),
    Mutant("dQ's place of the first", WAIT_EMPTY, WAIT_EMPTY.replace(" + warpgroup", "")),
    Mutant("release of the next Q", RELEASE_Q, RELEASE_Q.replace("(tile)", "(tile + 1)")),
    Mutant("release of stage 0", RELEASE_Q, RELEASE_Q.replace(" + 8 * stage_of(tile)", "")),
    Mutant(
        "Q and dO released by every warp", RELEASES, RELEASES.replace("leader", "thread % 32 == 0")
    ),
    Mutant(
        "descriptor read after its release",
        DESCRIPTOR + WAIT_EMPTY + RELEASES,
        WAIT_EMPTY + RELEASES + DESCRIPTOR,
    ),
    Mutant(
        "released before all have read the descriptor", WAIT_EMPTY + RELEASES, RELEASES + WAIT_EMPTY
    ),
    Mutant("Q released before dK", WAIT_DV, lines(20, "if leader:", f"    {RELEASE_Q}") + WAIT_DV),
    Mutant(
        "dQ stored before the last was read",
        WAIT_EMPTY + RELEASES + SHARE,
        SHARE + WAIT_EMPTY + RELEASES,
    ),
    Mutant("shift of this tile", NEXT + AHEAD, AHEAD + NEXT),
    Mutant(
        "descriptor of the next tile",
        DESCRIPTOR,
        DESCRIPTOR.replace("(tile)", "(types.int32(tile + one))"),
    ),
    Mutant("next K released", RELEASE_K, RELEASE_K.replace("column - one", "column")),
    Mutant("K released before dQ", COLUMN, COLUMN + EARLY_K),
    Mutant("dK not scaled", "finish(dk, acc_dk, scale,", "finish(dk, acc_dk, ONE,"),
    Mutant("dV scaled", "finish(dv, acc_dv, ONE,", "finish(dv, acc_dv, scale,"),
    Mutant("END not noticed", "if kind != END:\n            kind", "if True:\n            kind"),
    Mutant("−kind of a first tile", FIRST_END, FIRST_END.replace("kind)", "-kind)")),
    Mutant("−kind of a column's first tile", NEXT_END, NEXT_END.replace("kind)", "-kind)")),
    Mutant("stores never end", "warpgroup] = -1", "warpgroup] = 0"),
    Mutant(
        "columns written for rows",
        "min(TILE_N, nk - n_block * TILE_N) * PAIRS",
        "min(TILE_N * PAIRS, nk - n_block * TILE_N)",
    ),
    swapped(
        "slot told after its part",
        lines(8, "if is_leader(thread):", "    smem[words + SLOTS // 4 + warpgroup] = slot"),
        lines(8, "fence_proxy_async()", "bar_arrive(DQ_FULL + warpgroup, DQ_THREADS)"),
    ),
)
STREAMING = tuple((COMPUTE, mutant) for mutant in (*EMPTY, *ENDING, *SHARING, *STEP, *STREAM))
