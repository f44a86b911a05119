"""New planted faults: (family, module, name, old, new, which, count, why).

``old`` occurs ``count`` times in the module's source; occurrence ``which``, from 0, becomes ``new``.
``why`` says on which input it shows. NEW has ten for each of eleven groups of kernels. EXTRA has
faults that show on legal input, but that the harness cannot plant as it is (see the report).
"""

T, K = "nbflash.tile.", "nbflash.kernels."

# 1. The forward without tensor cores.
SIMT_FORWARD = [
    (
        "simt", K + "fwd_simt", "Q of the key head",
        "q_base = b * q_stride[0] + h * q_stride[2]",
        "q_base = b * q_stride[0] + (h // group) * q_stride[2]", 0, 1,
        "Grouped heads (heads > heads_kv): every head but the first of a batch element takes "
        "another one's Q.",
    ),
    (
        "simt", K + "fwd_simt", "O with Q's batch stride",
        "o_base = b * o_stride[0]", "o_base = b * q_stride[0]", 0, 1,
        "Batch of 2 or more where out and q lie in memory in different orders (q strided, out not).",
    ),
    (
        "simt", K + "fwd_simt", "logarithm in float32",
        "ACC(math.log2(total))", "types.float32(math.log2(total))", 0, 1,
        "float64 tensors: the LSE is off by 2^-24 of its logarithm instead of 2^-53.",
    ),
    (
        "simt", K + "fwd_simt", "tiles of V as far apart as K's",
        "v_base + n0 * v_stride[1]", "v_base + n0 * k_stride[1]", 0, 1,
        "Two or more key tiles with k and v of different row strides: V of other keys.",
    ),
    (
        "simt", K + "fwd_simt", "mask of a tile on its side",
        "COLUMNS[:RN], TILE_M, TILE_N)", "COLUMNS[:RN], TILE_N, TILE_M)", 0, 1,
        "BITS tiles behind the first one where tile_m != tile_n: rows of another bit tile.",
    ),
    (
        "simt", K + "fwd_simt", "mask at the transposed place",
        "bits, 4 * ty, 4 * tx)", "bits, 4 * tx, 4 * ty)", 0, 1,
        "Any masked tile (causal, say): threads off the diagonal of the block mask other scores.",
    ),
    (
        "simt", T + "softmax", "O of nothing rescaled from 0",
        "exp2(m[i] - guarded(m_new[i]))", "exp2(guarded(m[i]) - guarded(m_new[i]))", 0, 1,
        "A row whose first scores are all below -128 in base 2 (float32): alpha = 2^(0 - m') is "
        "infinite and 0 * inf is NaN; the same in decode_simt.",
    ),
    (
        "simt", T + "copy", "last rows not drained",
        "range(tid, rows * width, threads)", "range(tid, rows * head_dim, threads)", 0, 1,
        "head_dim < width (5, 20, 40 …) and a tile with most of its rows: the last ones of it are "
        "never stored.",
    ),
    (
        "simt", T + "copy", "pieces of one pass in one place",
        "(i + u * threads) // period, (i + u * threads) % period",
        "(i + u * threads) // period, i % period", 0, 1,
        "Threads that a row's pieces do not divide (head_dim 192 with 128 threads, 48 vectors a "
        "row): wrong columns from the second piece of a thread on.",
    ),
    (
        "simt", T + "copy", "NaN looked for in whole quads",
        "per_row = cfg.width // 4", "per_row = cfg.head_dim // 4", 0, 1,
        "head_dim not a multiple of 4 and a hidden key whose V has its only NaN in the last "
        "head_dim % 4 columns: 0 * NaN reaches O.",
    ),
]

# 2. The backward without tensor cores.
SIMT_BACKWARD = [
    (
        "simt", T + "copy", "zero columns up to a pair",
        "if head_dim % 4:", "if head_dim % 2:", 0, 1,
        "head_dim = 2 mod 4 (6, 10 …): S and dP of the backward have twice the product of columns "
        "0 in addition, since they run over whole quads.",
    ),
    (
        "simt", K + "bwd_simt", "dO with Q's batch stride",
        "do_base = b * do_stride[0]", "do_base = b * q_stride[0]", 0, 1,
        "Batch of 2 or more where dout and q lie in memory in different orders.",
    ),
    (
        "simt", K + "bwd_simt", "sums of dQ beyond the end",
        "at = select(inside, base + stride * m + d, base)", "at = base + stride * m + d", 0, 1,
        "One pass with nq that is no multiple of tile_m, or head_dim < width: zeros are added out "
        "of bounds behind the last row.",
    ),
    (
        "simt", K + "bwd_simt", "statistics of the next rows",
        "load4(smem, at + ROWS[i])", "load4(smem, at + i)", 0, 1,
        "rm = 8, as most rows of the table have: lse and delta of rows 4 … 7 of a thread are those "
        "of its neighbour's rows.",
    ),
    (
        "simt", K + "bwd_simt", "dQ without its column order",
        "(ROWS[i] * LD + COLUMNS[c]), dq[i * RQ", "(ROWS[i] * LD + c), dq[i * RQ", 0, 1,
        "Two passes with head_dim > 8 tx: threads overwrite each other's second four columns.",
    ),
    (
        "simt", K + "bwd_simt", "NaN of K looked for in tile_m rows",
        "finite_n(smem, K, tid)", "finite_m(smem, K, tid)", 0, 1,
        "tile_n > tile_m and a hidden key with NaN behind the first tile_m of its tile: "
        "0 * NaN reaches dQ.",
    ),
    (
        "simt", K + "bwd_simt", "dQ summed at the key head",
        "at = b * dq_stride[0] + h * dq_stride[2]", "at = b * dq_stride[0] + h_kv * dq_stride[2]",
        0, 1,
        "One pass with grouped heads: dQ of a group's heads is added up in one place.",
    ),
    (
        "simt", K + "bwd_simt", "dK with K's batch stride",
        "k_at = b * dk_stride[0]", "k_at = b * k_stride[0]", 0, 1,
        "Batch of 2 or more where dk and k lie in memory in different orders.",
    ),
    (
        "simt", "nbflash.simt", "lse as it lies",
        "lse = lse if lse.flags.c_contiguous else lse.copy()", "lse = lse[...]", 0, 1,
        "backward with an lse whose last axis alone is contiguous (batch and heads transposed), "
        "which check_backward allows.",
    ),
    (
        "simt", "nbflash.simt", "passes of another alignment",
        "key = deterministic, vectors", "key = deterministic", 0, 1,
        "Two calls of one executor, the second with a dout of odd row stride: the kernel of "
        "vectors that the first call left is launched on rows that are not aligned.",
    ),
]

