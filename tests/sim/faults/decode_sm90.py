"""Faults of the Hopper decode kernel."""

from mutants import Mutant, lines, swapped, without

ROOM = "nbflash.backends.sm90.decode"
SHARED = "nbflash.backends.split_kv"
PRODUCTS, PART, UNITS, WARPS, JOINING, SCALES, LOADING, COMPUTING, STORED, KERNEL = CHAIN = (
    "nbflash.cuda.tile.mma.quantised_gemm",
    *(f"{SHARED}.{name}" for name in ("part", "units", "join_warps", "combine_in_block")),
    *(f"{ROOM}.{name}" for name in ("scales", "producer", "consumer", "consumer_8bit", "kernel")),
)
MEETING = "        bar_sync(COMPUTING, WARPS * WARP)\n"
JOIN = (
    Mutant("counted before all have written", MEETING, "", 0, 2),
    Mutant("read before the count is known", MEETING, "", 1, 2),
    Mutant("every thread counts", "if thread == 0:", "if thread >= 0:"),
    Mutant("one block too few", "before == splits - 1", "before == splits - 2"),
    Mutant("every block is the last", "1 if before == splits - 1 else 0", "1"),
    Mutant("a count that goes on", "number), splits - 1)", "number), splits)"),
    Mutant("counts of all tiles", "global_address(counts, number)", "global_address(counts, 0)"),
    Mutant(
        "rows that follow the first warp's",
        "range(warp, tile_rows * SPANS, WARPS)",
        "range(0, tile_rows * SPANS, WARPS)",
    ),
    Mutant("spans of the first row", "i // SPANS, i % SPANS", "0, i % SPANS"),
    Mutant("the first span alone", "i % SPANS * SPAN + 4 * lane", "4 * lane"),
    Mutant("rows of the first tile", "types.int32(first + r)", "types.int32(r)"),
    Mutant("heads of the first group", "head = first_head + nth", "head = nth"),
    Mutant(
        "tokens and heads swapped",
        "(b * nq + token) * heads + head",
        "(b * heads + head) * nq + token",
    ),
    Mutant("LSE as O lies", "(b * heads + head) * nq + token", "(b * nq + token) * heads + head"),
    Mutant("O of batch 0", "(b * nq + token) * heads", "token * heads"),
    Mutant("O not normalised", "as_stored(x * inverse,", "as_stored(x,"),
    Mutant(
        "a row without keys",
        "select(equal(l, 0.0), 0.0, approximate_reciprocal(l))",
        "approximate_reciprocal(l)",
    ),
    Mutant("columns behind the last", "if column < HEAD_DIM:", "if column < SPANS * SPAN:"),
    Mutant("columns of the next row", "min(column, HEAD_DIM - 4)", "column"),
    Mutant("LSE of lane 1", "if column == 0:", "if column == 4 and l < 0:"),
    Mutant("slots of the first warp", "warp * AHEAD * SPAN + 4 * lane", "4 * lane"),
    Mutant("weights of the first warp", "words + warp * WARP)", "words)"),
    Mutant(
        "parts of the first round",
        "send(smem, to, part_o, at, step, first + AHEAD",
        "send(smem, to, part_o, at, step, 0",
    ),
    Mutant("one part for all", "at + s * step", "at"),
    Mutant("parts upon each other", "to + (s - first) * SPAN", "to"),
    Mutant("more parts than there is room", "min(first + AHEAD, splits)", "splits"),
    Mutant("one wait too few", "            wait(smem)\n", ""),
    Mutant(
        "weights of the first round",
        "w = weight(part_lse[(first + lane) * rows",
        "w = weight(part_lse[lane * rows",
    ),
    Mutant("weights of no part", "if first + lane < splits:", "if True:"),
    Mutant("weights read too early", "= bits(w)\n            cuda.syncwarp()", "= bits(w)"),
    Mutant("the first four weights", "types.int32(weights + u)", "types.int32(weights)"),
    Mutant("the first four parts", "types.int32(to + u * SPAN)", "types.int32(to)"),
    Mutant("parts that are not there", "there, o = count > u,", "there, o = count > -1,"),
    Mutant(
        "parts behind the last of a second step", "types.int32(count - u))", "types.int32(count))"
    ),
)
PRODUCT = (
    Mutant("swizzle of K", "(c + 4 * (n % 2)) ^ (key % 8)", "c + 4 * (n % 2)"),
    Mutant("swizzle of V", "(r ^ swizzle) * 4", "r * 4"),
    Mutant("swizzle of V in half a panel", "(r // 2 ^ swizzle) * 4", "r // 2 * 4"),
    Mutant("second half of 16 bytes", "* 4 + r % 2 * 2", "* 4"),
    Mutant("first panel of V", "+ i * layout.panel_words", ""),
    Mutant("first panel of K", "+ n // 2 * layout.panel_words", ""),
    Mutant("keys of the first n-tile", "load4(smem, place + 8 * 32)", "load4(smem, place)"),
    Mutant("Q of the first step", "(4 * n + w) * 128", "4 * n * 128"),
    Mutant("one row of Q twice", "upper[i], below[i], upper", "upper[i], upper[i], upper"),
    Mutant("Q's factor undone alone", "b * factor)", "b)"),
    Mutant("factors of lanes", "(largest,) = across_lanes((largest,), QUAD, maximum)", "pass"),
    Mutant("columns behind the last", "inside = column < columns", "inside = column < 1024"),
    Mutant("first bytes twice", "0x7362", "0x5140"),
    Mutant("keys that follow each other", "in (0, 1, 8, 9)]", "in (0, 1, 2, 3)]"),
    Mutant(
        "first keys twice",
        "enumerate(zip(*b, strict=True), 4 * j)",
        "enumerate(zip(b[0], b[0]), 4 * j)",
    ),
    Mutant("first n-tiles", "strict=True), 4 * j)", "strict=True))"),
    Mutant("NaN in V", "rows[n - 4 * i][w] = select(numbers, word, 0)", "pass"),
    Mutant(
        "a key that is bad in other lanes",
        "(bad,) = across_lanes((bad,), 8, operator.or_, first=4)",
        "pass",
    ),
    Mutant("sign of the scale dropped", "x ^ (SIGNS - 2**32) if cfg.negate else x", "x"),
)
SCALE = (
    Mutant("scale of K for V", "v = v_scale[", "v = k_scale["),
    Mutant("scales behind the length", "if key < length:", "if True:"),
    Mutant("scales of the lower keys twice", "n0 + lane + 32", "n0 + lane"),
    Mutant("scales of V in the place of K's", "at + (TILE_N + 32 * i)", "at + 32 * i"),
    Mutant("scales of the first head", "head * k_stride[2]", "0"),
    Mutant("unit of a lane", "(largest,) = across_lanes((largest,), 32, maximum)", "pass"),
    Mutant(
        "unit of K's scales", "(v & EXPONENT for _, v in held)", "(k & EXPONENT for k, _ in held)"
    ),
)
PARTS = (
    Mutant("the same end for all tokens", "types.int32(length - nq + token + 1)", "length"),
    Mutant("place of a row that is none", "if row >= nq * pack:", "if False:"),
    Mutant("bounds of the first plane", "i = plane * nq + token", "i = token"),
    Mutant("intervals in full", "if kind == INTERVAL:", "if False:"),
    Mutant("bits in full", "elif kind != FULL:", "elif False:"),
    Mutant(
        "bits of row 0",
        "types.int32(kind - BITS), token, quad)",
        "types.int32(kind - BITS), 0, quad)",
    ),
    Mutant(
        "keys behind the length",
        "keep = keep_interval(first, end, n0, quad)",
        "keep = keep_interval(first, n0 + cfg.tile_n, n0, quad)",
    ),
    Mutant(
        "LSE of parts as O lies",
        "lse_at = types.int64((part * heads + head) * nq + token)",
        "lse_at = types.int64((part * nq + token) * heads + head)",
    ),
    Mutant(
        "one tile more",
        "min(begin + (split + 1) * tiles, end)",
        "min(begin + (split + 1) * tiles + 1, end)",
    ),
    Mutant("every split from the first tile", "min(begin + split * tiles, end)", "begin"),
    Mutant("share rounded down", "(end - begin + splits - 1) // splits", "(end - begin) // splits"),
    Mutant("tiles rounded down", "(length + TILE_N - 1) // TILE_N", "length // TILE_N"),
    Mutant("mask of the first plane", "types.int32(row_ptr[plane])", "types.int32(row_ptr[0])"),
    Mutant("tiles behind the length", "first_behind(col_idx, begin, last, end, lane)", "last"),
    Mutant("first page of all", "table[first_page + nth]", "table[first_page]"),
    Mutant("pages by tokens", "nth, inside = divmod_int32(key, page_size)", "nth = key"),
)
JOIN_WARPS = (
    Mutant("warps' m apart", "exp2(m - guarded(best))", "exp2(m * 0.0)"),
    Mutant("O of the first warp", "at + w * o_words", "at"),
    Mutant("m of warps without keys", "known = select(equal(l, 0.0), NEG_INF, m)", "known = m"),
    Mutant("place of n-tiles", "at + 8 * i * WIDTH + column", "at + column"),
    Mutant("m of the upper row", "store(smem, at + 16 * i, ", "store(smem, at, "),
    Mutant(
        "columns where they are not", "(column ^ rotation_of(row, column // OF_LANE % 4))", "column"
    ),
    Mutant("columns of the first lane", "types.int32(quad * OF_LANE)", "types.int32(0)"),
    Mutant("l in place of m", "float_bits(m[i])", "float_bits(l[i])"),
)
UNIT = (
    Mutant("one scale for both columns", "// 8 * 2 + column_of(element) % 8", "// 8 * 2"),
    Mutant("factor of the upper row for both", "x * inverses[row_of(i)]", "x * inverses[0]"),
    Mutant("a scale that is none stays", "select(i, ONES, x)", "x"),
    Mutant("units that do not grow", "larger = tuple(map(maximum, unit, new))", "larger = unit"),
    Mutant(
        "O in the unit of before",
        "x * y for x, y in zip(alpha, shrunk, strict=True)",
        "x for x in alpha",
    ),
    Mutant("unit of a lane's keys", "across_lanes(largest, QUAD, maximum)", "largest"),
    Mutant("one unit for both rows", "x * inverse[row_of(i)]", "x * inverse[0]"),
    Mutant("O in the unit of the upper row", "bits_float(unit[row_of(i)])", "bits_float(unit[0])"),
    Mutant("factors of the upper row", "factors[row_of(i)]", "factors[0]"),
    Mutant("no room below a row's largest", "exponent - ROOM", "exponent"),
)
LOAD = (
    Mutant("ragged tiles in full", "if n0 + TILE_N > seen_by_all:", "if False:"),
    Mutant("bytes of all boxes", "(full_k, boxes", "(full_k, TILE_N // BOX"),
    Mutant("boxes one upon the other", "+ lane * BOX * ROW_BYTES", ""),
    Mutant("one box for all lanes", "n0 + lane * BOX", "n0"),
    Mutant("boxes that are not there", "if lane < boxes:", "if lane < TILE_N // BOX:", 1, 2),
    Mutant("the same tile ahead", "types.int32(t + 1)", "types.int32(t)"),
    Mutant("V for K", "KV_BYTES, k_map,", "KV_BYTES, v_map,"),
    Mutant("K for V", "KV_BYTES, v_map,", "KV_BYTES, k_map,"),
    Mutant("the least unit", "smem[at + 2 * TILE_N] = unit", "smem[at + 2 * TILE_N] = 0"),
    Mutant("swizzle of Q", "((chunk % 8) ^ (r % 8))", "(chunk % 8)"),
    Mutant("rows behind the last", "if first + r < count and chunk < USED:", "if chunk < USED:"),
    Mutant("columns behind the last", "first + r < count and chunk < USED", "first + r < count"),
    Mutant(
        "token of the head",
        "token, head = divmod_int32(types.int32(first + r), pack)",
        "head, token = divmod_int32(types.int32(first + r), pack)",
    ),
    Mutant(
        "a tile but for its last key",
        "if n0 + TILE_N > seen_by_all:",
        "if n0 + TILE_N - 1 > seen_by_all:",
    ),
    Mutant(
        "a last box that is not full",
        "types.int32((min(length - n0, TILE_N) + BOX - 1) // BOX)",
        "types.int32(min(length - n0, TILE_N) // BOX)",
    ),
)
COMPUTE = (
    without("mask", "s = apply_keep(s, (upper, below))"),
    Mutant(
        "mask of the upper row twice",
        "apply_keep(s, (upper, below))",
        "apply_keep(s, (upper, upper))",
    ),
    without("poison", "l = poisoned(l, (types.uint32(upper & bad), types.uint32(below & bad)))"),
    Mutant(
        "poison for all", "(types.uint32(upper & bad), types.uint32(below & bad))", "(bad, bad)"
    ),
    without("sums", "l = l[0] + sums[0], l[1] + sums[1]"),
    Mutant("O not rescaled", "pack(weights), scale_fragment(acc, alpha)", "pack(weights), acc"),
    Mutant("O not divided", "x * inverse[row_of(i)]", "x"),
    Mutant("upper row's O below", "o[4 * j + 2 * which + e]", "o[4 * j + e]"),
    Mutant("upper row twice", "row_at(row + 8,", "row_at(row,"),
    Mutant("lower row beside an upper one", "if below_lse >= 0:", "if upper_lse >= 0:"),
    swapped(
        "stage released under P V",
        lines(12, "wait_all()", "acc = after_wait(acc)"),
        lines(12, "if thread == 0:", "    mbarrier_arrive(base + EMPTY + 8 * stage)"),
    ),
)
STORE = (
    Mutant("scales of V for K", "types.int32(own))", "types.int32(own + TILE_N))"),
    Mutant("scales of K for V", "types.int32(own + TILE_N))", "types.int32(own))"),
    Mutant("scores as they are", "s = scale_scores(", "scale_scores("),
    Mutant("keys of the first warp", "types.int32(first_key + r), c)", "r, c)"),
    Mutant("mask of the first warp", "keep >> (first_key // 4) & ALL", "keep & ALL"),
    without("mask", "s = apply_keep(s, (upper, below))"),
    Mutant(
        "mask of the upper row twice",
        "apply_keep(s, (upper, below))",
        "apply_keep(s, (upper, upper))",
    ),
    without("sums", "l = l[0] + sums[0], l[1] + sums[1]"),
    Mutant("scales that are no numbers", "v_scales, bad = finite(v_scales)", "pass"),
    Mutant(
        "unit of a tile for who does not see it",
        "in_own_units(weights, alpha, v_scales, unit)",
        "in_units(weights, alpha, v_scales, unit, smem[scales + 2 * TILE_N])",
    ),
    Mutant("one unit after a mask", "if not MASKED:", "if True:"),
    Mutant("O in units", "return out_of_units(acc, unit), m, l", "return acc, m, l"),
    Mutant("O not rescaled", "if changes(alpha):", "if False:"),
    Mutant("products of NaN", "if kind == FULL:", "if True:", 1, 2),
    without("poison", "l = poisoned(l, (types.uint32(upper & bad), types.uint32(below & bad)))"),
    Mutant(
        "poison for all", "(types.uint32(upper & bad), types.uint32(below & bad))", "(bad, bad)"
    ),
    without("sum over the lanes", "l = row_total(l)"),
    Mutant("statistics of the first row", "words + SCALES // 4 + 2 * row)", "words + SCALES // 4)"),
    Mutant("rows behind the last", "min(count - first, ROWS)", "ROWS"),
    Mutant("Q behind the last row", "min(first + row, count - 1)", "first + row"),
    Mutant("upper row's place", "types.int32(first + r + 8)", "types.int32(first + r)"),
)
PLACES = (
    Mutant("counts of splits", "(counts, tile)", "(counts, split)"),
    Mutant("rows past the last", "min(nq * pack - first, TILE_M)", "TILE_M"),
    Mutant(
        "first row of another tile",
        "first = types.int32(row_tile * TILE_M)",
        "first = types.int32(0)",
    ),
    Mutant("joined though not asked", "if joining:", "if True:"),
    Mutant("lengths beyond the capacity", "min(max(lengths[b], 0), capacity)", "lengths[b]"),
    Mutant("ragged behind the length", "types.int32(length - nq + 1)", "length"),
    Mutant("pages of the first sequence", "types.int32(b * table_width)", "types.int32(0)"),
    Mutant("query head for key head", "types.int32(head // group)", "head"),
    Mutant("first row tile", "rows = types.int32(row_tile * TILE_M)", "rows = types.int32(0)"),
    Mutant(
        "Q of the next head",
        "start = b * q_stride[0] + head * q_stride[2]",
        "start = b * q_stride[0]",
    ),
    Mutant(
        "readers of a stage",
        "READERS, join_parts = WARPS if QUANTISED else 1,",
        "READERS, join_parts = 1,",
    ),
    Mutant("plane of the first heads", "types.int32(plane_of[rest])", "types.int32(plane_of[0])"),
    Mutant("lse of every split in the first", "types.int32(split * batch + b)", "types.int32(b)"),
    Mutant(
        "a row tile more of full ones",
        "row_tiles = (nq * pack + TILE_M - 1) // TILE_M",
        "row_tiles = nq * pack // TILE_M + 1",
    ),
)
FAULTS = PRODUCT, PARTS, UNIT, JOIN_WARPS, JOIN, SCALE, LOAD, COMPUTE, STORE, PLACES
MUTANTS = [
    (target, mutant) for target, mutants in zip(CHAIN, FAULTS, strict=True) for mutant in mutants
]
