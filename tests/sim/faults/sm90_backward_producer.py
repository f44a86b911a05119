"""Faults of what the loading warpgroup of the Hopper backward does, as data.

Those that the family ``columns`` plants are not repeated.
"""

from mutants import Mutant, without

LOAD = "nbflash.backends.sm90.backward.producer"
SEND_Q = "send(base + stage * Q_BYTES, Q_PANEL, q_map, m0, h, b, bar)"
SEND_DO = "send(base + DO + stage * Q_BYTES, Q_PANEL, do_map, m0, h, b, bar)"
SEND_K = "send_keys(to, k_map, n_block, h_kv, b, empty, bar, phase)"
SEND_V = "send_keys(base + V, v_map, n_block, h_kv, b, empty, bar, phase)"
WAIT_Q = "mbarrier_wait(base + EMPTY_Q + 8 * stage, phase_of(tile) ^ 1)"
ROUNDS = "while types.int32(round_ * opaque(types.int32(cuda.gridDim.x))) < live:"
SLOT = "slot = types.int32(bh * n_col"
DESCRIPTOR = "smem, descriptor, types.int32(sign * kind), n_block, bh_kv, slot"
PLACE_OF_DESCRIPTOR = "words + DESCRIPTORS // 4 + COLUMN_DESCRIPTOR_WORDS * stage\n"
END_DESCRIPTOR = (
    "write_descriptor(\n"
    "            smem, words + DESCRIPTORS // 4 + COLUMN_DESCRIPTOR_WORDS * stage, END, 0, 0, 0\n"
    "        )"
)
EXPECT_FULL = "mbarrier_arrive_expect_tx(bar, TILE_BYTES)"
SENDING = (
    Mutant("first panel again", "tensor_map, panel * PANEL, row", "tensor_map, 0, row"),
    Mutant("panels in one place", "to + panel * panel_bytes", "to"),
    Mutant("bytes of Q for K", "expect_tx(full, KV_BYTES)", "expect_tx(full, cfg.q_bytes)"),
    Mutant("bytes of K for dO", "expect_tx(bar, Q_BYTES)", "expect_tx(bar, KV_BYTES)"),
    Mutant(
        "bytes of Q without its statistics", EXPECT_FULL, EXPECT_FULL.replace(")", " - STAT_BYTES)")
    ),
    Mutant("bytes of low ends alone", "TILE_BYTES + STAT_BYTES", "TILE_BYTES"),
    Mutant("bits not expected", "TILE_BYTES + BIT_BYTES", "TILE_BYTES"),
    Mutant("masked tiles not looked at", "select(equal(kind, FULL), bar, bar + raw)", "bar"),
    Mutant("Q in stage 0", SEND_Q, SEND_Q.replace(" + stage * Q_BYTES", "")),
    Mutant("Q of the key head", SEND_Q, SEND_Q.replace("m0, h,", "m0, h_kv,")),
    Mutant("Q of batch 0", SEND_Q, SEND_Q.replace(" b,", " 0,")),
    Mutant("dO in stage 0", SEND_DO, SEND_DO.replace(" + stage * Q_BYTES", "")),
    Mutant("Q for dO", SEND_DO, SEND_DO.replace("do_map", "q_map")),
    Mutant("panels of dO half as far apart", SEND_DO, SEND_DO.replace("Q_PANEL", "Q_PANEL // 2")),
    Mutant("K of the query head", SEND_K, SEND_K.replace("h_kv", "h"), 1, 2),
    Mutant("K in stage 0", "K + k_stage * KV_BYTES, base + ARRIVED_K", "K, base + ARRIVED_K"),
    Mutant("K raw where nobody looks", "FULL_K if FULL_TILES else RAW_K", "RAW_K"),
    Mutant("K told as stage 0", "base + ARRIVED_K + 8 * k_stage\n", "base + ARRIVED_K\n"),
    Mutant("V of the query head", SEND_V, SEND_V.replace("h_kv", "h")),
    Mutant("K for V", SEND_V, SEND_V.replace("v_map", "k_map")),
    Mutant("keys in steps of queries", "n_block * TILE_N)", "n_block * cfg.tile_m // 2)"),
    Mutant("queries in steps of keys", "m_block * TILE_M)", "m_block * TILE_M // 2)"),
)
LOADER = (
    Mutant("empty Q of the other phase", WAIT_Q, WAIT_Q.replace(" ^ 1", ""), 0, 2),
    Mutant("empty V of the other phase", "v_phase_of(column) ^ 1", "v_phase_of(column)"),
    Mutant("empty K of the other phase", "k_phase_of(column) ^ 1", "k_phase_of(column)"),
    Mutant("first round only", ROUNDS, "while round_ < 1:", 0, 2),
    Mutant("first round again and again", "round_ += types.int32(1)", "pass", 0, 2),
    Mutant("descriptor in stage 0", PLACE_OF_DESCRIPTOR, "words + DESCRIPTORS // 4\n"),
    Mutant(
        "end in stage 0",
        END_DESCRIPTOR,
        END_DESCRIPTOR.replace(" + COLUMN_DESCRIPTOR_WORDS * stage", ""),
    ),
    without("descriptor of the end", END_DESCRIPTOR),
    Mutant("no column begins", DESCRIPTOR, DESCRIPTOR.replace("sign * ", "")),
    Mutant("every tile begins a column", "sign = one\n", "pass\n"),
    Mutant(
        "descriptor of the query head",
        "types.int32(b * heads_kv + h_kv)",
        "types.int32(b * heads_kv + h)",
    ),
    Mutant("slot of the key head", SLOT, SLOT.replace("bh", "(b * heads + h_kv)")),
    Mutant("slot of batch 0", SLOT, SLOT.replace("bh", "h")),
    Mutant("first head of a group", "(h_kv + 1) * group", "h_kv * group + 1"),
    Mutant("heads of the first group", "range(types.int32(h_kv * group)", "range(types.int32(0)"),
    Mutant("walk of plane 0", "types.int32(plane * n_row + n_block)", "types.int32(n_block)"),
    Mutant("statistics in stage 0", "STATS + stage * STAT_BYTES, source", "STATS, source"),
    Mutant("bounds of plane 0", "plane * n_col + m_block", "m_block"),
    Mutant("bounds of query tile 0", "plane * n_col + m_block", "plane * n_col"),
    Mutant("bits of the next tile", "kind - BITS)", "kind - BITS + 1)"),
    Mutant("masks in stage 0", "base + MASKS + stage * MASK_BYTES", "base + MASKS"),
    Mutant("K of the last column's stage", "column += one\n", "pass\n"),
    Mutant("tile in the last one's stage", "tile += one\n", "pass\n"),
)
PART_OF = "types.int64(slot) * CONSUMERS + warp"
FIRST_EMPTY = "        bar_arrive(DQ_EMPTY + warp, DQ_THREADS)\n        bar_sync"
NEXT_EMPTY = "            bar_arrive(DQ_EMPTY + warp, DQ_THREADS)\n"
STORE = (
    Mutant("dQ's place is not free", FIRST_EMPTY, "        bar_sync"),
    Mutant("dQ's place not given back", NEXT_EMPTY, ""),
    Mutant("parts of one", PART_OF, PART_OF.replace(" * CONSUMERS", "")),
    Mutant("part 0", PART_OF, PART_OF.replace(" + warp", "")),
    Mutant("part of the first warpgroup", "base + DQ + warp * PART_BYTES", "base + DQ"),
    Mutant("half of a part", "PART_BYTES, PART_BYTES)", "PART_BYTES, PART_BYTES // 2)"),
    Mutant("slot of the first warpgroup", "words + SLOTS // 4 + warp", "words + SLOTS // 4"),
    Mutant("slot 0 is the end", "while slot >= 0:", "while slot > 0:"),
    Mutant(
        "every lane adds", "if lane == 0:\n                part", "if True:\n                part"
    ),
)
BAD_WORD = "smem[words + BAD // 4 + BAD_WORDS * k_stage + word]"
FENCE, SYNC = " " * 8 + "fence_proxy_async()\n", " " * 8 + "cuda.syncwarp()\n"
ROW_OF_Q = "clear_row(smem, words + stage * Q_BYTES // 4, Q_PANEL, row)"
ROW_OF_DO = "clear_row(smem, words + (DO + stage * Q_BYTES) // 4, Q_PANEL, row)"
WAIT_RAW = "mbarrier_wait(base + RAW + 8 * stage, phases >> stage & 1)"
WAIT_RAW_K = "mbarrier_wait(base + RAW_K + 8 * k_stage, k_phase_of(column))"
ARRIVE_K = "if lane == 0:\n" + " " * 24 + "mbarrier_arrive(base + FULL_K"
WALK = "first = types.int32(first + work[at + 2] * group)"
CLEANER = (
    Mutant("one panel cleared", "(i >> 3) * (panel_bytes // 4)", "0"),
    Mutant("half a row cleared", "row * 32 + (i & 7) * 4", "row * 32 + (i & 3) * 4"),
    Mutant("one panel of K looked at", "(i >> 3) * (KV_PANEL // 4)", "0"),
    Mutant("K not looked at", "if masked:", "if False:"),
    Mutant("K of stage 0 looked at", "words + (K + k_stage * KV_BYTES) // 4", "words + K // 4"),
    Mutant("last chunk alone", "found |= not_finite", "found = not_finite"),
    without("clearing of K", "clear_row(smem, k, KV_PANEL, row)"),
    Mutant("bad keys of one lane", "lanes_of(found != 0)", "types.int32(found != 0)"),
    Mutant("bad keys of stage 0", BAD_WORD, BAD_WORD.replace("BAD_WORDS * k_stage + ", "")),
    Mutant("bad keys in one word", BAD_WORD, BAD_WORD.replace(" + word", "")),
    Mutant("fence of K after the barrier", FENCE + SYNC, SYNC + FENCE, 0, 2),
    Mutant("fence of Q after the barrier", FENCE + SYNC, SYNC + FENCE, 1, 2),
    Mutant("statistics of stage 0", "(STATS + stage * STAT_BYTES) // 4", "STATS // 4"),
    Mutant("NaN is a number", "not abs(stats[at + row]) < HUGE", "abs(stats[at + row]) >= HUGE"),
    Mutant(
        "idle rows kept", "not abs(stats[at + row]) < HUGE", "stats[at + row] != stats[at + row]"
    ),
    Mutant("every other row", "following(row + 31)", "following(row + 63)"),
    without("clearing of Q", ROW_OF_Q),
    without("clearing of dO", ROW_OF_DO),
    Mutant("dO of stage 0 cleared", ROW_OF_DO, ROW_OF_DO.replace(" + stage * Q_BYTES", "")),
    Mutant("raw K of stage 0", WAIT_RAW_K, WAIT_RAW_K.replace(" + 8 * k_stage", "")),
    Mutant("arrival of K of every lane", ARRIVE_K, ARRIVE_K.replace("lane == 0", "True")),
    without("next column", "column += types.int32(1)"),
    Mutant("cleaners' first round only", ROUNDS, "while round_ < 1:", 1, 2),
    Mutant("cleaners' heads of group 0", WALK, WALK.replace(" + work[at + 2] * group", "")),
    Mutant("cleaners' walk of plane 0", "plane_of[bh] * n_row + n_block", "n_block"),
    Mutant("full tiles awaited", "if kinds[t] != FULL:", "if True:"),
    Mutant("raw Q of stage 0", WAIT_RAW, WAIT_RAW.replace("8 * stage", "0")),
    Mutant("raw Q in stage 0's phase", WAIT_RAW, WAIT_RAW.replace(">> stage ", "")),
    without("flip of the phase", "phases ^= types.int32(1) << stage"),
    Mutant("Q and dO of every lane", " " * 28 + "if lane == 0:\n", " " * 28 + "if True:\n"),
    without("next tile", "tile += types.int32(1)"),
    Mutant(
        "bit tiles as far apart as bounds",
        "types.int64(kind - BITS) * BITS_WORDS",
        "types.int64(kind - BITS) * STATS_WORDS",
    ),
    Mutant(
        "head for whether keys are masked",
        "clean_keys(smem, words, k_stage, work[at + 3], lane)",
        "clean_keys(smem, words, k_stage, work[at + 2], lane)",
    ),
    Mutant(
        "cleaners never go back",
        "item = types.int32(item_of(round_, blocks, block))",
        "item = types.int32(round_ * blocks + block)",
        2,
        3,
    ),
    Mutant(
        "panels of K as far apart as Q's, searched",
        "(i >> 3) * (KV_PANEL // 4)",
        "(i >> 3) * (Q_PANEL // 4)",
    ),
)
LOADING = tuple((LOAD, mutant) for mutant in (*SENDING, *LOADER, *STORE, *CLEANER))