# 3. The Hopper forward.
_V_SENT = """\
                    if v_n0 >= 0:
                        mbarrier_wait(base + EMPTY_V + 8 * v_stage, v_phase)
                        to = base + V + v_stage * KV_BYTES
                        bar = base + v_full + 8 * v_stage
                        send(to, KV_PANEL, v_map, v_n0, v_head, v_batch, bar, KV_BYTES)
                        v_stage, v_phase = advance_v(v_stage, v_phase)
"""
_Q_SENT = """\
                    if t == begin:
                        mbarrier_wait(base + EMPTY_Q + 8 * q_stage, q_phase)
                        to, bar = base + q_stage * Q_BYTES, base + FULL_Q + 8 * q_stage
                        send(to, Q_PANEL, q_map, row * TILE_M, h, b, bar, Q_BYTES)
                        q_stage, q_phase = advance_q(q_stage, q_phase)
"""
FWD_SM90 = [
    (
        "fwd_sm90", K + "sm90_load", "an item past the end of the work list",
        "if item < live:", "if item <= live:", 0, 1,
        "All rows attend something, so that live = items: the round that is looked up ahead reads "
        "the work list out of bounds.",
    ),
    (
        "fwd_sm90", K + "sm90_load", "empty rows as wide as their panels",
        "TILE_M, PAIRS = cfg.tile_m, cfg.head_dim // 2",
        "TILE_M, PAIRS = cfg.tile_m, cfg.panels * PANEL // 2", 0, 1,
        "A row tile that attends nothing, head_dim no multiple of 64: zeros over the columns of "
        "the next head, or out of bounds.",
    ),
    (
        "fwd_sm90", K + "sm90_load", "Q awaited before the last V is sent",
        _V_SENT + _Q_SENT, _Q_SENT + _V_SENT, 0, 1,
        "One stage of Q (d = 256) and a block with two rows: Q's stage is released behind P V of "
        "the tile whose V is not sent: a deadlock.",
    ),
    (
        "fwd_sm90", K + "sm90_load", "panels of V as far apart as Q's",
        "make_clean_row(cfg.dtype, cfg.panels, cfg.tile_n * ROW_BYTES // 4)",
        "make_clean_row(cfg.dtype, cfg.panels, cfg.tile_m * ROW_BYTES // 4)", 0, 1,
        "head_dim > 64, tile_m != tile_n (192: 128 and 64) and a hidden key with NaN in V's second "
        "panel: it is not found, and memory elsewhere is looked at.",
    ),
    (
        "fwd_sm90", K + "sm90_whole", "turns of two warpgroups",
        "ALONE, LAST = consumers == 1, consumers - 1", "ALONE, LAST = consumers == 1, 1", 0, 1,
        "Three computing warpgroups (the table's first row, 192 queries): the third one's turn "
        "never comes, a deadlock.",
    ),
    (
        "fwd_sm90", K + "sm90_compute", "last O through stage 0",
        "finish_row(acc, m, l, row, bh, result, q[1], base, turn, thread)",
        "finish_row(acc, m, l, row, bh, result, zero, base, turn, thread)", 0, 1,
        "Two stages, a block with an even number of rows, the last of one tile: its O overwrites "
        "the stage that the copy engine still reads the O before from, a race.",
    ),
    (
        "fwd_sm90", K + "fwd_sm90", "strides of Q and K for lost scores",
        "operands = q, k, q_stride, k_stride, nq", "operands = q, k, k_stride, q_stride, nq", 0, 1,
        "Scores that are computed once more from memory (2^100 beyond those before) where q and k "
        "have different strides, as grouped heads have.",
    ),
    (
        "fwd_sm90", K + "sm90_softmax", "m raised by what a lane has summed",
        "overshot(row_max(weights))", "overshot(row_sum(PAIR, weights))", 0, 1,
        "A row that outgrows m (float16: 2^10): the lanes of a quad raise m by different amounts, "
        "and O mixes them.",
    ),
    (
        "fwd_sm90", T + "wgmma_softmax", "a limit for all lanes of a row",
        "size, LIMIT = n // 2, n / 4 * 2.0**TOP", "size, LIMIT = n // 2, n * 2.0**TOP", 0, 1,
        "float16, whole tiles of 112 or 128 keys and a score 12 to 12.8 (in base 2) above all of "
        "the row's first tile: a weight between 65520 and n * 2^10 becomes infinite.",
    ),
    (
        "fwd_sm90", K + "sm90_halves", "panels of half a K",
        "(cfg.tile_m, cfg.tile_n)", "(cfg.tile_m, HALF)", 0, 1,
        "Halves with head_dim > 64 (softcap, d = 128): the second panel of K is taken from the "
        "second half of the first.",
    ),
]

