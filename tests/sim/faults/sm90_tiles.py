"""Faults of what the Hopper forward kernel is made of: products, softmax, store, set-up, shape."""

from mutants import Mutant

GEMM, STORE = "nbflash.cuda.tile.wgmma.gemm", "nbflash.cuda.tile.wgmma.store_shared"
SOFTMAX, CONFIG = "nbflash.cuda.tile.wgmma.softmax", "nbflash.backends.sm90.forward.config"
FWD, SHARED = "nbflash.backends.sm90.forward.kernel", "nbflash.backends.sm90.shared.config"
WARPS, KEPT = "nbflash.cuda.tile.warp_math", "nbflash.cuda.tile.wgmma.gemm_register_a"
SETUP = (
    Mutant("empty K counts one", "EMPTY_K + 8 * i, CONSUMERS", "EMPTY_K + 8 * i, 1"),
    Mutant("empty V counts one", "EMPTY_V + 8 * i, CONSUMERS", "EMPTY_V + 8 * i, 1"),
    Mutant("empty Q counts one", "EMPTY_Q + 8 * i, CONSUMERS", "EMPTY_Q + 8 * i, 1"),
    Mutant("full Q counts two", "FULL_Q + 8 * i, 1", "FULL_Q + 8 * i, 2"),
    Mutant("full K counts two", "FULL_K + 8 * i, 1", "FULL_K + 8 * i, 2"),
    Mutant("full V counts two", "FULL_V + 8 * i, 1", "FULL_V + 8 * i, 2"),
    Mutant("raw V counts three", "RAW_V + 8 * i, 1", "RAW_V + 8 * i, 3"),
    Mutant("barriers of one V", "range(V_STAGES)", "range(1)"),
    Mutant("shared memory aligned", "(start + (ALIGNMENT - 1)) & ~(ALIGNMENT - 1)", "start"),
    Mutant("words from the start", "place = base, (base - start) // 4", "place = base, 0"),
    Mutant("one warp looks for NaN", "elif tid >= 32:", "elif 32 <= tid < 64:"),
    Mutant("lanes of the loader look for NaN", "elif tid >= 32:", "else:"),
    Mutant("empty rows by the wrong threads", "items, live, tid - 32)", "items, live, tid)"),
    Mutant("cleaners from 32", "sizes, schedule, tid - 32)", "sizes, schedule, tid)"),
    Mutant("registers of one warp", "more()", "tid < 160 and more()"),
    Mutant(
        "strides of Q and K for lost scores",
        "operands = q, k, q_stride, k_stride, nq",
        "operands = q, k, k_stride, q_stride, nq",
    ),
)
GEOMETRY = (
    Mutant("barriers in one place", "empty_v=v", "empty_v=0"),
    Mutant("barriers of one Q", "q, k, v = self.q_stages,", "q, k, v = 1,"),
    Mutant(
        "barriers of V as of K",
        "self.k_stages, self.v_stages\n",
        "self.k_stages, self.k_stages - 1\n",
    ),
    Mutant(
        "barriers in the descriptors",
        "barrier_layout(self.smem.end",
        "barrier_layout(self.smem.descriptors",
    ),
    Mutant("V in K", "k=self.k_stages * self.kv_bytes", "k=self.kv_bytes"),
    Mutant("K in Q", "q=self.q_stages * self.q_bytes", "q=self.q_bytes"),
    Mutant("descriptors in V", "v=self.v_stages * self.kv_bytes", "v=0"),
    Mutant("bad keys in the descriptors", "DESCRIPTOR_WORDS * self.k_stages", "DESCRIPTOR_WORDS"),
    Mutant("barriers in the bad keys", "BAD_WORDS * self.v_stages", "BAD_WORDS"),
)
PANELS = (
    Mutant("room for one panel", "-(-self.head_dim // PANEL)", "1"),
    Mutant("room for one warpgroup", "self.panels * self.tile_m * 2", "self.panels * 64 * 2"),
    Mutant("room for 64 keys", "self.panels * self.tile_n * 2", "self.panels * 64 * 2"),
    Mutant("FIRST among the kinds", "FIRST = 1 << 30", "FIRST = 1"),
    Mutant("END among the kinds", "END = 0", "END = 1"),
)
PRODUCTS = (
    Mutant("rows of half an atom", "1 << 30 | ALIGNMENT >> 4", "1 << 30 | ALIGNMENT >> 5"),
    Mutant("panels too close", "(panel_bytes >> 4 << 16)", "(panel_bytes >> 5 << 16)"),
    Mutant("S misses a step", "range(-(-head_dim // STEP))", "range(head_dim // STEP)"),
    Mutant("Q in K's panels", "panel * tile_m * ROW_BYTES", "panel * tile_n * ROW_BYTES"),
    Mutant("K in one panel", "panel * tile_n * ROW_BYTES + 2 * inside", "2 * inside"),
    Mutant("K in half steps", "tile_n * ROW_BYTES + 2 * inside", "tile_n * ROW_BYTES + inside"),
    Mutant(
        "S keeps what was there", "accumulate=accumulate or i > 0", "accumulate=accumulate or i > 1"
    ),
    Mutant("scale's sign dropped", "negate_a=negate", "negate_a=False"),
    Mutant("O misses the last keys", "range(tile_n // STEP)", "range(tile_n // STEP - 1)"),
    Mutant("P of another step", "p[4 * i : 4 * i + 4]", "p[4 * (i ^ 1) : 4 * (i ^ 1) + 4]"),
    Mutant("V in steps of 8 keys", "(i * STEP * ROW_BYTES >> 4)", "(i * STEP * ROW_BYTES >> 5)"),
    Mutant("V not transposed", "transpose_b=True", "transpose_b=False"),
    Mutant("not settled", "return settle(acc)", "return acc"),
)
OUTGROWN = "any_lane(either(*(x > LIMIT for x in sums)))"
LOST, NO_KEY = OUTGROWN.replace("LIMIT", "HUGE"), "any_lane(either(*none))"
NUMBERS = (
    Mutant("rows of an element", "element // 2 % 2", "element % 2"),
    Mutant("half a quad", "maximum), QUAD, maximum", "maximum), QUAD // 2, maximum"),
    Mutant("folded rows swapped", "for row in (0, 1)", "for row in (1, 0)"),
    Mutant("one element of a chain", "combine(partial[chain], x) if chain in partial else x", "x"),
    Mutant("too much headroom", "HEADROOM = 6.0", "HEADROOM = 40.0"),
    Mutant("headroom below the maximum", "HEADROOM = 6.0", "HEADROOM = -40.0"),
    Mutant("m of a row without keys", "fma(guarded(x), scale,", "fma(x, scale,"),
    Mutant("m without the scale", "fma(guarded(x), scale,", "fma(guarded(x), 1.0,"),
    Mutant("m of the other row", "m[row_of(i)] * -1.0", "m[1 - row_of(i)] * -1.0"),
    Mutant("m added", "m[row_of(i)] * -1.0", "m[row_of(i)]"),
    Mutant("scale dropped", "fma(s[i], scale, m", "fma(s[i], 1.0, m"),
    Mutant("m never outgrown", OUTGROWN, "False"),
    Mutant("growth seen by one lane", OUTGROWN, "either(*(x > LIMIT for x in sums))"),
    Mutant("growth of the upper row", OUTGROWN, "any_lane(sums[0] > LIMIT)"),
    Mutant("growth of the lower row", OUTGROWN, "any_lane(sums[1] > LIMIT)"),
    Mutant("more growth than half precision has", "n // 2, n / 4", "n // 2, n * 2.0**20"),
    Mutant("nothing lost", LOST, "False"),
    Mutant("loss seen by one lane", LOST, "either(*(x > HUGE for x in sums))"),
    Mutant("loss of the upper row", LOST, "any_lane(sums[0] > HUGE)"),
    Mutant("loss of the lower row", LOST, "any_lane(sums[1] > HUGE)"),
    Mutant("infinite weights kept", "HUGE = 2.0**100", "HUGE = 2.0**130"),
    Mutant("m raised by a weight", "log2(x) + ABOVE, 0.0", "x + ABOVE, 0.0"),
    Mutant("m lowered to any weights", "select(x > 2.0**TOP, log2", "select(x > 0.0, log2"),
    Mutant("one of two rows has met a key", NO_KEY, "any_lane(both(*none))"),
    Mutant("the upper row has met a key", NO_KEY, "any_lane(list(none)[1])"),
    Mutant("the lower row has met a key", NO_KEY, "any_lane(next(none))"),
    Mutant("every row has met a key", NO_KEY, "False"),
    Mutant("first keys seen by one lane", NO_KEY, "either(*none)"),
    Mutant("m never raised again", "either(b >= TOP, equal(a, 0.0))", "equal(a, 0.0)"),
    Mutant("m never lowered to a first score", "either(b >= TOP, equal(a, 0.0))", "(b >= TOP)"),
    Mutant(
        "m lowered to any score",
        "both(either(b >= TOP, equal(a, 0.0)), b > NEG_INF)",
        "b > NEG_INF",
    ),
    Mutant(
        "m of rows still without keys",
        "both(either(b >= TOP, equal(a, 0.0)), b > NEG_INF)",
        "either(b >= TOP, equal(a, 0.0))",
    ),
    Mutant("m raised by the headroom", "select(due, b + ABOVE", "select(due, b * 0.0 + ABOVE"),
    Mutant(
        "alpha of a row whose m comes down", "exp2(maximum(x, x * 0.0) * -1.0)", "exp2(x * -1.0)"
    ),
    Mutant("alpha upside down", "maximum(x, x * 0.0) * -1.0", "maximum(x, x * 0.0)"),
    Mutant(
        "alpha of the rise in halves", "maximum(x, x * 0.0) * -1.0", "maximum(x, x * 0.0) * -0.5"
    ),
    Mutant(
        "exponents lowered by the other row", "x - risen[row_of(i)]", "x - risen[1 - row_of(i)]"
    ),
    Mutant("exponents raised", "x - risen[row_of(i)]", "x + risen[row_of(i)]"),
    Mutant(
        "P swapped in pairs", "pack_half(dtype, p[i], p[i + 1])", "pack_half(dtype, p[i + 1], p[i])"
    ),
    Mutant("keep of the first half", "first = n // 4 * part", "first = 0"),
    Mutant("keep of a quarter further on", "first = n // 4 * part", "first = n // 8 * part"),
    Mutant(
        "keep of the next column",
        "2 * (element // 4) + element % 2)",
        "2 * (element // 4) + (element + 1) % 2)",
    ),
    Mutant(
        "keep of the other row", "keep[row_of(element)] & bit", "keep[1 - row_of(element)] & bit"
    ),
    Mutant(
        "empty rows divided by zero",
        "select(equal(x, 0.0), 0.0, approximate_reciprocal(x))",
        "approximate_reciprocal(x)",
    ),
    Mutant("O of the other row's l", "inverse[row_of(i)]", "inverse[1 - row_of(i)]"),
    Mutant("O packed from its second column", "*scaled[i : i + 2]", "scaled[i + 1], scaled[i]"),
    Mutant("lse of an empty row", "select(equal(l, 0.0), NEG_INF,", "select(equal(l, 0.0), 0.0,"),
    Mutant("lse in base 2", "(m + n + log2(f)) * LN2", "(m + n + log2(f))"),
    Mutant("lse without the sum", "(m + n + log2(f)) * LN2", "m * LN2"),
    Mutant("lse without the reference", "(m + n + log2(f)) * LN2", "(n + log2(f)) * LN2"),
    Mutant("logarithm of all of l", "(m + n + log2(f)) * LN2", "(m + log2(l)) * LN2"),
    Mutant("total of one lane", "across_lanes(l, QUAD, operator.add)", "tuple(l)"),
    Mutant("O rescaled by the other row", "x * alpha[row_of(i)]", "x * alpha[1 - row_of(i)]"),
    Mutant("interval one short", "types.int32(tile_n))", "types.int32(tile_n - 1))"),
    Mutant("interval of half a tile", "types.int32(tile_n))", "types.int32(tile_n // 2))"),
    Mutant("interval from below 0", "x = max(x, types.int32(0))", "pass"),
    Mutant("interval of the first pair", "types.int32(tile_n)) - quad)", "types.int32(tile_n)))"),
    Mutant("interval without its pairs", "2 * (x >> 3) + pair", "2 * (x >> 3)"),
    Mutant("interval of whole pairs", "2 * (x >> 3) + pair", "2 * (x >> 3) + 2 * (pair > 0)"),
    Mutant("interval without its low end", " & ~below(lo, n0, quad)", ""),
    Mutant("interval from the first tile", "below(hi, n0, quad)", "below(hi, 0, quad)"),
    Mutant("low end from the first tile", "~below(lo, n0, quad)", "~below(lo, 0, quad)"),
    Mutant("bits of the next pair", "(packed[w] >> quad)", "(packed[w] >> (quad ^ 2))"),
    Mutant("bits of three bytes", " | (x >> 18)", ""),
    Mutant("bits of whole words", "words = -(-tile_n // 32)", "words = tile_n // 32"),
    Mutant("words on top of each other", "(byte << (8 * w))", "(byte << (4 * w))"),
    Mutant("bits of the first row", "(tile * tile_m + row) * words", "tile * tile_m * words"),
    Mutant("bits of the first tile", "(tile * tile_m + row) * words", "row * words"),
    Mutant(
        "a limit for all lanes of a row",
        "size, LIMIT = n // 2, n / 4 * 2.0**TOP",
        "size, LIMIT = n // 2, n * 2.0**TOP",
    ),
)
STORING = (
    Mutant("matrices on top of each other", "// 2 + lane % 16)", "// 2 + lane % 8)"),
    Mutant("warps 8 rows apart", "(thread & 96) // 2", "(thread & 96) // 4"),
    Mutant("not swizzled", "(lane // 16 ^ lane % 8)", "(lane // 16)"),
    Mutant("chunks of a matrix each", "(lane // 16 ^ lane % 8)", "(lane // 8 ^ lane % 8)"),
    Mutant("steps added to the swizzle", "(row ^ (2 * inside))", "(row + 2 * inside)"),
    Mutant("steps of 16 bytes", "(row ^ (2 * inside))", "(row ^ inside)"),
    Mutant("panels of 64 rows", "panel * panel_rows * ROW_BYTES", "panel * 64 * ROW_BYTES"),
    Mutant("panels of one place", " + panel * panel_rows * ROW_BYTES", ""),
    Mutant("last half step left out", "-(-columns // STEP)", "columns // STEP"),
    Mutant("last half step too short", "[*packed, *packed[:2]]", "list(packed)"),
    Mutant("words of the next step", "words[4 * k : 4 * k + 4]", "words[4 * k + 2 : 4 * k + 6]"),
    Mutant(
        "words of other rows",
        "words[4 * k : 4 * k + 4]",
        "[words[4 * k + (i ^ 1)] for i in range(4)]",
    ),
)
IN_REGISTERS = (
    Mutant("Q as if not swizzled", "(swizzle ^ chunk)", "chunk"),
    Mutant("upper rows of Q twice", "+ 8 * i * (ROW_BYTES // 4)", ""),
    Mutant("step of Q again", "kept[4 * i : 4 * i + 4]", "kept[0:4]"),
    Mutant("K in steps of 16 bytes", "2 * STEP * i >> 4", "STEP * i >> 4"),
    Mutant("scale's sign dropped from Q", "negate_a=negate", "negate_a=False"),
)
THREADS = (
    Mutant("rows of one warpgroup", "thread // 128 * 64 + thread", "thread"),
    Mutant("warps 8 rows apart", "thread % 128 // 32 * 16", "thread % 128 // 32 * 8"),
    Mutant("turns of the first two", "for i in range(1, count):", "for i in range(1, 1):"),
)
TILES = (
    *((FWD, mutant) for mutant in SETUP),
    *((CONFIG, mutant) for mutant in GEOMETRY),
    *((SHARED, mutant) for mutant in PANELS),
    *((GEMM, mutant) for mutant in PRODUCTS),
    *((SOFTMAX, mutant) for mutant in NUMBERS),
    *((STORE, mutant) for mutant in STORING),
    *((WARPS, mutant) for mutant in THREADS),
    *((KEPT, mutant) for mutant in IN_REGISTERS),
)
