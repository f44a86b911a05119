"""Faults of the portable decode kernel and what binds it."""

from mutants import Mutant, without

ROOM, SHARED = "nbflash.backends.sm80.decode", "nbflash.backends.split_kv"
PART, SHARES, COPIES, SCORES, COMPUTING, STORED, RESULTS, KERNEL, BINDING = CHAIN = (
    *(f"{SHARED}.{name}" for name in ("part", "shares")),
    *(
        f"{ROOM}.{name}"
        for name in ("copies", "score", "compute", "compute_8bit", "results", "kernel", "host")
    ),
)
PARTS = (
    Mutant("no pages", "if page_size > 0:", "if page_size < 0:"),
    Mutant("tokens as pages", "nth, inside = divmod", "inside, nth = divmod"),
    Mutant("the table of the first sequence", "table[first_page + nth]", "table[nth]"),
    Mutant("tiles before the window", "types.int32(first // TILE_N)", "types.int32(0)"),
    Mutant("listed tiles before the window", "if first_tile > 0:", "if first_tile < 0:"),
    Mutant("window a key short", "max(at - left, ", "max(at - left + 1, "),
    Mutant("window a key long", "max(at - left, ", "max(at - left - 1, "),
    Mutant("a key short to the right", "min(at + right + 1, length)", "min(at + right, length)"),
    Mutant("a key long to the right", "min(at + right + 1, length)", "min(at + right + 2, length)"),
    Mutant("keys behind the length", "min(at + right + 1, length)", "at + right + 1"),
    Mutant("tokens before the first key", "if SCORED and at < 0:", "if SCORED and at < -99:"),
)
COPY = (
    Mutant("a tile behind the last", "if t < end:", "if t <= end:"),
    Mutant("the list's index as a tile", "col_idx[t] if MASKED else t", "t"),
    Mutant("keys of the first warp", "tile * TILE_N + first_key", "tile * TILE_N"),
    Mutant("one key too few", "max(length - key, NONE)", "max(length - key - 1, NONE)"),
    Mutant("one key too many", "max(length - key, NONE)", "max(length - key, NONE) + 1"),
    Mutant("pages of no key", "            if valid > 0:", "            if valid >= 0:"),
    Mutant("K of the first page", "k_at = page * k_stride[0] +", "k_at ="),
    Mutant("K from the page's start", "inside * k_stride[1] +", ""),
    Mutant("K of the first head", "+ head * k_stride[2]\n            copy", "\n            copy"),
    Mutant("V of the first page", "v_at = page * v_stride[0] +", "v_at ="),
    Mutant("V from the page's start", "inside * v_stride[1] +", ""),
    Mutant("V of the first head", "+ head * v_stride[2]\n            copy", "\n            copy"),
    Mutant("V laid out as K", "v_at, v_stride[1],", "v_at, k_stride[1],"),
    Mutant("V upon K", "types.int32(to + V), v", "to, v"),
    Mutant("K for V", "types.int32(to + V), v", "types.int32(to + V), k"),
    Mutant("scales behind the length", "if key < valid:", "if True:"),
    Mutant("a scale of K for V", "found = v_scale[", "found = k_scale["),
    Mutant("the same scale for all keys", "at = inside + key", "at = inside"),
    Mutant("scales of the first page", "k_scale[page * k_stride[0] + ", "k_scale["),
    Mutant("scales of V's first head", "at * v_stride[1] + head * v_stride[2]", "at * v_stride[1]"),
    Mutant("scales by 16 lanes", "if lane < KEYS:", "if True:"),
    Mutant("scales where V is", "+ SCALES + lane", "+ lane"),
    Mutant("scales of the first stage", "word + (to - first) // 4 + SCALES", "word + SCALES"),
)
RESULT = (
    Mutant("O of the upper row below", "row * O_WORDS + fragment.column(i)", "fragment.column(i)"),
    Mutant("l of one lane", "row_total(l)", "l"),
    Mutant("rings upon each other", "+ (thread >> 5) * RING", ""),
    Mutant("O of the first row", "own + row * O_WORDS + 2 * quad", "own + 2 * quad"),
    Mutant("O of the first columns", "own + row * O_WORDS + 2 * quad", "own + row * O_WORDS"),
    Mutant("statistics of the first row", "own + STATISTICS + 2 * row", "own + STATISTICS"),
    Mutant("rows behind the last", "min(count - first, ROWS)", "ROWS"),
    Mutant("all rows in a column", "i % QUADS * 4", "0"),
    Mutant("joined from the first row", "RINGS + place_of(row, column)", "RINGS + column"),
    Mutant("joined m of the first row", "RINGS + STATISTICS + 2 * row", "RINGS + STATISTICS"),
    Mutant("places of the first block", "types.int32(first + row)", "row"),
    Mutant("columns of the row", "o_at * HEAD_DIM + column", "o_at * HEAD_DIM"),
    Mutant("LSE of no column", "if column == 0:", "if column == 2:"),
)
SCORE = (
    Mutant("scores of the upper row", "for row in range(2)]", "for row in (0, 0)]"),
    Mutant("columns of the first key", "(0, fragment.column(i))", "(0, 0)"),
    Mutant("the upper row's place twice", "types.int32(row + 8), key", "row, key"),
    Mutant("tokens as heads", "token, nth = divmod_int32(", "nth, token = divmod_int32("),
    Mutant("places of the first head", "types.int32(head + nth)", "types.int32(head)"),
    Mutant("positions of the first token", "types.int32(first + token)", "first"),
    Mutant("slopes of the upper row's head", "hold(below[1], params", "hold(above[1], params"),
    Mutant("scores in base e", "rest(params, scale, UNIT)", "scale"),
)
COMPUTE = (
    Mutant("rows behind the last", "both(row < valid, chunk < USED)", "chunk < USED"),
    Mutant("columns behind the last", "both(row < valid, chunk < USED)", "row < valid"),
    Mutant("swizzle of Q", "TILE.place(row, chunk)", "(row * CHUNKS + chunk) * 16"),
    Mutant(
        "Q of the first rows",
        "divmod_int32(types.int32(first_row + r), pack)",
        "divmod_int32(r, pack)",
    ),
    Mutant("tokens as heads", "token, head = divmod_int32(", "head, token = divmod_int32("),
    Mutant("one chunk of Q", "+ chunk * CHUNK", ""),
    Mutant("rows of the first block", "types.int32(count - first_row)", "types.int32(count)"),
    Mutant("K by rows", "ring + TILE.by_columns(lane)", "ring + TILE.by_rows(lane)"),
    Mutant("V where K is", "ring + V + rows", "ring + rows"),
    Mutant("Q of every lane alike", "first + rows, ring", "first, ring"),
    without("mask", "s = apply_keep(s, keep)"),
    Mutant("scale dropped", "probabilities(s, m_new, unit)", "probabilities(s, m_new, ZERO + 1)"),
    Mutant("maximum of this tile", "row_max(m, s, unit)", "row_max(M_START, s, unit)"),
    Mutant("alpha upside down", "rescale(m, m_new)", "rescale(m_new, m)"),
    without("O rescaled", "acc = scale_rows(acc, alpha)"),
    Mutant("V looked through where K is", "(ring - first + V) // 4", "(ring - first) // 4"),
    Mutant("never looked through", "!= 0) != 0:", "!= 0) < 0:"),
    without("poison", "p = poison_rows(p, v_at)"),
    without("cleaning", "clean(smem, v_word, lane)"),
    Mutant("the sign of the scale", "negate=cfg.negate", "negate=False"),
    Mutant("sums dropped", "row_sums(p), pack_p(p)", "(ZERO, ZERO), pack_p(p)"),
    Mutant("the maximum of before", "return m_new, add_sums", "return m, add_sums"),
)
STORE = (
    Mutant("Q behind the last row", "min(first + row, count - 1)", "first + row"),
    Mutant("Q of the first head", "+ head * q_stride[2]) // 2", ") // 2"),
    Mutant("the upper row of Q twice", "(lane >> 2) + 8)", "lane >> 2)"),
    Mutant("Q of another warp", "if thread < 32:", "if thread < 0:"),
    Mutant("factors of rows swapped", "return upper_inverse, below", "return below_inverse, below"),
    Mutant("scales of K for V", "types.int32(own + KEYS))", "own)"),
    Mutant("scales of the first lane", "SCALES + 2 * c)", "SCALES)"),
    Mutant("unit of a lane's keys", "across_lanes((largest,), QUAD, maximum)[0]", "largest"),
    Mutant("unit of the first key", "for x in scales[1:]:", "for x in scales[:1]:"),
    without("mask", "s = apply_keep(s, keep)"),
    Mutant("scores as they are", "s = scale_scores(", "scale_scores("),
    Mutant("scale dropped", "probabilities(s, m_new, factor)", "probabilities(s, m_new, ZERO + 1)"),
    Mutant("alpha upside down", "rescale(m, m_new)", "rescale(m_new, m)"),
    Mutant("scales that are no numbers", "scales, bad = finite(scales)", "pass"),
    Mutant(
        "unit of a tile for who does not see it",
        "in_own_units(p, alpha, scales, unit)",
        "in_units(p, alpha, scales, unit, unit_of(scales))",
    ),
    Mutant("O not rescaled", "if changes(alpha):", "if False:"),
    Mutant("V where K is", "types.int32(stage + V), types", "stage, types"),
    Mutant("V of the first lane's keys", "types.int32(2 * c), pack_p", "types.int32(0), pack_p"),
    Mutant(
        "products of NaN",
        "        if hidden:\n            acc, bad",
        "        if False:\n            acc, bad",
    ),
    without(
        "poison", "l = poisoned(l, (types.uint32(keep[0] & bad), types.uint32(keep[1] & bad)))"
    ),
    Mutant("poison of the upper row", "types.uint32(keep[1] & bad)", "types.uint32(keep[0] & bad)"),
    Mutant("O in units", "out_of_units(acc, unit), m, l", "acc, m, l"),
    Mutant("the maximum of before", "return m_new, l, acc", "return m, l, acc"),
)
KERNELS = (
    Mutant("rings of the first warp", "+ (thread >> 5) * RING_BYTES", ""),
    Mutant("the first stage", "address + stage * STAGE_BYTES", "address"),
    Mutant("bits of the first warp", "unsigned(x) >> first_key // 4", "unsigned(x)"),
    Mutant("a block too few", "(nq * pack + ROWS - 1) // ROWS", "max(nq * pack // ROWS, 1)"),
    Mutant("lengths of the first sequence", "lengths[b]", "lengths[0]"),
    Mutant("lengths beyond the capacity", "min(max(lengths[b], 0), capacity)", "lengths[b]"),
    Mutant("plane of the first heads", "plane_of[rest]", "plane_of[0]"),
    Mutant("a ragged tile in full", "left + right + 2 - nq - KEYS", "left + right + 2"),
    Mutant("a tile with keys before the window in full", "place < 0 or ", ""),
    Mutant("window of the first token", "length - 1 - left)", "length - nq - left)"),
    Mutant("part a key short", "max(length - nq - left, ", "max(length - nq - left + 1, "),
    Mutant("part a key long", "max(length - nq - left, ", "max(length - nq - left - 1, "),
    Mutant("tokens before the first key", "if SCORED and length < nq:", "if False:"),
    Mutant("scores of the first warp's keys", "n0 + first_key + lane % 4 * 2", "n0 + lane % 4 * 2"),
    Mutant("scores of the first lane's keys", "n0 + first_key + lane % 4 * 2", "n0 + first_key"),
    Mutant("scores of the first sequence", "sequence = b, types", "sequence = NONE, types"),
    Mutant("scores of places", "b, types.int32(length - nq), head", "b, NONE, head"),
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
    Mutant("the upper row twice", "types.int32(row + 8), row_place", "row, row_place"),
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
    Mutant("a masked tile in full", "kind != FULL or place", "place"),
    Mutant(
        "a tile but for its last key",
        "place > seen_by_all",
        "place > seen_by_all + 1",
    ),
    Mutant("the first warp's keys", "n0 + first_key - seen_from", "n0 - seen_from"),
    Mutant("columns of the first lane", "types.int32(lane % 4 * 2), types", "NONE, types"),
    Mutant(
        "mask of the upper row twice",
        "keep_of(kind, n0, below, bits",
        "keep_of(kind, n0, upper, bits",
    ),
    Mutant("the next stage alone", "            stage, _ = advance(stage, NONE)\n", ""),
    Mutant("one stage that is free", "            free = stage\n", ""),
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
SHARE = (
    Mutant("blocks for all tokens alike", "-(-p.nq * pack // cfg.tile_m)", "1"),
    Mutant("blocks of heads", "(p.heads // pack)", "p.heads_kv"),
    Mutant("key heads as heads", "pack, p.heads // p.heads_kv", "pack, 1"),
    Mutant("scale of natural scores", "(p.scale, p.score is not None)", "(p.scale, True)"),
    Mutant("scale in base 2 before a score", "(p.scale, p.score is not None)", "(p.scale, False)"),
    Mutant(
        "a table as if contiguous",
        "block_table.strides[0] // block_table.itemsize",
        "block_table.shape[1]",
    ),
    Mutant("tiles of the mask", "walk(p, mask, TOKENS, cfg", "walk(p, mask, cfg.tile_m, cfg"),
)
BIND = (
    Mutant("K's strides for V", "for x in cache[:2])", "for x in (cache.k_cache,) * 2)"),
    Mutant("the sign of the scale", "p.scale < 0", "False"),
    Mutant("the causal rule beside a mask", "p.window_within(mask)", "p.window_within(None)"),
    Mutant("never joined", "(address(counts), True)", "(address(counts), False)"),
)
FAULTS = PARTS, SHARE, COPY, SCORE, COMPUTE, STORE, RESULT, KERNELS, BIND
MUTANTS = [
    (target, mutant) for target, mutants in zip(CHAIN, FAULTS, strict=True) for mutant in mutants
]