# 4. The Hopper backward in one pass.
BWD_SM90 = [
    (
        "bwd_sm90", K + "bwd_sm90_load", "bit tiles as far apart as bounds",
        "types.int64(kind - BITS) * BITS_WORDS", "types.int64(kind - BITS) * STATS_WORDS", 0, 1,
        "A second BITS tile where tile_n = 128, as in the table: it is twice as far away as the "
        "bounds of a query tile would be.",
    ),
    (
        "bwd_sm90", K + "bwd_sm90_load", "head for whether keys are masked",
        "clean_keys(smem, words, k_stage, work[at + 3], lane)",
        "clean_keys(smem, words, k_stage, work[at + 2], lane)", 0, 1,
        "A hidden key of head 0 with NaN or infinity in K: nobody looks, 0 * NaN reaches dQ.",
    ),
    (
        "bwd_sm90", K + "bwd_sm90_load", "cleaners never go back",
        "item = types.int32(item_of(round_, blocks, block))",
        "item = types.int32(round_ * blocks + block)", 2, 3,
        "Two or more blocks, each with two columns, masked tiles: warp 3 follows another column "
        "than the loader in odd rounds: a deadlock, or tiles that nobody cleans.",
    ),
    (
        "bwd_sm90", K + "bwd_sm90_load", "panels of K as far apart as Q's, searched",
        "(i >> 3) * (KV_PANEL // 4)", "(i >> 3) * (Q_PANEL // 4)", 0, 1,
        "head_dim > 64 (64 queries, 128 keys): a hidden key's NaN in the second panel is not "
        "found, and one in row r + 64 clears key r.",
    ),
    (
        "bwd_sm90", K + "bwd_sm90_compute", "columns written for rows",
        "min(TILE_N, nk - n_block * TILE_N) * PAIRS", "min(TILE_N * PAIRS, nk - n_block * TILE_N)",
        0, 1,
        "A key tile that no query sees near the end of the sequence: only as many pairs as keys "
        "are left become 0.",
    ),
    (
        "bwd_sm90", K + "bwd_sm90_compute", "slot told after its part",
        """\
        if speaks(thread):
            smem[words + SLOTS // 4 + turn] = slot
        fence_proxy_async()
        bar_arrive(DQ_FULL + turn, DQ_THREADS)
""",
        """\
        fence_proxy_async()
        bar_arrive(DQ_FULL + turn, DQ_THREADS)
        if speaks(thread):
            smem[words + SLOTS // 4 + turn] = slot
""",
        0, 1,
        "Any call: the storing warp may read the slot of the tile before, a race; dQ is added to "
        "another query tile.",
    ),
    (
        "bwd_sm90", K + "bwd_sm90", "batch by query heads",
        "result = dk, dv, kv_stride, nk, heads_kv, factor, scale",
        "result = dk, dv, kv_stride, nk, heads, factor, scale", 0, 1,
        "Grouped heads and a batch of 2: dK and dV of the second element go to heads of the first "
        "that are not there.",
    ),
    (
        "bwd_sm90", K + "bwd_sm90_rows", "LSE as long as its tiles",
        "natural = lse[bh * nq + i]", "natural = lse[bh * n_col * TILE_M + i]", 0, 1,
        "nq no multiple of tile_m and two heads or batch elements: LSE of other queries, or out "
        "of bounds.",
    ),
    (
        "bwd_sm90", K + "bwd_sm90_rows", "dQ of batch 0",
        "to = (bh // heads) * stride[0] + (bh % heads)", "to = (bh % heads)", 0, 1,
        "Batch of 2 or more: dQ of all elements is stored over that of the first.",
    ),
    (
        "bwd_sm90", T + "wgmma_gradient", "bits of the key for those of the query",
        "equal(seen[n % 2] &", "equal(seen[n // 2] &", 0, 1,
        "A BITS tile in which two neighbouring queries see different keys.",
    ),
]

