"""Faults of the loading warpgroup of the Hopper kernel, as data: loader, cleaners, empty rows."""

from mutants import Mutant, lines, swapped, without

LOAD, PIPELINE = "nbflash.backends.sm90.forward.producer", "nbflash.cuda.tile.ring"
STREAM, WATCH = (f"nbflash.backends.sm90.shared.{name}" for name in ("tile_stream", "nan_watch"))
FINITE = "nbflash.cuda.tile.finite"
SEND_Q = "send(to, Q_PANEL, q_map, m_block * TILE_M, h, b, bar, Q_BYTES)"
SEND_V = "send(to, KV_PANEL, v_map, n0, h_kv, b, bar, KV_BYTES)"
LOAD_V = "load_v(base, v_map, v_n0, v_head, v_batch, v_full, v_stage, v_phase)"
SEND_K = "send(base + K + stage * KV_BYTES, KV_PANEL, k_map, n0, h_kv, b, bar, KV_BYTES)"
END_K = "send(to, KV_PANEL, k_map, v_n0, v_head, v_batch, bar, KV_BYTES)"
WAIT_K = "mbarrier_wait(base + EMPTY_K + 8 * stage, phase)"
WAIT_Q = "mbarrier_wait(base + EMPTY_Q + 8 * q_stage, q_phase)"
DESCRIPTOR = "write_descriptor(smem, descriptor, kind[t] + first, n0, m_block, bh)"
PLACE_OF_DESCRIPTOR = "descriptor = words + DESCRIPTORS // 4 + DESCRIPTOR_WORDS * stage"
END_DESCRIPTOR = (
    "write_descriptor(\n                "
    "smem, words + DESCRIPTORS // 4 + DESCRIPTOR_WORDS * stage, END, 0, 0, 0\n            )"
)
START = "stage, phase, q_stage, q_phase = zero, one, zero, one"
FIRST_OF_ROW = "first = FIRST if t == begin else 0"
V_NEXT = "v_n0, v_head, v_batch = n0, h_kv, b"
ROUNDS = "range(rounds_of(live, types.int32(cuda.gridDim.x)))"
LINE = "\n" + " " * 20
LOADER = (
    Mutant("bytes of K for Q", SEND_Q, SEND_Q.replace("Q_BYTES", "KV_BYTES")),
    Mutant("bytes of Q for K", SEND_K, SEND_K.replace("bar, KV_BYTES", "bar, Q_BYTES")),
    Mutant("bytes of Q for V", SEND_V, SEND_V.replace("KV_BYTES", "Q_BYTES")),
    Mutant("panels of Q as far apart as K's", SEND_Q, SEND_Q.replace("Q_PANEL", "KV_PANEL")),
    Mutant("panels of K as far apart as Q's", SEND_K, SEND_K.replace("KV_PANEL", "Q_PANEL")),
    Mutant("loader's last round", ROUNDS, "range(live // types.int32(cuda.gridDim.x))"),
    Mutant("b and h of a head swapped", "b, h = divmod_int32(", "h, b = divmod_int32("),
    Mutant("h and b of Q swapped", SEND_Q, SEND_Q.replace("h, b", "b, h")),
    Mutant("key head of another group", "h_kv, _ = divmod_int32(h", "_, h_kv = divmod_int32(h"),
    Mutant(
        "a row looked up again", "of_round(types.int32(round_ + 1)", "of_round(types.int32(round_)"
    ),
    Mutant("keys in steps of rows", "col_idx[t] * TILE_N", "col_idx[t] * TILE_M"),
    Mutant("wait for the K of another stage", WAIT_K, WAIT_K.replace("8 * stage", "0"), 0, 2),
    Mutant("wait for empty V of K's stage", LOAD_V, LOAD_V.replace("v_stage", "stage"), 0, 2),
    Mutant("wait for empty V in K's phase", LOAD_V, LOAD_V.replace("v_phase", "phase"), 0, 2),
    Mutant("first phase of empty K", START, START.replace("one", "zero", 1)),
    Mutant("first phase of empty Q", START, START.removesuffix("one") + "zero"),
    Mutant("first phase of empty V", "= zero, one, -one", "= zero, zero, -one"),
    Mutant("every tile begins a row", FIRST_OF_ROW, "first = FIRST"),
    Mutant("rows do not begin", FIRST_OF_ROW, "first = 0"),
    Mutant("rows begin a tile late", FIRST_OF_ROW, FIRST_OF_ROW.replace("begin", "begin + 1")),
    Mutant("descriptor of stage 0", "+ DESCRIPTOR_WORDS * stage\n", "\n"),
    Mutant(
        "descriptor: first key of the row",
        DESCRIPTOR,
        DESCRIPTOR.replace("n0", "col_idx[begin] * TILE_N"),
    ),
    Mutant(
        "descriptor: kind of the row's first tile",
        DESCRIPTOR,
        DESCRIPTOR.replace("kind[t]", "kind[begin]"),
    ),
    Mutant("descriptor: first row", DESCRIPTOR, DESCRIPTOR.replace("m_block", "zero")),
    Mutant("descriptor: head of batch 0", DESCRIPTOR, DESCRIPTOR.replace("bh)", "h)")),
    swapped(
        "descriptor after its arrival",
        DESCRIPTOR + LINE,
        "# full_k: the bytes arrive, consumers wait."
        + LINE
        + "bar = base + FULL_K + 8 * stage"
        + LINE
        + SEND_K
        + LINE,
        "if v_n0 >= 0:",
    ),
    swapped(
        "descriptor before its stage is empty",
        WAIT_K + LINE,
        LINE.join((PLACE_OF_DESCRIPTOR, FIRST_OF_ROW, DESCRIPTOR, "")),
        "# full_k",
    ),
    Mutant("K in one stage", SEND_K, SEND_K.replace(" + stage * KV_BYTES", "")),
    Mutant(
        "K told to the first stage", "bar = base + FULL_K + 8 * stage\n", "bar = base + FULL_K\n"
    ),
    Mutant("K of the query head", SEND_K, SEND_K.replace("h_kv", "h")),
    Mutant("K of batch 0", SEND_K, SEND_K.replace("h_kv, b,", "h_kv, zero,")),
    Mutant("Q in steps of keys", SEND_Q, SEND_Q.replace("TILE_M", "TILE_N")),
    Mutant("Q of the key head", SEND_Q, SEND_Q.replace("h, b", "h_kv, b")),
    Mutant("Q in one stage", "to, bar = base + q_stage * Q_BYTES,", "to, bar = base,"),
    Mutant("Q told to the first stage", "base + FULL_Q + 8 * q_stage", "base + FULL_Q"),
    Mutant("Q before every tile", "if t == begin:\n", "if True:\n"),
    Mutant("Q's ring as long as K's", "= advance_q(q_stage", "= advance(q_stage"),
    Mutant("V's ring as long as K's", "= advance_v(v_stage", "= advance(v_stage"),
    Mutant("K for V", LOAD_V, LOAD_V.replace("v_map", "k_map"), 0, 2),
    Mutant("K for the last V", LOAD_V, LOAD_V.replace("v_map", "k_map"), 1, 2),
    Mutant("V of this tile's keys", LOAD_V, LOAD_V.replace("v_n0", "n0"), 0, 2),
    Mutant("V of this tile's head", LOAD_V, LOAD_V.replace("v_head", "h_kv"), 0, 2),
    Mutant("V of this tile's batch", LOAD_V, LOAD_V.replace("v_batch", "b"), 0, 2),
    Mutant("V of the first keys left out", "if v_n0 >= 0:", "if v_n0 > 0:", 0, 2),
    Mutant("last V left out", "if v_n0 >= 0:", "if v_n0 > 0:", 1, 2),
    Mutant("V in stage 0", "base + V + stage * KV_BYTES,", "base + V,"),
    Mutant("V told to stage 0", "base + full + 8 * stage", "base + full"),
    Mutant(
        "V told as this tile's kind says",
        "v_batch, v_full, v_stage",
        "v_batch, types.int32(FULL_V if kind[t] == FULL else RAW_V), v_stage",
        0,
        2,
    ),
    Mutant("V of batch 0", V_NEXT, V_NEXT.replace("h_kv, b", "h_kv, zero")),
    Mutant("V of the query head", V_NEXT, V_NEXT.replace("h_kv, b", "h, b")),
    Mutant(
        "masked V not looked at", "(FULL_V if FULL_TILES or kind[t] == FULL else RAW_V)", "(FULL_V)"
    ),
    Mutant("every V looked at", "(FULL_V if FULL_TILES or kind[t] == FULL else RAW_V)", "(RAW_V)"),
    without("descriptor of the end", END_DESCRIPTOR),
    Mutant("end of another kind", END_DESCRIPTOR, END_DESCRIPTOR.replace("END", "FULL")),
    Mutant(
        "end in stage 0", END_DESCRIPTOR, END_DESCRIPTOR.replace("DESCRIPTOR_WORDS * stage", "0")
    ),
    without("keys at the end", END_K),
    Mutant("keys at the end in stage 0", "base + K + stage * KV_BYTES, base", "base + K, base"),
    Mutant(
        "empty rows as wide as their panels",
        "TILE_M, PAIRS = cfg.tile_m, cfg.head_dim // 2",
        "TILE_M, PAIRS = cfg.tile_m, cfg.panels * 32",
    ),
    swapped(
        "Q awaited before the last V is sent",
        lines(
            20,
            "if v_n0 >= 0:",
            f"    {LOAD_V}",
            "    v_stage, v_phase = advance_v(v_stage, v_phase)",
        ),
        lines(
            20,
            "if t == begin:",
            "    # empty_q: each consumer arrives once O has left the stage, we wait.",
            "    mbarrier_wait(base + EMPTY_Q + 8 * q_stage, q_phase)",
            "    # full_q: the bytes arrive, consumers wait.",
            "    to, bar = base + q_stage * Q_BYTES, base + FULL_Q + 8 * q_stage",
            "    send(to, Q_PANEL, q_map, m_block * TILE_M, h, b, bar, Q_BYTES)",
            "    q_stage, q_phase = advance_q(q_stage, q_phase)",
        ),
    ),
)
TILES = (
    Mutant("too few bytes expected", "expect_tx(bar, nbytes)", "expect_tx(bar, nbytes - 128)"),
    Mutant("too many bytes expected", "expect_tx(bar, nbytes)", "expect_tx(bar, nbytes + 128)"),
    Mutant("first panel again", "tensor_map, panel * PANEL, row", "tensor_map, 0, row"),
    Mutant("panels in one place", "to + panel * panel_bytes", "to"),
    Mutant("panel never sent", "range(PANELS)", "range(PANELS - 1)"),
    Mutant("walk of plane 0", "types.int32(plane_of[bh] * n_row + row)", "types.int32(row)"),
    Mutant("descriptor: row and head swapped", "smem[at + 2] = row", "smem[at + 2] = bh"),
    Mutant("descriptor: no first key", "smem[at + 1] = n0", "smem[at + 1] = 0"),
    Mutant("descriptor: overlapping", "smem[at + 3] = bh", "smem[at + 4] = bh"),
    Mutant("an item past the end of the work list", "if item < live:", "if item <= live:"),
)
FINITENESS = (
    Mutant("infinite exponents pass", "+ LOWEST_EXPONENTS\n", "& LOWEST_EXPONENTS\n"),
    Mutant("last word of 16 bytes", "carried if found is None else found | carried", "carried"),
    Mutant("upper halves only", "SIGNS - 2**32", "-(2**31)"),
    Mutant("last chunk only", "types.int32(found | not_finite", "types.int32(not_finite"),
    Mutant("first panel only", "at + panel + types", "at + types"),
    Mutant("chunks of one panel", "8 * panels,", "8,"),
    Mutant("four chunks", "& 7) * 4)", "& 3) * 4)"),
    Mutant("chunks of 8 bytes", "& 7) * 4)", "& 7) * 2)"),
    without("clearing", "clear(smem, place(at, types.int32(i), key), types.int32(0))"),
    Mutant("bad keys forgotten", "return found != 0", "return False"),
)
RAW_WAIT = "mbarrier_wait(base + RAW_V + 8 * stage, phase)"
CLEANERS = (
    Mutant(
        "panels of V as far apart as Q's",
        "make_clean_row(cfg.dtype, cfg.panels, cfg.tile_n * ROW_BYTES // 4)",
        "make_clean_row(cfg.dtype, cfg.panels, cfg.tile_m * ROW_BYTES // 4)",
    ),
    Mutant(
        "cleaners' last round",
        "rounds_of(sizes[3], types.int32(cuda.gridDim.x))",
        "types.int32(sizes[3] // cuda.gridDim.x)",
    ),
    Mutant("cleaners of 32 rounds", "while round_ < rounds:", "while round_ < min(rounds, 32):"),
    Mutant("32 rounds all alike", "of_round(types.int32(round_ + lane)", "of_round(round_"),
    Mutant("rounds of the first 32", "of_round(types.int32(round_ + lane)", "of_round(lane"),
    Mutant("next 32 rounds not looked up", "if nth == 0:", "if round_ == 0:"),
    Mutant("rows of 32 tiles", "while t < end:", "if t < end:"),
    Mutant("tiles past a row's end", "t + lane < end and kind", "kind"),
    Mutant("kinds of the first 32 tiles", "kind[t + lane]", "kind[begins + lane]"),
    Mutant("one masked tile of 32", "while masked != 0:", "if masked != 0:"),
    Mutant("stage of a masked tile not counted on", "stage + cuda.ffs(masked) - 1", "stage"),
    Mutant("masked tiles alone are counted", "stage + min(end - t, 32)", "stage + nth"),
    Mutant("stages of 32 tiles", "min(end - t, 32)", "32"),
    Mutant(
        "another key looked at", "types.int32(at + key * 32)", "types.int32(at + (key ^ 1) * 32)"
    ),
    Mutant("bad keys of one lane", "found = lanes_of(bad)", "found = types.int32(bad)"),
    Mutant("raw V of stage 0", RAW_WAIT, RAW_WAIT.replace("8 * stage", "0")),
    Mutant("raw V in stage 0's phase", "phases >> at & 1", "phases & 1"),
    without("flip of the phase", "phases = types.int32(phases ^ (1 << at))"),
    Mutant("full tiles awaited", "and kind[t + lane] != FULL", ""),
    Mutant("keys that no warp looks at", "word + THREADS // 32)", "word + 4)"),
    Mutant(
        "keys of a last word that is not full",
        "-(-cfg.tile_n // 32), threads",
        "cfg.tile_n // 32, threads",
    ),
    Mutant("keys past the tile", "bad = key < TILE_N and clean", "bad = clean"),
    Mutant("keys of the first word", "32 * word + (thread & 31)", "thread & 31"),
    Mutant("V of stage 0 cleaned", "(V + stage * KV_BYTES) // 4", "V // 4"),
    Mutant("bad keys of stage 0", "BAD_WORDS * stage + word", "word"),
    Mutant("bad keys one stage on", "BAD_WORDS * stage + word", "BAD_WORDS * (stage ^ 1) + word"),
    swapped(
        "fence after the barrier",
        "fence_proxy_async()\n" + " " * 8,
        "bar_sync(CLEANERS, THREADS)\n" + " " * 8,
    ),
    Mutant("arrival of every cleaner", "if thread == 0:", "if thread >= 0:"),
    Mutant("arrival of two warps", "if thread == 0:", "if thread % 64 == 0:"),
    Mutant("full V of another stage", "base + FULL_V + 8 * stage)", "base + FULL_V)"),
)
EMPTY_ITEMS = "range(live + cuda.blockIdx.x, items, cuda.gridDim.x)"
EMPTY_ROWS = (
    Mutant("empty rows past the end", "rows = min(TILE_M, nq - m_block * TILE_M)", "rows = TILE_M"),
    Mutant("empty rows of one block", EMPTY_ITEMS, "range(live, items, 2)"),
    Mutant("empty rows half written", "rows * PAIRS, THREADS", "rows * PAIRS // 2, THREADS"),
    Mutant("empty rows of head 0", " + (bh % heads) * o_stride[2]", ""),
    Mutant("empty rows of batch 0", "(bh // heads) * o_stride[0] + ", ""),
    Mutant("empty rows of tile 0", "m_block * TILE_M + i // PAIRS", "i // PAIRS"),
    Mutant("lse of an empty row is zero", "types.float32(-math.inf)", "zero"),
    Mutant("lse of tile 0", "lse[bh * nq + m_block * TILE_M + i]", "lse[bh * nq + i]"),
    Mutant("lse of empty rows of head 0", "lse[bh * nq + m_block", "lse[m_block"),
)
WALK = (
    Mutant("blocks take the same rows", "(block if", "(0 if"),
    Mutant("rounds of one block", "return round_ * blocks", "return round_"),
    Mutant("back without there", "blocks - 1 - block", "blocks - block"),
    Mutant("no wrap", "equal(stage, stages - 1)", "equal(stage, stages)"),
    Mutant("wrap too early", "equal(stage, stages - 1)", "equal(stage, stages - 2)"),
    Mutant(
        "before the last stage comes the first",
        "(stages - 1), stage - 1)",
        "(stages - 1), stage * 0)",
    ),
    Mutant("phase never flips", "select(last, phase * -1 + 1, phase)", "phase"),
    Mutant("phase flips every time", "select(last, phase * -1 + 1, phase)", "phase * -1 + 1"),
)
LOADING = (
    *((LOAD, mutant) for mutant in (*LOADER, *EMPTY_ROWS)),
    *((STREAM, mutant) for mutant in TILES),
    *((WATCH, mutant) for mutant in CLEANERS),
    *((PIPELINE, mutant) for mutant in WALK),
    *((FINITE, mutant) for mutant in FINITENESS),
)
