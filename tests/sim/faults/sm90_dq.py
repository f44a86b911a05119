"""Faults of the pass for dQ on Hopper, as data: loaders, computing warpgroups, geometry."""

from mutants import Mutant, lines, swapped, without

CONFIG, LOAD = (
    "nbflash.backends.sm90.backward.dq_config",
    "nbflash.backends.sm90.backward.dq_producer",
)
COMPUTE, KERNEL = (
    "nbflash.backends.sm90.backward.dq_consumer",
    "nbflash.backends.sm90.backward.dq_kernel",
)
STATISTICS = "nbflash.backends.sm90.backward.dq_statistics"
CHAIN = (CONFIG, LOAD, STATISTICS, COMPUTE, KERNEL)

SEND_K = "send(base + K + stage * KV_BYTES, KV_PANEL, k_map, n0, h_kv, b, bar, KV_BYTES)"
SEND_V = "send(to, KV_PANEL, v_map, n0, h_kv, b, bar, KV_BYTES)"
SEND_PART = "send(to + part * PART_BYTES, PANEL_BYTES, tensor_map, q0, h, b, bar, PART_BYTES)"
END_DESCRIPTOR = (
    "write_descriptor(smem, words + DESCRIPTORS // 4 + DESCRIPTOR_WORDS * stage, END, 0, 0, 0)"
)
LOADING = (
    Mutant("masked K not looked at", "(FULL_K if full else RAW_K)", "FULL_K"),
    Mutant("rows never end", "LAST if t + 1 == end else 0", "0"),
    Mutant("every tile ends a row", "LAST if t + 1 == end else 0", "LAST"),
    Mutant("first round again and again", "of_round(types.int32(round_)", "of_round(zero"),
    Mutant("K of the query head", SEND_K, SEND_K.replace("h_kv", "h")),
    Mutant("V of the query head", SEND_V, SEND_V.replace("h_kv", "h")),
    Mutant("K in one stage", SEND_K, SEND_K.replace("stage * KV_BYTES", "0")),
    Mutant("V of batch 0", SEND_V, SEND_V.replace("h_kv, b", "h_kv, zero")),
    Mutant("bytes of a part for K", SEND_K, SEND_K.replace("bar, KV_BYTES", "bar, KV_BYTES - 128")),
    Mutant("V's ring as long as K's", "= advance_v(v_stage", "= advance(v_stage"),
    without("descriptor of the end", END_DESCRIPTOR),
    Mutant("parts of the first queries", "row * TILE_M + warpgroup * ROWS", "row * TILE_M"),
    Mutant("parts in one place", SEND_PART, SEND_PART.replace("part * PART_BYTES", "0")),
    Mutant("parts side by side", "warpgroup * stages + stage", "warpgroup + stage"),
    Mutant("Q for dO", "send_parts(base + DO, do_map", "send_parts(base + DO, q_map"),
    Mutant("empty rows of one block", "range(live + cuda.blockIdx.x, items", "range(live, items"),
    Mutant("empty rows past the end", "min(TILE_M, nq - row * TILE_M)", "TILE_M"),
    Mutant("empty rows of head 0", "b * stride[0] + h * stride[2]", "b * stride[0]"),
    Mutant("empty rows half written", "* PAIRS, LOOKERS", "* PAIRS // 2, LOOKERS"),
    Mutant(
        "key head of another group",
        "h_kv, _ = divmod_int32(h, group)",
        "_, h_kv = divmod_int32(h, group)",
    ),
    Mutant("empty rows over the first tile", "(row * TILE_M + q) * stride[1]", "q * stride[1]"),
)
READ = "_, _, this_row, this_bh = read_descriptor(smem, descriptor_at(words, tile))"
ACCUMULATE = "acc = accumulate(acc, p, dp, kind, minus_delta, drawing, place, tile)"
LINE = "\n" + " " * 16
NOTE = "# Read before a product that all warps issue: its wait may release the descriptor."
ARRIVE_Q = "mbarrier_arrive(empty_q + 8 * q_stage_of(nth_row))"
COMPUTING = (
    Mutant("scale of dQ", "(scale, scale)", "(scale * 0 + 1, scale * 0 + 1)"),
    Mutant(
        "dQ over the first queries", "q0 = row * TILE_M + warpgroup * ROWS", "q0 = row * TILE_M"
    ),
    Mutant("first panel of dQ again", "panel * PANEL, q0", "0, q0"),
    Mutant("panels of dQ from one place", "start + types.uint32(panel * PANEL_BYTES)", "start"),
    Mutant("Q of the first warpgroup", "warpgroup_of(thread) * Q_STAGES", "0"),
    Mutant("dO of the first warpgroup", "warpgroup_of(thread) * DO_STAGES", "0"),
    Mutant("Q in stage 0", " + q_stage_of(nth_row)\n", "\n"),
    Mutant("dO in stage 0", " + do_stage_of(nth_row)\n", "\n"),
    Mutant(
        "S of the first K", " + k_stage_of(tile) * (KV_BYTES >> 4))\n        s =", ")\n        s ="
    ),
    Mutant("V in K's stage", "stage, part = v_stage_of(tile)", "stage, part = k_stage_of(tile)"),
    Mutant("nobody poisoned", "m = poisoned(m, bad_of", "_ = poisoned(m, bad_of"),
    Mutant("bad keys of stage 0", "bad_of(smem, words, k_stage_of(tile)", "bad_of(smem, words, 0"),
    Mutant(
        "nothing hidden",
        "weights_masked(x, m, unit, keep)",
        "weights_full(x, m, unit)",
    ),
    Mutant(
        "dP of what is hidden",
        "return ds_masked(p, dp, minus_delta)",
        "return ds_full(p, dp, minus_delta)",
    ),
    Mutant(
        "V released in K's stage",
        "EMPTY_V + 8 * v_stage_of(tile)",
        "EMPTY_V + 8 * k_stage_of(tile)",
    ),
    Mutant("next K released", "k_stage_of(types.int32(tile - 1))", "k_stage_of(types.int32(tile))"),
    Mutant("S left in flight", "                    wait_all_but_one()\n", ""),
    Mutant(
        "one arrival too few for Q",
        f"if not BY_Q and kind >= LAST and leader:\n{LINE[1:]}    {ARRIVE_Q}",
        "pass",
        0,
        1,
    ),
    Mutant(
        "Q released every tile",
        "                    if not BY_Q and kind >= LAST and leader:\n",
        "                    if not BY_Q and leader:\n",
    ),
    Mutant(
        "descriptor read after its products",
        NOTE + LINE + READ + LINE + ACCUMULATE,
        ACCUMULATE + LINE + READ,
    ),
    Mutant(
        "sum of the row before",
        "(m, row, bh, where), ACC_START",
        "(m, row, bh, where), ACC_START if nth_row == 0 else acc",
    ),
    Mutant("dQ in the next row", "finish_row(acc, start, this_row", "finish_row(acc, start, row"),
    Mutant(
        "dQ over what comes",
        "(warpgroup * OUT_STAGES + stage) * PART_BYTES",
        "(warpgroup * OUT_STAGES) * PART_BYTES",
    ),
    swapped(
        "place free while dQ leaves",
        lines(20, "bulk_wait_read()"),
        lines(20, "mbarrier_arrive(empty_out)"),
    ),
    Mutant(
        "panels of K on top of each other",
        "lower(base + K, KV_PANEL) + k_stage_of(tile)",
        "lower(base + K, 16) + k_stage_of(tile)",
    ),
    Mutant("dO released before dQ goes there", "if BY_Q and leader:", "if leader:"),
)
SWIZZLED = "(swizzle ^ (quad + 4 * (j % 2)))"
OF_QUERIES = (
    Mutant("sign of LSE", "return (-shift0, -shift1)", "return (shift0, shift1)"),
    Mutant("no rowsum", "natural[0], sums[0], gradient[0]", "natural[0], sums[0] * 0, gradient[0]"),
    Mutant("no dLSE", "sums[1], gradient[1]", "sums[1], gradient[1] * 0"),
    Mutant("LSE of head 0", "types.int64(bh) * nq", "types.int64(0) * nq"),
    Mutant("dLSE of head 0", " + h * l_stride[1]", ""),
    Mutant("dLSE contiguous", "q0 * l_stride[2]", "q0"),
    Mutant("O of head 0", " + h * o_stride[2]", ""),
    Mutant("O of the upper row", "q1 * o_stride[1]", "q0 * o_stride[1]"),
    Mutant("O past the end", "min(upper, nq - 1), ", "upper, "),
    Mutant("O's last columns again", "select(at < LAST_WORD, at, at * 0 + LAST_WORD)", "at * 0"),
    Mutant("dO as if not swizzled", SWIZZLED, "(quad + 4 * (j % 2))"),
    Mutant("half of dO's panel", SWIZZLED, "(swizzle ^ quad)"),
    Mutant("first panel of dO", " + j // 2 * PANEL_WORDS", ""),
    Mutant("upper rows of dO", "chunk + 8 * i * ROW_WORDS", "chunk"),
    Mutant("half a quad", "(sums, QUAD, ", "(sums, QUAD // 2, "),
    Mutant("queries past the end count", "gradient[1], upper + 8 < nq)", "gradient[1], True)"),
    Mutant("left for head 0", "types.int64(bh) * tiles", "types.int64(0) * tiles"),
    Mutant("left in the next head", "        if tile < tiles:\n", "        if True:\n"),
    Mutant("upper rows left twice", "leave(stats, shift1, minus1", "leave(stats, shift0, minus0"),
    Mutant("lower rows not left", "minus1, upper + 8, bh, nq)", "minus1, upper, bh, nq)"),
    Mutant(
        "delta of whole steps",
        "range(-(-HEAD_DIM // STEP))",
        "range(max(HEAD_DIM // STEP, 1))",
        1,
        2,
    ),
    Mutant(
        "statistics in tiles of this pass", "types.int64(2 * STATS_M)", "types.int64(2 * TILE_M)"
    ),
    Mutant(
        "O of rows in steps of 64",
        "upper = row * TILE_M + row_of_thread(thread)\n",
        "upper = row * ROWS + row_of_thread(thread)\n",
    ),
)
GEOMETRY = (
    Mutant("room for one panel of a part", "self.panels * ROWS * ROW_BYTES", "ROWS * ROW_BYTES"),
    Mutant("dO over Q", "q=self.consumers * self.q_stages * self.part_bytes", "q=0"),
    Mutant("V over K", "k=self.k_stages * self.kv_bytes", "k=self.kv_bytes"),
    Mutant("one raw barrier", "self.barriers.end", "self.barriers.raw_k"),
    Mutant("LAST among the kinds", "LAST = 1 << 30", "LAST = 1"),
    Mutant("dQ through the only Q", "return self.q_stages > 1", "return self.q_stages >= 1"),
)
ARRIVALS = (
    Mutant("K released by one", "EMPTY_K + 8 * i, CONSUMERS", "EMPTY_K + 8 * i, 1"),
    Mutant("V released by one", "EMPTY_V + 8 * i, CONSUMERS", "EMPTY_V + 8 * i, 1"),
    Mutant("two arrivals of raw K", "RAW_K + 8 * i, 1", "RAW_K + 8 * i, 2"),
    without(
        "looking for NaN", "clean_stream(smem, rematerialised(place), sizes, schedule, looker)"
    ),
    Mutant("cleaners of the forward", "make_clean_stream(cfg, LOOKERS)", "make_clean_stream(cfg)"),
)
MUTANTS = [
    (target, mutant)
    for target, mutants in (
        (LOAD, LOADING),
        (COMPUTE, COMPUTING),
        (STATISTICS, OF_QUERIES),
        (CONFIG, GEOMETRY),
        (KERNEL, ARRIVALS),
    )
    for mutant in mutants
]