# 5. dK and dV by columns.
_ROW_READ = """\
                # Read before a product that all warps issue: its wait may release the record.
                _, n_block, bh, _ = read_record(
                    smem, words + RECORDS // 4 + RECORD_WORDS * stage_of(tile)
                )
"""
_COLUMN_END = """\
                if speaks(thread):
                    mbarrier_arrive(base + EMPTY_K + 8 * k_stage_of(column))
                    mbarrier_arrive(base + EMPTY_V)
                acc_dk, acc_dv = accumulate(
                    acc_dk, acc_dv, p, dp, kind, smem, stats, place, tile, drawing, thread
                )
                tile += one
                column += one
                kind = following
                if kind != END:
                    k = arrived_keys(smem, place, column, turn, thread)
                s = scores(k, place, tile)
                acc_dk = behind_dk(acc_dk, place, types.int32(tile - one), thread)
"""
_ROW_READ_LATE = """\
                _, n_block, bh, _ = read_record(
                    smem, words + RECORDS // 4 + RECORD_WORDS * stage_of(types.int32(tile - one))
                )
"""
COLUMNS = [
    (
        "columns", T + "wgmma_rows", "columns stored over the first ones",
        "(first + 8 * chunk)) // 2", "(8 * chunk)) // 2", 0, 1,
        "More columns than a warp stores at a time (head_dim > 64, or > 32 above 128): the last "
        "ones lie where the first belong.",
    ),
    (
        "columns", T + "wgmma_rows", "last chunk not stored",
        "range((chunks + 1) // 2)", "range(chunks // 2)", 0, 1,
        "head_dim = 8 mod 16 (8, 40, 72, 136): the last 8 columns of dK and dV are what shared "
        "memory held.",
    ),
    (
        "columns", T + "wgmma_kept", "products that begin anew",
        "accumulate=accumulate or i > 0", "accumulate=i > 0", 0, 1,
        "head_dim up to 64: dP of kept V begins at 0 and not at -delta, so dK lacks delta.",
    ),
    (
        "columns", K + "bwd_sm90_load", "keys of an empty column",
        "if item < live:", "if item <= live:", 0, 3,
        "Columns that blocks do not divide: the first empty one's K and V are sent to nobody; "
        "without any, the work list is read out of bounds.",
    ),
    (
        "columns", K + "bwd_sm90_columns", "batch for head",
        "warp, (b, h) = types.int32(thread >> 5), divided(bh, heads_kv)",
        "warp, (h, b) = types.int32(thread >> 5), divided(bh, heads_kv)", 0, 1,
        "Two heads of K or a batch of 2: dK and dV of another head, or out of bounds.",
    ),
    (
        "columns", K + "bwd_sm90_columns", "statistics of the last column's tile",
        "minus_deltas, shifts = statistics_of(stats, place, tile, thread)", "pass", 2, 3,
        "A block with two columns of two or more query tiles: the first tile of the second has "
        "LSE and delta of the last tile of the first.",
    ),
    (
        "columns", K + "bwd_sm90_columns", "record read after its release",
        _ROW_READ + _COLUMN_END, _COLUMN_END + _ROW_READ_LATE, 0, 1,
        "A block whose stream goes on for as many tiles as there are stages: warps that are late "
        "read the record that the loader has written over it, a race; gradients go elsewhere.",
    ),
    (
        "columns", K + "bwd_sm90_columns", "V kept before it is there",
        """\
                mbarrier_wait(base + FULL_V, v_phase_of(column))
                v = keys_of(smem, place, V, turn, thread)
""",
        """\
                v = keys_of(smem, place, V, turn, thread)
                mbarrier_wait(base + FULL_V, v_phase_of(column))
""",
        0, 1,
        "head_dim up to 64, whose V stays in registers: that of the column before, or of none.",
    ),
    (
        "columns", K + "bwd_sm90_wide", "P free before it is loaded",
        """\
        p = load_part(stats, place[1] + P // 4 + 4 * thread)
        bar_arrive(P_FREE, THREADS)
""",
        """\
        bar_arrive(P_FREE, THREADS)
        p = load_part(stats, place[1] + P // 4 + 4 * thread)
""",
        0, 1,
        "head_dim > 128 and two tiles: warpgroup 0 stores the next P while warpgroup 1 loads this "
        "one, a race.",
    ),
    (
        "columns", K + "bwd_sm90", "dO of its own without dQ",
        "cfg.with_dq, 1 + cfg.with_dq", "cfg.with_dq, 2", 0, 1,
        "A masked tile in the pass over columns: raw waits for a second arrival that never comes, "
        "a deadlock.",
    ),
]

