"""Faults of the mma tiles and of the forward kernel, as data."""

from mutants import Mutant

LAYOUTS = (
    Mutant(
        "one chunk more a row",
        "self.row_bytes = width, width // CHUNK, 2",
        "self.row_bytes = width, width // CHUNK, 1",
    ),
    Mutant(
        "steps as if not swizzled",
        "(address ^ chunk % g * CHUNK_BYTES)",
        "(address + chunk % g * CHUNK_BYTES)",
    ),
    Mutant("steps within one group", "+ chunk // g * (g * CHUNK_BYTES)", ""),
    Mutant(
        "rows of A in their halves",
        "self.place(lane % 16, lane // 16)",
        "self.place(lane % 8, lane // 16)",
    ),
    Mutant(
        "columns of A swapped",
        "self.place(lane % 16, lane // 16)",
        "self.place(lane % 16, 1 - lane // 16)",
    ),
    Mutant("rows of B once", "lane // 16 * 8 + lane % 8", "lane % 8"),
    Mutant("columns of B once", "lane // 8 % 2)", "lane * 0)"),
)
FRAGMENTS = (
    Mutant("rows 8 apart are one", "+ element // 2 % 2", ""),
    Mutant("16-row tiles are one", "element // (self.n // 2) * 2 + ", ""),
    Mutant(
        "columns of a pair are one", "+ element % 2\n\n    @staticmethod", "\n\n    @staticmethod"
    ),
    Mutant("columns four apart", "// 4 * 8 + element % 2\n", "// 4 * 4 + element % 2\n"),
    Mutant("second tile 8 below", "i // 2 * 16 + i % 2 * 8", "i // 2 * 8 + i % 2 * 8"),
    Mutant(
        "one chain of a row",
        "for (r, _), x in partial.items() if r == row]",
        "for (r, c), x in partial.items() if r == row and c == 0]",
    ),
    Mutant("pairs swapped", "pack_half(dtype, x[i], x[i + 1])", "pack_half(dtype, x[i + 1], x[i])"),
)
PRODUCTS = (
    Mutant("first step of A again", "a_next = a_of(k + 1)", "a_next = a_of(0)"),
    Mutant("A a step late", "if j == pairs - 1:", "if j == pairs:"),
    Mutant(
        "B of the product before",
        "b_next = b_of(*order[place + 1])",
        "b_next = b_of(*order[place])",
    ),
    Mutant("first half of B twice", "b[2 * half : 2 * half + 2]", "b[0:2]"),
    Mutant("first 16 rows of A again", "a[t], b[", "a[0], b["),
    Mutant("sums in one tile", "2 * (pairs * t + j) + half", "2 * j + half"),
    Mutant(
        "P of the first step",
        "p[size * t + 4 * k : size * t + 4 * k + 4]",
        "p[size * t : size * t + 4]",
    ),
    Mutant("no sign", "word ^ SIGNS if negate", "word if negate"),
    Mutant("one sign of two", "SIGNS = 0x80008000", "SIGNS = 0x00008000"),
    Mutant(
        "A of the first 16 rows",
        "ldmatrix(tile.step(a, k) + t * rows)",
        "ldmatrix(tile.step(a, k))",
    ),
    Mutant(
        "B of the first 16 rows",
        "ldmatrix(tile.step(b, k) + j * rows)",
        "ldmatrix(tile.step(b, k))",
    ),
    Mutant(
        "V not transposed",
        "tile.step(b, j) + k * rows, transposed=True",
        "tile.step(b, j) + k * rows",
    ),
    Mutant(
        "V of the first keys",
        "tile.step(b, j) + k * rows, transposed=True",
        "tile.step(b, j), transposed=True",
    ),
    Mutant(
        "dS not transposed",
        "ldmatrix(at + k * x_rows, transposed=True)",
        "ldmatrix(at + k * x_rows)",
    ),
    Mutant(
        "dS of the first keys",
        "ldmatrix(at + k * x_rows, transposed=True)",
        "ldmatrix(at, transposed=True)",
    ),
    Mutant(
        "K of dQ of the first keys", "ldmatrix(b_places[j] + k * rows, ", "ldmatrix(b_places[j], "
    ),
    Mutant("first queries of dQ", "x_step + t", "x_step * 0 + t"),
    Mutant("first columns of dQ", "b_step + j", "b_step * 0 + j"),
)
SOFTMAXES = (
    Mutant(
        "maximum of a lane",
        "across_lanes(fragment.fold(s, maximum), QUAD, maximum)",
        "fragment.fold(s, maximum)",
    ),
    Mutant("maximum without unit", "maximum(old, x * unit)", "maximum(old, x)"),
    Mutant("maximum of this tile", "maximum(old, x * unit)", "x * unit"),
    Mutant("grown in one lane", "return any_lane(found)", "return found"),
    Mutant("grown in the first row", "either(found, new > old)", "found"),
    Mutant("alpha the wrong way", "exp2(old - guarded(new))", "exp2(guarded(new) - old)"),
    Mutant("alpha of a row without scores", "exp2(old - guarded(new))", "exp2(old - new)"),
    Mutant("P of a row without scores", "guarded(x) * -1.0", "x * -1.0"),
    Mutant("P without maximum", "shifts[fragment.row(i)]", "shifts[0] * 0.0"),
    Mutant("maximum of the first row", "shifts[fragment.row(i)]", "shifts[0]"),
    Mutant("sum of a lane", "across_lanes(l, QUAD, operator.add)", "l"),
    Mutant(
        "division of nothing",
        "select(equal(x, 0.0), 0.0, approximate_reciprocal(x))",
        "approximate_reciprocal(x)",
    ),
)
MASKS = (
    Mutant("lower bound hidden", "both(low[i] < column + 1,", "both(low[i] < column,"),
    Mutant("upper bound seen", "high[i] > column)", "high[i] + 1 > column)"),
    Mutant(
        "bounds of the first query",
        "load(bound, first + select(p < last, p, last)) for p in places",
        "load(bound, first + select(places[0] < last, places[0], last)) for p in places",
        0,
        2,
    ),
    Mutant("bounds past the end", "select(p < last, p, last)", "p", 0, 2),
    Mutant(
        "bits of the first keys",
        "[fragment.row(element)][word] & (1 << bit)",
        "[fragment.row(element)][0] & (1 << bit)",
    ),
    Mutant("bits of the first query", "packed[fragment.row(element)][word]", "packed[0][word]"),
    Mutant("bits as if in the first lane", "* words + w) >> column for", "* words + w) for"),
    Mutant("bits of the next tile", "(tile * tile_m + row + r)", "((tile + 1) * tile_m + row + r)"),
    Mutant("across: lower bound hidden", "both(low[i] < key + 1,", "both(low[i] < key,"),
    Mutant("across: upper bound seen", "high[i] > key)", "high[i] + 1 > key)"),
    Mutant(
        "across: bounds of the first query",
        "load(bound, first + select(p < last, p, last)) for p in places",
        "load(bound, first + select(places[0] < last, places[0], last)) for p in places",
        1,
        2,
    ),
    Mutant("across: bounds past the end", "select(p < last, p, last)", "p", 1, 2),
    Mutant("across: first word", "* words + key // 32", "* words"),
    Mutant("across: bits of the upper key", "1 << fragment.row_offset(fragment.row(element))", "1"),
    Mutant("across: bits of the first query", "packed[query(element)] & bit", "packed[0] & bit"),
    Mutant("across: queries of one pair", "8 * (i // 2) + i % 2 for", "8 * (i // 2) for"),
)
POISONS = (
    Mutant("no row is poisoned", "select(found > 0.0, NAN, p[at])", "p[at]"),
    Mutant(
        "rows poisoned by any key",
        "counts[t] = mma(dtype, counts[t], a, bad)",
        "counts[t] = mma(dtype, counts[t], (0x3C003F80,) * 4, bad)",
    ),
    Mutant("bad keys of one column", " + counts[t][2 * i + 1]", ""),
    Mutant(
        "poison of the lower row",
        "at, found = size * t + i, counts",
        "at, found = size * t, counts",
    ),
    Mutant(
        "bad keys of the first 16 columns",
        "range(tile.width // 16):\n            words",
        "range(1):\n            words",
    ),
    Mutant(
        "poison of the upper row",
        "counts[t][2 * i] + counts[t][2 * i + 1]",
        "counts[t][0] + counts[t][1]",
    ),
    Mutant("no unit is poisoned", "select(x > 0.0, math.nan, unit)", "unit"),
    Mutant("unit of the upper row", "counts[i // 2][i % 2 * 2]", "counts[i // 2][0]"),
)
GRADIENTS = (
    Mutant("numbers of one pair", "memory, at + 8 * j)", "memory, at)"),
    Mutant("numbers of one row", "at + row + fragment.row_offset(i)", "at + row"),
    Mutant("unit of the first row", "units[fragment.row(i)], shifts", "units[0], shifts"),
    Mutant("shift of the first query", "shifts[query(i)])", "shifts[0])"),
    Mutant("delta of the first query", "(dp[i] - deltas[query(i)])", "(dp[i] - deltas[0])"),
    Mutant("no delta", "(dp[i] - deltas[query(i)])", "dp[i]"),
    Mutant(
        "dS of what is hidden",
        "select(equal(x, 0.0), 0.0, y) for x, y in zip(p, values",
        "y for x, y in zip(p, values",
    ),
    Mutant(
        "queries of one pair",
        "// 8 * 2 + element % 2\n        return fragment.row(element)",
        "// 8 * 2\n        return fragment.row(element)",
    ),
)
COPIES = (
    Mutant("rows past the end", "inside = row < valid", "inside = row < rows"),
    Mutant("columns past the end", "chunk < head_dim // CHUNK)", "chunk < tile.chunks)"),
    Mutant("first row again", "base + stride * row + chunk * CHUNK", "base + chunk * CHUNK"),
    Mutant("first chunk again", "base + stride * row + chunk * CHUNK", "base + stride * row"),
    Mutant("nothing is looked at", "return not_finite([x for", "return 0 * not_finite([x for"),
    Mutant("nothing is cleaned", "select(good, x, 0)", "x"),
    Mutant("everything is cleaned", "select(good, x, 0)", "0"),
    Mutant("rows of other warps stored", "min(valid, ROWS)", "valid"),
    Mutant("rows past the end stored", "min(valid, ROWS)", "ROWS"),
    Mutant("result in the upper rows", "16 * t + 8 * below", "16 * t"),
    Mutant("result of one word", "store(smem, at + place + word", "store(smem, at + place"),
    Mutant("result without stride", "base + row * stride + chunk", "base + row + chunk"),
)
NUMBERS = (
    Mutant("numbers of the first row", "select(equal(quad, i), values[i], value)", "value"),
    Mutant("numbers past the end", "quad < rows and place < valid", "quad < rows"),
    Mutant("numbers in one place", "row + quad // 2 * 16 + quad % 2 * 8", "row"),
)
DROPS = (
    Mutant(
        "second tile as the first",
        "words_of_row(keys, second, h, b)",
        "words_of_row(keys, first, h, b)",
    ),
    Mutant("second tile's own", "drop(ONES, rows[1], keys", "drop(ONES, rows[0], keys"),
    Mutant("keys of the first group", "call_of(shifts, n0,", "call_of(shifts, 0,"),
    Mutant("across: second tile as the first", "key_at(shifts, key + 16)", "key_at(shifts, key)"),
    Mutant("low halves", "(2 * n + 1, word >> 31)", "(2 * n + 1, word & 1)"),
)
FORWARDS = (
    Mutant("key head of the query's", "h_kv, _ = divmod_int32(h, group)", "h_kv = h"),
    Mutant("plane of the head", "plane_of[bh]", "plane_of[h]"),
    Mutant("V of K's layout", "(v, v_stride, b, h_kv)", "(v, k_stride, b, h_kv)"),
    Mutant(
        "K for V",
        "keys, values = (k, k_stride, b, h_kv), (v,",
        "keys, values = (k, k_stride, b, h_kv), (k,",
    ),
    Mutant("keys past the end", "types.int32(nk - n0), thread)", "types.int32(TILE_N), thread)"),
    Mutant(
        "queries past the end",
        "types.int32(nq - q0), thread)\n        for",
        "types.int32(TILE_M), thread)\n        for",
    ),
    Mutant(
        "copy to the first stage",
        "to = staged(types.int32(first + RING), stage)",
        "to = types.int32(first + RING)",
    ),
    Mutant("K ahead too far", "(STAGES - 1) // 2, STAGES // 2", "(STAGES + 1) // 2, STAGES // 2"),
    Mutant(
        "V ahead too far", "(STAGES - 1) // 2, STAGES // 2", "(STAGES - 1) // 2, STAGES // 2 + 1"
    ),
    Mutant("waits for one group less", "cp_async_wait(STAGES - 2)", "cp_async_wait(STAGES - 1)"),
    Mutant(
        "K and V in turn, the wrong way",
        "EVEN, AT_K, AT_V = STAGES % 2 == 0",
        "EVEN, AT_K, AT_V = STAGES % 2 == 1",
    ),
    Mutant("K of the first stage", "staged(k_at, stage)", "k_at"),
    Mutant(
        "V of the first stage",
        "acc_o = gemm_pv(acc_o, p, staged(v_at, stage))",
        "acc_o = gemm_pv(acc_o, p, v_at)",
    ),
    Mutant(
        "nothing hidden",
        "        if not FULL_TILES and tile_kind != FULL:\n",
        "        if False:\n",
    ),
    Mutant(
        "O not rescaled",
        "acc_o, l_i = scale_rows(acc_o, alpha), times(l_i, alpha)",
        "l_i = times(l_i, alpha)",
    ),
    Mutant(
        "l not rescaled",
        "acc_o, l_i = scale_rows(acc_o, alpha), times(l_i, alpha)",
        "acc_o = scale_rows(acc_o, alpha)",
    ),
    Mutant("m forgotten", "m_i, l_i = m_new, plus(l_i, sums)", "l_i = plus(l_i, sums)"),
    Mutant(
        "softmax anew in every masked tile",
        "            m_new = row_max(m_i, acc_s, unit)\n",
        "            if tile_kind != FULL:\n"
        "                m_i, l_i, acc_o = M_START, L_START, O_START\n"
        "            m_new = row_max(m_i, acc_s, unit)\n",
    ),
    Mutant("V taken for finite", "if not FULL_TILES and careful:", "if False:"),
    Mutant("LSE of the next head", "bh * nq + q0, log_sum_exp", "(bh ^ 1) * nq + q0, log_sum_exp"),
    Mutant(
        "LSE past the end", "left_rows = types.int32(nq - q0)", "left_rows = types.int32(TILE_M)"
    ),
    Mutant("O of what dropout leaves", "l_i = shared_equally(l_i, dropping[1])", "pass"),
    Mutant("O without l", "pack_o(scale_rows(acc_o, inverse(l_i)))", "pack_o(acc_o)"),
    Mutant("O of the first warp", "(q0 + own) * o_stride[1]", "q0 * o_stride[1]"),
    Mutant(
        "Q of the first warp",
        "first + warp * (ROWS * TILE.row_bytes) + TILE.by_rows",
        "first + TILE.by_rows",
    ),
    Mutant(
        "V by columns", "first + RING + TILE.by_rows(lane)", "first + RING + TILE.by_columns(lane)"
    ),
    Mutant(
        "scores of the first warp", "thread // 32 * ROWS + thread % 32 // 4", "thread % 32 // 4"
    ),
    Mutant("scores of the first column", "thread % 4 * 2", "thread % 4 * 0"),
    Mutant("result over Q of the first warp", " + row * (TILE.row_bytes // 4)", ""),
    Mutant(
        "start taken for aligned", "(start + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT", "start"
    ),
    Mutant("Q of head 0", "b * q_stride[0] + h * q_stride[2] + q0", "b * q_stride[0] + q0"),
    Mutant("Q of batch 0", "b * q_stride[0] + h * q_stride[2] + q0", "h * q_stride[2] + q0"),
)
