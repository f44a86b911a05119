"""Faults of the Hopper backward in one pass, as data: a tile, what is around, set-up, shape."""

from mutants import Mutant, without

from .sm90_backward_producer import LOAD, LOADING
from .sm90_one_pass import COMPUTE, STREAMING

GRADIENT, CONFIG = "nbflash.cuda.tile.wgmma.gradient", "nbflash.backends.sm90.backward.config"
TILE, COLUMNS = "nbflash.backends.sm90.backward.tile_math", "nbflash.backends.sm90.backward.dkdv"
KERNEL, ROWS, CONVERT = (
    "nbflash.backends.sm90.backward.kernel",
    "nbflash.backends.sm90.backward.row_statistics",
    "nbflash.backends.sm90.backward.convert_dq",
)
SHARED = "nbflash.backends.sm90.shared.config"
# In the order of their imports.
CHAIN = (SHARED, GRADIENT, CONFIG, LOAD, TILE, COLUMNS, COMPUTE, KERNEL, ROWS, CONVERT)

MASK_PLACE = "words + MASKS // 4 + stage * (MASK_BYTES // 4)"
DELTA_PLACE = "place[1] + (STATS + TILE_M) + stage * STAT_WORDS + pair"
IN_PLACE = "            if kind == INTERVAL:"
OF_A_TILE = (
    Mutant(
        "descriptor of stage 0",
        "DESCRIPTORS // 4 + COLUMN_DESCRIPTOR_WORDS * stage)",
        "DESCRIPTORS // 4)",
    ),
    Mutant("shifts of stage 0", "STATS + stage * STAT_WORDS + pair)", "STATS + pair)"),
    Mutant(
        "shifts of other queries",
        "STATS + stage * STAT_WORDS + pair)",
        "STATS + stage * STAT_WORDS)",
    ),
    Mutant("−δ of stage 0", DELTA_PLACE, DELTA_PLACE.replace(" + stage * STAT_WORDS", ""), 0, 2),
    Mutant("−δ of other queries", DELTA_PLACE, DELTA_PLACE.replace(" + pair", ""), 0, 2),
    Mutant("shifts for late δ", DELTA_PLACE, DELTA_PLACE.replace(" + TILE_M", ""), 1, 2),
    Mutant("late δ of other queries", DELTA_PLACE, DELTA_PLACE.replace(" + pair", ""), 1, 2),
    Mutant(
        "intervals taken for full tiles",
        "        if kind != FULL:\n            if kind",
        "        if kind > INTERVAL:\n            if kind",
    ),
    Mutant("bits taken for intervals", IN_PLACE, IN_PLACE.replace("==", ">=")),
    Mutant("masks of stage 0", MASK_PLACE, "words + MASKS // 4"),
    Mutant(
        "keys of stage 0's tile",
        "DESCRIPTORS // 4 + COLUMN_DESCRIPTOR_WORDS * stage + 1",
        "DESCRIPTORS // 4 + 1",
    ),
    Mutant("keys of tile 0", "types.int32(n_block * TILE_N + row)", "types.int32(row)"),
    Mutant("bounds of other queries", "mask + pair, types", "mask, types"),
    Mutant("bits of other queries", "mask + pair * WORDS", "mask"),
    Mutant("dS of what is hidden", "ds = masked(p, ds)", "pass"),
)
HIDE_BITS = "yield select(hidden, NEG_INF, next(x))"
HIDE_INTERVAL = "yield select(inside, next(x), NEG_INF)"
NUMBERS = (
    Mutant("scale of the upper key", "scales[i % 4 // 2]", "scales[0]"),
    Mutant("shift of the first query", "shifts[i // 4 * 2 + i % 2]", "shifts[i // 4 * 2]"),
    Mutant("interval from the next key", "keys[n // 2] >= low", "keys[n // 2] > low"),
    Mutant("interval to its end", "keys[n // 2] < high", "keys[n // 2] <= high"),
    Mutant("interval 4 keys below", "(key, key + 8)", "(key, key + 4)"),
    Mutant("low ends for high ends", "(tile_m + 8 * j))", "(8 * j))"),
    Mutant(
        "intervals masked after 2^x",
        HIDE_INTERVAL,
        "y = next(x)\n                yield select(inside, y, y * 0 + NEG_INF)",
    ),
    Mutant(
        "bits masked after 2^x",
        HIDE_BITS,
        "y = next(x)\n                yield select(hidden, y * 0 + NEG_INF, y)",
    ),
    Mutant("bits of the first word", "mask + key // 32, key % 32", "mask, key % 32"),
    Mutant("bits of one word each", "words * (8 * j + e)", "(8 * j + e)"),
    Mutant("bits of the upper key", "(1 << 8 * (n // 2))", "1"),
    Mutant("shifts of the first queries", "load2(stats, at + 8 * j)", "load2(stats, at)"),
    Mutant("δ added, late", "x + minus for x", "x - minus for x"),
    Mutant(
        "δ by the key",
        "for x in 2 * elements[j : j + 2]",
        "for x in sorted(2 * elements[j : j + 2])",
    ),
    Mutant("NaN of what is hidden", "select(equal(x, 0.0), 0.0, y)", "y"),
    Mutant(
        "dS swapped in pairs",
        "pack_half(dtype, x[i], x[i + 1])",
        "pack_half(dtype, x[i + 1], x[i])",
    ),
    Mutant("dQ misses the last keys", "range(tile_n // STEP)", "range(tile_n // STEP - 1)"),
    Mutant("dQ of the first dS", "(ds + row, UPPER)", "(ds, UPPER)"),
    Mutant("dS not transposed", "transpose_a=True, transpose_b=True", "transpose_b=True"),
    Mutant("K not transposed", "transpose_a=True, transpose_b=True", "transpose_a=True"),
    Mutant("dQ keeps what was there", "accumulate=i > 0", "accumulate=i > 1"),
    Mutant("bits of the key for those of the query", "equal(seen[n % 2] &", "equal(seen[n // 2] &"),
)
DO_AT = "b * do_stride[0] + i * do_stride[1] + h * do_stride[2] + column"
DLSE_AT = "b * l_stride[0] + h * l_stride[1] + i * l_stride[2]"
CLEAR_ALL = "clear(dq, thread * CHUNK, types.float32(0))"
CLEAR = "store4(dq, at + 4, (zero,) * 4)"
STATISTICS = (
    Mutant("half of δ", "(x,), LANES,", "(x,), LANES // 2,"),
    without("clearing of half of dQ's sum", CLEAR),
    Mutant("dQ's sum not cleared", CLEAR_ALL, "pass"),
    Mutant("dQ's sum of rows that exist", CLEAR_ALL, f"if inside: {CLEAR_ALL}"),
    Mutant("blocks from one past the end", "cuda.gridDim.x) - 1 -", "cuda.gridDim.x) -"),
    Mutant("all are the last block", "- 1 - cuda.blockIdx.x", "- 1"),
    Mutant("queries past the end", "row < rows and i < nq", "row < rows"),
    Mutant("columns past the end", "if inside and column < HEAD_DIM:", "if inside:"),
    Mutant("dO of head 0", DO_AT, DO_AT.replace(" + h * do_stride[2]", "")),
    Mutant("dLSE of head 0", DLSE_AT, DLSE_AT.replace(" + h * l_stride[1]", "")),
    Mutant("dLSE added", "gradient - x", "-gradient - x"),
    Mutant("dLSE forgotten", "gradient - x", "-x"),
    Mutant("LSE in base e", "natural * TO_BASE_2", "natural * types.float32(-1)"),
    Mutant(
        "shift 0 of idle rows",
        "types.float32(-math.inf), types.float32(0)\n",
        "types.float32(0), types.float32(0)\n",
    ),
    Mutant("bad O or dO kept", "(abs(natural) < HUGE and abs(x) < HUGE)", "(abs(natural) < HUGE)"),
    Mutant("statistics of tile 0", "(bh * n_col + i // TILE_M)", "(bh * n_col)"),
    Mutant("δ over the shifts", "stats[at + TILE_M] = minus_delta", "stats[at] = minus_delta"),
    Mutant(
        "LSE as long as its tiles",
        "natural = lse[bh * nq + i]",
        "natural = lse[bh * n_col * TILE_M + i]",
    ),
)
CONVERSION = (
    Mutant(
        "dQ not scaled",
        "(DTYPE, x[2 * i] * scale, x[2 * i + 1] * scale)",
        "(DTYPE, x[2 * i], x[2 * i + 1])",
    ),
    Mutant("dQ of the first 64", "row += 64 * which", "pass"),
    Mutant("first panel of dQ", "column += 64 * which", "pass"),
    Mutant("dQ past the last column", "if column < HEAD_DIM and row < nq:", "if row < nq:"),
    Mutant("dQ past the end", "if column < HEAD_DIM and row < nq:", "if column < HEAD_DIM:"),
    Mutant("lower row past the end", "if row + 8 < nq:", "if row < nq:"),
    Mutant("dQ of head 0", " + (bh % heads) * stride[2]", ""),
    Mutant("dQ of batch 0", "to = (bh // heads) * stride[0] + (bh % heads)", "to = (bh % heads)"),
)
SETUP = (
    Mutant("empty Q counts one", "EMPTY_Q + 8 * i, CONSUMERS", "EMPTY_Q + 8 * i, 1"),
    Mutant("raw counts one", "RAW + 8 * i, PARTS", "RAW + 8 * i, 1"),
    Mutant("empty K counts one", "EMPTY_K + 8 * i, READERS", "EMPTY_K + 8 * i, 1"),
    Mutant("empty V counts one", "base + EMPTY_V, READERS", "base + EMPTY_V, 1"),
    Mutant("barriers of one K", "for i in range(K_STAGES):", "for i in range(1):"),
    Mutant("shared memory as it is", "(start + (ALIGNMENT - 1)) & ~(ALIGNMENT - 1)", "start"),
    Mutant("words from the start", "types.int32((base - start) >> 2)", "types.int32(0)"),
    Mutant("full tiles looked at", "if not FULL_TILES:", "if True:"),
    Mutant("one warp stores", "32 + 32 * CONSUMERS:", "64:"),
    Mutant("empty columns by threads from 128", "items, live, tid - 128)", "items, live, tid)"),
    Mutant(
        "batch by query heads",
        "result = dk, dv, kv_stride, nk, heads_kv, factor, scale",
        "result = dk, dv, kv_stride, nk, heads, factor, scale",
    ),
)
GEOMETRY = (
    Mutant("room for one Q", " q=self.stages * self.q_bytes", " q=self.q_bytes"),
    Mutant("room for one K", "self.k_stages * self.kv_bytes,", "self.kv_bytes,"),
    Mutant("dO over V", "v=self.kv_bytes", "v=0"),
    Mutant(
        "room for half of dS", "self.tile_m * self.tile_n * 2 if", "self.tile_m * self.tile_n if"
    ),
    Mutant("room for one part of dQ", "self.consumers * (self.sum_bytes", "(self.sum_bytes"),
    Mutant(
        "dK over dQ", "self.smem.leaving + self.consumers * self.sum_bytes", "self.smem.leaving"
    ),
    Mutant("room for one tile's statistics", "=self.stages * self.stat_bytes", "=self.stat_bytes"),
    Mutant("room for one mask", "=self.stages * self.mask_bytes", "=self.mask_bytes"),
    Mutant(
        "room for bits alone",
        "else max(self.stat_bytes, self.bit_bytes)",
        "else self.bit_bytes // 2",
    ),
    Mutant("bytes of shifts alone", "return 2 * 4 * self.tile_m", "return 4 * self.tile_m"),
    Mutant(
        "room for one descriptor",
        "self.stages * COLUMN_DESCRIPTOR_WORDS",
        "COLUMN_DESCRIPTOR_WORDS",
    ),
    Mutant("room for one K's bad keys", "self.k_stages * BAD_WORDS * 4", "BAD_WORDS * 4"),
    Mutant("no room for slots", "slots=4 * 4", "slots=0"),
    Mutant("barriers of one stage", "n, k = self.stages, self", "n, k = 1, self"),
    Mutant("barriers of one K", "n, k = self.stages, self.k_stages", "n, k = self.stages, 1"),
)
MUTANTS = (
    *LOADING,
    *STREAMING,
    (SHARED, Mutant("END among the kinds", "END = 0", "END = 1")),
    *(
        (module, mutant)
        for module, mutants in (
            (TILE, OF_A_TILE),
            (GRADIENT, NUMBERS),
            (ROWS, STATISTICS),
            (CONVERT, CONVERSION),
            (KERNEL, SETUP),
            (CONFIG, GEOMETRY),
        )
        for mutant in mutants
    ),
)
REGISTERS = "the simulator does not know when a product reads its registers"
SURVIVORS = {
    "backward.one_pass: step: wgmma_fence 2 deleted": REGISTERS,
    "backward.one_pass: step: wgmma_fence 4 deleted": REGISTERS,
    "backward.producer: store_stream: syncwarp deleted": (
        "named barriers count threads here, and lane 0 arrives behind its wait; a GPU counts warps"
    ),
    "backward.producer: store_stream: bulk_wait deleted": (
        "the end of a kernel waits for what it wrote"
    ),
}