# 6. dQ by rows.
DQ = [
    (
        "dq", K + "bwd_sm90_dq_load", "key head of another group",
        "h_kv, _ = divided(h, group)", "_, h_kv = divided(h, group)", 0, 1,
        "Grouped heads, or as many heads of K as of Q and more than one: K and V of another head.",
    ),
    (
        "dq", K + "bwd_sm90_dq_load", "empty rows over the first tile",
        "(row * TILE_M + q) * stride[1]", "q * stride[1]", 0, 1,
        "A row tile behind the first that attends nothing: its dQ is not written, and that of the "
        "first tile becomes 0.",
    ),
    (
        "dq", K + "bwd_sm90_dq_statistics", "delta of whole steps",
        "range(-(-HEAD_DIM // STEP))", "range(max(HEAD_DIM // STEP, 1))", 1, 2,
        "head_dim that is no multiple of 32 and above 32 (40, 72, 136): rowsum(dO * O) misses the "
        "last columns.",
    ),
    (
        "dq", K + "bwd_sm90_dq_statistics", "statistics in tiles of this pass",
        "types.int64(2 * STATS_M)", "types.int64(2 * TILE_M)", 0, 1,
        "A pass over columns with tiles of 64 queries beside 128 of this one, as the tables have: "
        "it reads statistics where none are.",
    ),
    (
        "dq", K + "bwd_sm90_dq_statistics", "O of rows in steps of 64",
        "upper = row * TILE_M + row_of_thread(thread)\n",
        "upper = row * ROWS + row_of_thread(thread)\n", 0, 1,
        "Two computing warpgroups and a second row tile: O, LSE and dLSE of queries before it.",
    ),
    (
        "dq", K + "bwd_sm90_dq_compute", "place free while dQ leaves",
        "                    bulk_wait_read()\n                    mbarrier_arrive(empty_out)\n",
        "                    mbarrier_arrive(empty_out)\n                    bulk_wait_read()\n",
        0, 1,
        "A block with more rows than the place has stages: the next Q (or dO) lands where the copy "
        "engine still reads dQ from, a race.",
    ),
    (
        "dq", K + "bwd_sm90_dq_compute", "panels of K on top of each other",
        "lower(base + K, KV_PANEL) + k_stage_of(tile)", "lower(base + K, 16) + k_stage_of(tile)",
        0, 1,
        "head_dim > 64: the columns of dQ from the 65th on are products of the wrong part of K.",
    ),
    (
        "dq", K + "bwd_sm90_dq_compute", "dO released before dQ goes there",
        "if BY_Q and leader:", "if leader:", 0, 1,
        "One stage of Q (head_dim > 128) and a block with two rows: the next dO arrives where dQ "
        "is put, and its barrier counts twice.",
    ),
    (
        "dq", K + "bwd_sm90_dq_config", "dQ through the only Q",
        "return self.q_stages > 1", "return self.q_stages >= 1", 0, 1,
        "One stage of Q (head_dim > 128) and a block with two rows: the next Q is awaited before "
        "dQ has left its place, a deadlock.",
    ),
    (
        "dq", K + "bwd_sm90_dq", "cleaners of the forward",
        "make_clean_stream(cfg, LOOKERS)", "make_clean_stream(cfg)", 0, 1,
        "A masked tile: 64 threads wait at a barrier for 96, a deadlock.",
    ),
]

# 7. Decode on Hopper.
DECODE_SM90 = [
    (
        "decode_sm90", K + "decode_sm90_load", "a tile but for its last key",
        "if n0 + TILE_N > seen_by_all:", "if n0 + TILE_N - 1 > seen_by_all:", 0, 1,
        "length - nq + 1 one below a multiple of the tile (one token and 63 keys): the last key "
        "of a tile taken for full counts for a token that does not see it.",
    ),
    (
        "decode_sm90", K + "decode_sm90_load", "a last box that is not full",
        "types.int32((min(length - n0, TILE_N) + BOX - 1) // BOX)",
        "types.int32(min(length - n0, TILE_N) // BOX)", 0, 1,
        "A length that is no multiple of the box (any contiguous cache, mostly): its last keys "
        "are never loaded.",
    ),
    (
        "decode_sm90", K + "decode_sm90_rows", "LSE of parts as O lies",
        "lse_at = types.int64((part * heads + head) * nq + token)",
        "lse_at = types.int64((part * nq + token) * heads + head)", 0, 1,
        "Several tokens and several heads: parts are weighed by other rows' LSE.",
    ),
    (
        "decode_sm90", K + "decode_sm90_compute", "lower row beside an upper one",
        "if below_lse >= 0:", "if upper_lse >= 0:", 0, 1,
        "Rows of a tile that leave a lower half row of 8 empty (1 token of 4 heads): a row that "
        "is none is stored at -head_dim, out of bounds.",
    ),
    (
        "decode_sm90", K + "decode_sm90_compute", "stage released under P V",
        """\
            wait_all()
            acc = settled(acc)
            if thread == 0:
                mbarrier_arrive(base + EMPTY + 8 * stage)
""",
        """\
            if thread == 0:
                mbarrier_arrive(base + EMPTY + 8 * stage)
            wait_all()
            acc = settled(acc)
""",
        0, 1,
        "A part with more tiles than stages: the copy engine writes V that the product still "
        "reads, a race.",
    ),
    (
        "decode_sm90", K + "decode_sm90_stored", "m of warps without keys",
        "known = select(equal(l, 0.0), NEG_INF, m)", "known = m", 0, 1,
        "A cache of one byte, a warp whose keys are all hidden (a short length) and scores below "
        "-160 in base 2: m = 0 of no keys makes all weights 0.",
    ),
    (
        "decode_sm90", K + "decode_sm90_join", "parts behind the last of a second step",
        "types.int32(count - u))", "types.int32(count))", 0, 1,
        "More than 4 splits, no multiple of 4: 0 * NaN where the stages held NaN as float32, as "
        "of a page's tokens behind the length that nobody has written.",
    ),
    (
        "decode_sm90", K + "decode_sm90", "a row tile more of full ones",
        "row_tiles = (nq * pack + TILE_M - 1) // TILE_M", "row_tiles = nq * pack // TILE_M + 1",
        0, 1,
        "nq * pack a multiple of 64 (of 16 for one byte), two heads of K or a batch of 2: blocks "
        "take other row tiles, heads and sequences than there are.",
    ),
    (
        "decode_sm90", K + "decode_sm90_scales", "unit of K's scales",
        "(v & EXPONENT for _, v in held)", "(k & EXPONENT for k, _ in held)", 0, 1,
        "A cache of one byte whose scales of V are 4 times those of K or more, in a full tile: "
        "P * scale / unit exceeds float16.",
    ),
    (
        "decode_sm90", T + "mma_stored", "sign of the scale dropped",
        "x ^ (SIGNS - 2**32) if cfg.negate else x", "x", 0, 1,
        "A cache of one byte and a scale below zero: S has the wrong sign.",
    ),
]

