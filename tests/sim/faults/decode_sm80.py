"""Faults of the portable decode kernel and what binds it."""

from mutants import Mutant, without

ROOM, SHARED = "nbflash.backends.sm80.decode", "nbflash.backends.split_kv"
PART, COPIES, RESULTS, KERNEL, BINDING = CHAIN = (
    f"{SHARED}.part",
    *(f"{ROOM}.{name}" for name in ("copies", "results", "kernel", "host")),
)
PARTS = (
    Mutant("no pages", "if page_size > 0:", "if page_size < 0:"),
    Mutant("tokens as pages", "nth, inside = divmod", "inside, nth = divmod"),
    Mutant("the table of the first sequence", "table[first_page + nth]", "table[nth]"),
)
COPY = (
    Mutant("rows behind the last", "both(row < valid, chunk < USED)", "chunk < USED"),
    Mutant("columns behind the last", "both(row < valid, chunk < USED)", "row < valid"),
    Mutant("swizzle of Q", "TILE.place(row, chunk)", "(row * CHUNKS + chunk) * 16"),
    Mutant(
        "Q of the first rows", "divmod_int32(types.int32(first + r), pack)", "divmod_int32(r, pack)"
    ),
    Mutant("tokens as heads", "token, head = divmod_int32(", "head, token = divmod_int32("),
    Mutant("one chunk of Q", "+ chunk * CHUNK", ""),
    Mutant("rows of the first block", "types.int32(count - first)", "types.int32(count)"),
    Mutant("a tile behind the last", "if t < end:", "if t <= end:"),
    Mutant("the list's index as a tile", "col_idx[t] if MASKED else t", "t"),
    Mutant("keys of the first warp", "tile * TILE_N + own", "tile * TILE_N"),
    Mutant("one key too few", "max(length - key, NONE)", "max(length - key - 1, NONE)"),
    Mutant("one key too many", "max(length - key, NONE)", "max(length - key, NONE) + 1"),
    Mutant("pages of no key", "            if valid > 0:", "            if valid >= 0:"),
    Mutant("K of the first page", "page * k_stride[0] +", ""),
    Mutant("K from the page's start", "inside * k_stride[1] +", ""),
    Mutant("K of the first head", "+ head * k_stride[2]", ""),
    Mutant("V of the first page", "page * v_stride[0] +", ""),
    Mutant("V from the page's start", "inside * v_stride[1] +", ""),
    Mutant("V of the first head", "+ head * v_stride[2]", ""),
    Mutant("V laid out as K", "v_at, v_stride[1],", "v_at, k_stride[1],"),
    Mutant("V upon K", "types.int32(to + V), v", "to, v"),
    Mutant("K for V", "types.int32(to + V), v", "types.int32(to + V), k"),
)
RESULT = (
    Mutant("O of the upper row below", "row * O_WORDS + fragment.column(i)", "fragment.column(i)"),
    Mutant("m of the upper row", "at + 16 * i, float", "at, float"),
    Mutant("l in place of m", "float_bits(m[i])", "float_bits(l[i])"),
    Mutant("l of one lane", "row_total(l)", "l"),
    Mutant("rings upon each other", "+ (thread >> 5) * RING", ""),
    Mutant("O of the first row", "own + row * O_WORDS + 2 * quad", "own + 2 * quad"),
    Mutant("O of the first columns", "row * O_WORDS + 2 * quad", "row * O_WORDS"),
    Mutant("statistics of the first row", "own + STATISTICS + 2 * row", "own + STATISTICS"),
    Mutant("rows behind the last", "min(count - first, ROWS)", "ROWS"),
    Mutant("all rows in a column", "i % QUADS * 4", "0"),
    Mutant("joined from the first row", "RINGS + row * O_WORDS + column", "RINGS + column"),
    Mutant("joined m of the first row", "RINGS + STATISTICS + 2 * row", "RINGS + STATISTICS"),
    Mutant("places of the first block", "types.int32(first + row)", "row"),
    Mutant("columns of the row", "o_at * HEAD_DIM + column", "o_at * HEAD_DIM"),
    Mutant("LSE of no column", "if column == 0:", "if column == 2:"),
)
KERNELS = (
    Mutant("rings of the first warp", "+ thread // WARP * RING_BYTES", ""),
    Mutant("K by rows", "ring + TILE.by_columns(lane)", "ring + TILE.by_rows(lane)"),
    Mutant("V where K is", "ring + V + TILE.by_rows(lane)", "ring + TILE.by_rows(lane)"),
    Mutant("Q of every lane alike", "first + TILE.by_rows(lane)", "first"),
    Mutant("the first stage", "address + stage * STAGE_BYTES", "address"),
    Mutant("bits of the first warp", "unsigned(x) >> own // 4", "unsigned(x)"),
    Mutant("l not rescaled", "x * a + y", "x + y"),
    Mutant("sums dropped", "x * a + y", "x * a"),
    Mutant("a block too few", "(nq * pack + ROWS - 1) // ROWS", "max(nq * pack // ROWS, 1)"),
    Mutant("lengths of the first sequence", "lengths[b]", "lengths[0]"),
    Mutant("lengths beyond the capacity", "min(max(lengths[b], 0), capacity)", "lengths[b]"),
    Mutant("plane of the first heads", "plane_of[rest]", "plane_of[0]"),
    Mutant("a ragged tile in full", "types.int32(length - nq + 1)", "length"),
    Mutant("heads as key heads", "head_kv, _ = divmod_int32(head, group)", "head_kv = head"),
    Mutant("pages of the first sequence", "b * table_width", "0 * table_width"),
    Mutant("rows of the first block", "types.int32(row_tile * ROWS), types", "NONE, types"),
    Mutant("Q of the first sequence", "b * q_stride[0] + head", "head"),
    Mutant("Q of the first head", " + head * q_stride[2]", ""),
    Mutant("copies of the first tile", "types.int32(begin + i)", "types.int32(begin)"),
    Mutant("copies upon each other", "staged(ring, types.int32(i))", "staged(ring, NONE)"),
    Mutant(
        "the wrong tile ahead", "types.int32(begin + STAGES - 1)", "types.int32(begin + STAGES)"
    ),
    Mutant("parts of the first split", "types.int32(split * batch + b)", "types.int32(b)"),
    Mutant("the upper row twice", "lane // 4 + 8)", "lane // 4)"),
    Mutant("Q read too early", "        wait_q()\n", ""),
    Mutant("Q of other warps read too early", "        cuda.syncthreads()  # Q is in place\n", ""),
    Mutant("K and V read too early", "            wait()\n", ""),
    Mutant(
        "kinds left out",
        "types.int32(col_idx[t] * TILE_N), types.int32(kinds[t])",
        "types.int32(col_idx[t] * TILE_N), types.int32(FULL)",
    ),
    Mutant(
        "copies into the stage that is read",
        "staged(ring, free), caches",
        "staged(ring, stage), caches",
    ),
    Mutant("the same tile ahead", "types.int32(t + STAGES)", "types.int32(t + STAGES - 1)"),
    Mutant("a masked tile in full", "kind != FULL or n0", "n0"),
    Mutant(
        "a tile but for its last key", "own + KEYS > seen_by_all", "own + KEYS - 1 > seen_by_all"
    ),
    Mutant("the first warp's keys", "n0 + own + KEYS > seen_by_all", "n0 + KEYS > seen_by_all"),
    Mutant("columns of the first lane", "types.int32(lane % 4 * 2)", "NONE"),
    Mutant(
        "mask of the upper row twice",
        "keep_of(kind, n0, below, bits",
        "keep_of(kind, n0, upper, bits",
    ),
    without("mask", "s = apply_keep(s, own_of(keep, own))"),
    Mutant(
        "scale dropped",
        "probabilities(s, m_new, scale)",
        "probabilities(s, m_new, types.float32(1))",
    ),
    Mutant("maximum of this tile", "row_max(m, s, scale)", "row_max(M_START, s, scale)"),
    Mutant("alpha upside down", "rescale(m, m_new)", "rescale(m_new, m)"),
    without("O rescaled", "acc = scale_rows(acc, alpha)"),
    without("m and l kept", "m, l = m_new, plus(l, alpha, sums)"),
    Mutant(
        "V looked through where K is",
        "staged(ring, stage) + V - start",
        "staged(ring, stage) - start",
    ),
    Mutant("never looked through", "!= 0) != 0:", "!= 0) < 0:"),
    without("poison", "p = poison_rows(p, staged(v_at, stage))"),
    without("cleaning", "clean(smem, word, lane)"),
    Mutant("the next stage alone", "            stage, _ = advance(stage, NONE)\n", ""),
    Mutant("one stage that is free", "            free = stage\n", ""),
    Mutant("the sign of the scale", "negate=cfg.negate", "negate=False"),
    Mutant("counts of splits", "(counts, tile)", "(counts, split)"),
    Mutant(
        "joined from the first rows",
        "b, packed * pack, rows[0], types",
        "b, packed * pack, NONE, types",
    ),
    Mutant("joined behind the last row", "types.int32(min(nq * pack - rows[0], ROWS))", "ROWS"),
    Mutant("joined in the first heads", "b, packed * pack, rows[0]", "b, NONE, rows[0]"),
    Mutant(
        "joined in the first sequence",
        "rows = b, packed * pack, rows[0]",
        "rows = NONE, packed * pack, rows[0]",
    ),
)
BIND = (
    Mutant("blocks for all tokens alike", "-(-p.nq * pack // ROWS)", "1"),
    Mutant("blocks of heads", "(p.heads // pack)", "p.heads_kv"),
    Mutant("key heads as heads", "p.heads // p.heads_kv\n", "1\n"),
    Mutant(
        "K's strides for V",
        "(q, cache.k_cache, cache.v_cache))\n        constants",
        "(q, cache.k_cache, cache.k_cache))\n        constants",
    ),
    Mutant("scale of natural scores", "abs(p.scale) * LOG2_E", "abs(p.scale)"),
    Mutant("the sign of the scale", "p.scale < 0", "False"),
    Mutant("a table as if contiguous", "table.strides[0] // table.itemsize", "table.shape[1]"),
    Mutant("never joined", "(address(counts), True)", "(address(counts), False)"),
    Mutant("tiles of the mask", "walk(p, mask, TOKENS, cfg", "walk(p, mask, ROWS, cfg"),
)
MUTANTS = [
    (target, mutant)
    for target, mutants in zip(CHAIN, (PARTS, COPY, RESULT, KERNELS, BIND), strict=True)
    for mutant in mutants
]