# 8. Decode without tensor cores.
DECODE = [
    (
        "decode", K + "decode_simt", "a tile but for its last key",
        "hidden = n0 + TILE_N > limit", "hidden = n0 + TILE_N - 1 > limit", 0, 1,
        "length - nq + 1 one below a multiple of the tile: the first token also attends the last "
        "key of that tile.",
    ),
    (
        "decode", K + "decode_simt", "bit tiles of all rows",
        "[u * SLOTS for u in range(KEYS)], QUERIES, TILE_N",
        "[u * SLOTS for u in range(KEYS)], ROWS, TILE_N", 0, 1,
        "A mask with a second BITS tile and pack > 1 (grouped heads): bits of another tile.",
    ),
    (
        "decode", K + "decode_simt", "LSE of parts as O lies",
        "(sequence * heads + at_head) * nq + token", "(sequence * nq + token) * heads + at_head",
        0, 1,
        "Several tokens and several heads: parts are weighed by other rows' LSE.",
    ),
    (
        "decode", K + "decode_simt", "m of a slot for its warp's O",
        "store_stats(smem, warp * ROWS, m_warp, l)", "store_stats(smem, warp * ROWS, m, l)", 0, 1,
        "A row whose largest score in a warp is not in slot 0: warps are weighed by another m "
        "than their O and l have.",
    ),
    (
        "decode", K + "decode_simt", "pages of a tile behind the last",
        "if t + 1 < end:", "if t < end:", 0, 1,
        "A mask, in the block that has the last tile of the schedule: col_idx is read out of "
        "bounds.",
    ),
    (
        "decode", K + "decode_simt", "lengths beyond the capacity",
        "length = min(max(lengths[b], 0), capacity)", "length = max(lengths[b], 0)", 0, 1,
        "A length on the device above the capacity (a graph that is replayed past it): keys and "
        "pages out of bounds.",
    ),
    (
        "decode", K + "decode_simt", "logarithm of nothing",
        "            if l_row != ZERO:\n", "            if True:\n", 0, 1,
        "A token that sees no key of a split (nq > length, or a mask): O = 0 / 0 instead of 0.",
    ),
    (
        "decode", T + "gather", "one column too many",
        "column + offset < cfg.head_dim", "column + offset <= cfg.head_dim", 0, 1,
        "head_dim < width (20, 40 …) and the last key at the end of memory: columns behind it are "
        "read out of bounds.",
    ),
    (
        "decode", T + "slots", "scores by key and row",
        "for step in steps for u in range(cfg.keys)", "for u in range(cfg.keys) for step in steps",
        0, 1,
        "Several tokens in a block, at the causal limit: what is hidden is that of other rows and "
        "keys.",
    ),
    (
        "decode", "nbflash.simt_decode", "alignment of V not looked at",
        "for x in (q, cache.k_cache, cache.v_cache)", "for x in (q, cache.k_cache)", 0, 1,
        "A v_cache whose row stride is no multiple of 4 elements beside an aligned k_cache: "
        "vector loads at places that are not aligned, a trap.",
    ),
]

# 9. Parts joined.
COMBINE = [
    (
        "combine", T + "parts", "maximum of the first 32 splits",
        "for s in range(lane, splits, WARP):", "for s in range(lane, min(splits, WARP), WARP):",
        0, 2,
        "More than 32 splits of which only later ones have keys for a row: m = -inf, and so is "
        "the LSE (and weights overflow where later ones are 89 above).",
    ),
    (
        "combine", T + "parts", "sum of the first 32 splits",
        "for s in range(lane, splits, WARP):", "for s in range(lane, min(splits, WARP), WARP):",
        1, 2,
        "More than 32 splits: l lacks the weights of those from the 33rd on.",
    ),
    (
        "combine", T + "parts", "maximum of split 0",
        "part_lse[s * rows + at]", "part_lse[at]", 0, 2,
        "A row that split 0 has no keys for (LSE -inf there): m and the LSE are -inf though "
        "others have; and weights overflow where others are 89 above.",
    ),
    (
        "combine", T + "parts", "columns behind the last part",
        "if head_dim % WARP:", "if False:", 0, 1,
        "head_dim that is no multiple of 32: lanes read behind the last row of the last part, "
        "out of bounds.",
    ),
    (
        "combine", T + "parts", "weights of the row of O",
        "load(part_lse, first + at + s)", "load(part_lse, first + row + s)", 0, 1,
        "Several queries and several heads: O and LSE lie in different orders, so parts are "
        "weighed by another row's LSE.",
    ),
    (
        "combine", T + "parts", "parts behind the last are read",
        "[select(t, u * step * rows, 0) for u, t in enumerate(there)]",
        "[u * step * rows for u, _ in enumerate(there)]", 0, 1,
        "Splits that are no multiple of 4 times the warps: loads out of bounds behind the last "
        "part, and 0 * NaN of what is there.",
    ),
    (
        "combine", K + "combine_simt", "warps as far apart as columns",
        "smem[w * WIDTH + d]", "smem[w * HEAD_DIM + d]", 0, 1,
        "head_dim that is no multiple of 32, two or more warps: other columns of the second "
        "warp's sum.",
    ),
    (
        "combine", K + "combine_simt", "out of batch 0",
        "o_base = b * o_stride[0] + i", "o_base = i", 0, 1,
        "Batch of 2 or more: all of it is stored over the first element.",
    ),
    (
        "combine", K + "combine_simt", "nothing divided by nothing",
        "            if l != ZERO:\n                total /= l\n", "            total /= l\n", 0, 1,
        "A row that no split has keys for: NaN instead of 0.",
    ),
    (
        "combine", K + "combine_simt", "shared memory of one warp",
        "self.warps * self.width * self.accumulator", "self.width * self.accumulator", 0, 1,
        "More than 4 splits, so two or more warps: sums out of the bounds of shared memory.",
    ),
]

# 10. Score functions.
_SCORED = "            s_a = scored_a(s_a, scoring[0])\n"
_MASKED = """\
            if masked and (not first or kind != FULL):
                s_a = keep_a(s_a, keep)
"""
SCORES = [
    (
        "simt_scores", T + "score", "first factor for every function",
        "next(held) if form.holds else None, own, before)",
        "next(held) if form.holds else None, own, factor)", 0, 1,
        "One's own function (bias, relative, custom) composed behind softcap: it gets tanh and "
        "not cap * tanh.",
    ),
    (
        "simt_scores", K + "bwd_simt", "slope of the key head",
        "n0 + 4 * tx), hold(h, params, ONE)", "n0 + 4 * tx), hold(h_kv, params, ONE)", 0, 1,
        "ALiBi by heads with grouped heads: the backward takes another head's slope.",
    ),
    (
        "simt_scores", K + "bwd_simt", "natural scores in base 2",
        "rest(params, ONE, UNIT)", "rest(params, ONE, ONE)", 0, 1,
        "Any score function: P of the backward is 2^S' instead of e^S'.",
    ),
    (
        "sm90_scores", T + "score", "tanh in another unit",
        "* factor * self._times", "* factor", 0, 1,
        "softcap of float16 on Hopper, whose tanh takes its argument times 2 log2 e (for bfloat16 "
        "that is 1).",
    ),
    (
        "sm90_scores", K + "sm90_whole", "lost scores without ALiBi",
        "elif SCORED:", "elif SCORED and not ADDS:", 0, 1,
        "ALiBi with head_dim > 64 and scores 2^100 beyond those before: what is computed once "
        "more lacks it.",
    ),
    (
        "sm90_scores", K + "sm90_halves", "score of what is hidden",
        _SCORED + _MASKED, _MASKED + _SCORED, 0, 1,
        "softcap by halves with hidden keys in the first half of a tile (causal): tanh(-inf) = -1, "
        "they count as -cap.",
    ),
    (
        "score_gradients", K + "dscore_simt", "hidden scores added",
        "return add(held, pairs, sums, ds) if ds != ZERO else held",
        "return add(held, pairs, sums, ds)", 0, 1,
        "An array with an element for each score and nq or nk no multiple of a tile: rows past "
        "the end store their 0 over the last one's gradient, a race.",
    ),
    (
        "score_gradients", K + "dscore_simt", "dO with Q's batch stride",
        "at = b * do_stride[0] + h * do_stride[2]", "at = b * q_stride[0] + h * do_stride[2]",
        0, 1,
        "Batch of 2 or more where dout and q lie in memory in different orders.",
    ),
    (
        "score_gradients", "nbflash.score_chain", "slope of the result",
        "slope = real(slope_of(s, b, h", "slope = real(slope_of(x, b, h", 0, 1,
        "A learned array before a function whose slope depends on its score (ALiBi, then softcap): "
        "the slope is taken at s' instead of s.",
    ),
    (
        "score_gradients", T + "score_sums", "an element past the end",
        "exists and 0 <= at < shape[-1]", "exists and 0 <= at <= shape[-1]", 0, 1,
        "A custom function that names column n of n: the next row's first element gets it, or "
        "memory behind the array, and no NaN tells.",
    ),
]

# 11. Dropout.
_LSE = "        values = log_sum_exp(m, l)\n"
_SHARE = """\
        if DROPOUT:
            _, share = dropping
            l = l[0] * share, l[1] * share
"""
DROPOUT = [
    (
        "simt_dropout", K + "fwd_simt", "sum of what is kept",
        """\
            l = row_sum(l, alpha, p)
            m = m_new
            if DROPOUT:
                z = kept(key, threshold, b, h, q0 + 4 * ty, n0 + 4 * tx)
                p = drop(p, z, factor)
""",
        """\
            m = m_new
            if DROPOUT:
                z = kept(key, threshold, b, h, q0 + 4 * ty, n0 + 4 * tx)
                p = drop(p, z, factor)
            l = row_sum(l, alpha, p)
""",
        0, 1,
        "Any dropout: O is normalised by the kept weights, and the LSE is theirs.",
    ),
    (
        "simt_dropout", T + "dropout", "the threshold itself is dropped",
        "first = ONE if halves & MASK >= threshold", "first = ONE if halves & MASK > threshold",
        0, 1,
        "A score of an even key whose number equals the threshold, one of 32768: a problem of "
        "some 100000 scores, or a seed that is looked for.",
    ),
    (
        "simt_dropout", T + "dropout", "queries change places behind the keys",
        """\
        if q_idx & 8:
            w0, w1, w2, w3 = w1, w0, w3, w2
        if kv & 8:
            w0, w2 = np.uint32(_crossed(w0, w1)), np.uint32(_crossed(w2, w3))
""",
        """\
        if kv & 8:
            w0, w2 = np.uint32(_crossed(w0, w1)), np.uint32(_crossed(w2, w3))
        if q_idx & 8:
            w0, w1, w2, w3 = w1, w0, w3, w2
""",
        0, 1,
        "Queries and keys with bit 3 set, such as 8 and 8: words that are not crossed.",
    ),
    (
        "simt_dropout", T + "dropout", "a state's offset alone",
        "_key(seed ^ more[0],", "_key(seed,", 0, 1,
        "A state in memory (a CUDA graph's): every seed drops the same scores.",
    ),
    (
        "simt_dropout", K + "bwd_simt", "dS of what is left of P",
        """\
                    store_ds(smem, DS + own, P + own, x, STATS + TILE_M + 4 * ty)
                    if DROPOUT:
                        drop_p(smem, P + own, z, factor)
""",
        """\
                    if DROPOUT:
                        drop_p(smem, P + own, z, factor)
                    store_ds(smem, DS + own, P + own, x, STATS + TILE_M + 4 * ty)
""",
        0, 1,
        "Any dropout: dS = (P * Z) * (dP - delta), which is 0 where it should be -P delta.",
    ),
    (
        "dropout_forward", T + "dropout_wgmma", "a call of the same group for all rows",
        "_exchanged(*words_of(swapped + group)", "_exchanged(*words_of(group)", 0, 1,
        "Tiles of two groups of 32 keys: lanes of every other row keep by words of the other "
        "group's keys.",
    ),
    (
        "dropout_forward", K + "sm90_row", "LSE of the share",
        _LSE + _SHARE, _SHARE + _LSE, 0, 1,
        "Any dropout: the LSE is off by log(1 - p).",
    ),
    (
        "dropout_columns", T + "dropout_wgmma", "what the own words add",
        "z, w = (c ^ d) & far, (a ^ b) & far", "z, w = (a ^ b) & far, (c ^ d) & far", 0, 1,
        "Keys with bit 4 set (16 … 31): other numbers than those of the forward.",
    ),
    (
        "dropout_columns", K + "bwd_sm90_dropout", "batch for head",
        "types.uint32(h), types.uint32(b)", "types.uint32(b), types.uint32(h)", 0, 1,
        "Two heads or a batch of 2, where the numbers of both differ: other scores are dropped "
        "than in the forward.",
    ),
    (
        "dropout_rows", K + "sm90_dropout", "dS of what is hidden",
        "return counted(p, gradients(p, dp))", "return gradients(p, dp)", 0, 1,
        "A masked tile with NaN in V of a key that nobody sees: 0 * NaN reaches dQ.",
    ),
]

NEW = [
    *SIMT_FORWARD,
    *SIMT_BACKWARD,
    *FWD_SM90,
    *BWD_SM90,
    *COLUMNS,
    *DQ,
    *DECODE_SM90,
    *DECODE,
    *COMBINE,
    *SCORES,
    *DROPOUT,
]

# Legal input shows them, but they reach no kernel in the families as they are: nbflash.simt binds
# nbflash.score_params by `from nbflash import …`, which is the module that was imported first, and
# ScoreCode is made there.
EXTRA = [
    (
        "simt_scores", T + "score", "slopes if all have one",
        "return any(grad is not scores._one for _, grad in self.functions)",
        "return all(grad is not scores._one for _, grad in self.functions)", 0, 1,
        "softcap composed with ALiBi or a bias: dS without the slope of tanh.",
    ),
    (
        "simt_scores", "nbflash.score_params", "slopes below zero in ALiBi's own form",
        "np.all((slopes >= 0) & (slopes <= STEEPEST))", "np.all(slopes <= STEEPEST)", 0, 1,
        "ALiBi with a slope below zero: its own form takes the absolute value.",
    ),
    (
        "sm90_scores", T + "score", "sums by the last function",
        'return self.forms == ("alibi",)', 'return self.forms[-1:] == ("alibi",)', 0, 1,
        "ALiBi composed behind a bias, a scale that is not 1: S begins as what both make of 0.",
    ),
]
