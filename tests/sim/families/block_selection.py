"""The kernels that choose blocks on the device: means, their products, the best of a row."""

import numpy as np
from block_selection_runs import (
    WEIGHT_CASES,
    check_best,
    check_means,
    check_not_finite,
    check_products,
    check_weights,
    integers,
)
from mutant_family import Family
from mutants import Mutant

from nbflash.cuda import simulator as sim

ROOM = "nbflash.backends.block_selection"
MEANS, PRODUCTS = f"{ROOM}.block_means", f"{ROOM}.block_products"
WEIGHTS, BEST, HOST = f"{ROOM}.block_weights", f"{ROOM}.best_blocks", f"{ROOM}.host"


def means(dtype, shape, size):
    """Of a tensor whose heads lie before its tokens."""

    def check(modules):
        batch, n, heads, head_dim = shape
        x = integers((batch, heads, n, head_dim), dtype).transpose(0, 2, 1, 3)
        with sim.options(race=True, seed=1):
            check_means(x, size, modules[HOST])

    return check


def products(*sizes):
    """Planes, rows of q, rows of k, width, heads of a group."""

    def check(modules):
        with sim.options(race=True, seed=1):
            check_products(*sizes, module=modules[HOST])

    return check


def weights(name):
    """A case of the parity tests."""

    def check(modules):
        with sim.options(race=True, seed=1):
            check_weights(*WEIGHT_CASES[name], module=modules[HOST])

    return check


def not_finite(modules):
    """NaN, infinities, rows of nothing."""
    check_not_finite(modules[HOST])


def best(columns, width, **options):
    """Of three rows of blocks of 8 queries and one key."""
    given = {"causal": True, "sinks": 1, "local": 2, "planes": (1, 2)} | options

    def check(modules):
        with sim.options(race=True, seed=1):
            check_best((20, columns), (8, 1), width=width, module=modules[HOST], **given)

    return check


CASES = {
    "halves": means(np.float16, (2, 19, 3, 16), 16),
    "vectors": means(np.float32, (1, 37, 2, 64), 16),
    "elements": means(np.float32, (1, 9, 1, 150), 8),
    "several-tiles": products(2, 17, 34, 20, 2),
    "causal": weights("causal"),
    "before": weights("queries before the keys"),
    "many-means": weights("a column of many means"),
    "several-blocks": weights("several columns of blocks"),
    "not-finite": not_finite,
    "one-warp": best(40, 40),
    "two-warps": best(70, 30),
    "four-warps": best(130, 9, planes=(1, 1)),
    "more-queries": best(10, 10),
}
OF_MEANS = (
    Mutant("heads and blocks swapped", "divmod_int32(plane, blocks)", "divmod_int32(plane, heads)"),
    Mutant("tokens past the end", "min(first + size, types.int64(n))", "first + size"),
    Mutant("head 0", "+ h * stride[2] + lane", "+ lane"),
    Mutant("batch 0", "base = b * stride[0] + h", "base = h"),
    Mutant("groups read the same rows", "range(first + group, end", "range(first, end"),
    Mutant(
        "one row of a group", "range(first + group, end, GROUPS)", "range(first + group, end, n)"
    ),
    Mutant("words for elements", "lane * STEP", "lane * PIECE"),
    Mutant("groups on each other", "group * HEAD_DIM + lane * PIECE", "lane * PIECE"),
    Mutant("threads without a row", "if group < GROUPS:", "if True:"),
    Mutant("the last block's tokens", "ACC(end - first)", "ACC(size)"),
    Mutant("the first columns", "range(tid, HEAD_DIM, THREADS)", "range(tid, 64, THREADS)"),
    Mutant("one group", "for g in range(GROUPS):", "for g in range(1):"),
    Mutant(
        "means by tokens", "(b * heads + h) * blocks + block", "(b * blocks + block) * heads + h"
    ),
    Mutant(
        "halves swapped",
        "for part in unpack_half(DTYPE, word)",
        "for part in unpack_half(DTYPE, word)[::-1]",
    ),
)
OF_PRODUCTS = (
    Mutant("rows past the end", "both(columns > 0, rows > u * APART)", "columns > 0"),
    Mutant("columns past the end", "both(columns > 0, rows > u * APART)", "rows > u * APART"),
    Mutant("the first columns only", "q, of_q + first", "q, of_q"),
    Mutant("the first columns of K only", "k, of_k + first", "k, of_k"),
    Mutant("the columns of a step as of the first", "of_row - first)", "of_row)"),
    Mutant("an operand not transposed", "c0 * LD + r0", "r0 * LD + c0"),
    Mutant("words of one row", "at + u * APART * width", "at"),
    Mutant("words on each other", "to + u * APART", "to"),
    Mutant("tiles by rows", "divmod_int32(strip, tiles_m)", "divmod_int32(strip, tiles_n)"),
    Mutant(
        "the first rows of Q", "(types.int64(plane) * m + m0 + r0)", "(types.int64(plane) * m + r0)"
    ),
    Mutant("K of the query's head", "types.int64(plane // group)", "types.int64(plane)"),
    Mutant("the first rows of K", "* n + n0 + r0) * width", "* n + r0) * width"),
    Mutant("K on Q", "transpose(smem, K + to", "transpose(smem, to"),
    Mutant("Q for both", "acc, smem, 4 * ty, K + 4 * tx", "acc, smem, 4 * ty, 4 * tx"),
    Mutant("products past the rows", "if r < m - m0 and c < n - n0:", "if c < n - n0:"),
    Mutant("products past the columns", "if r < m - m0 and c < n - n0:", "if r < m - m0:"),
    Mutant("products of the first column of tiles", "* m + m0) * n + n0", "* m + m0) * n"),
)
SEES = "max(start, sees - first)"
SEEN_AT = "statistics[2 * at]) * statistics[2 * at + 1]"
OF_WEIGHTS = (
    Mutant("a mean seen one query late", "types.int32(position + 1)", "types.int32(position)"),
    Mutant("all means seen", "if position < last:", "if False:"),
    Mutant("the last mean seen by its length", "if position < last:", "if True:"),
    Mutant("queries of head 0", "_, query = divmod_int32(row, queries)", "query = row"),
    Mutant(
        "scale of the maximum",
        "scores[at + j] * scale)\n            m",
        "scores[at + j])\n            m",
    ),
    Mutant("sum of all lanes", "total = warp_sum(total)", "pass"),
    Mutant("maximum of all lanes", "finite(warp_max(m))", "finite(m)"),
    Mutant("rows past the end", "if row < rows:", "if True:"),
    Mutant("NaN divides all", "if total > ZERO else ONE", "if total != ZERO else ONE"),
    Mutant("weights not divided", SEEN_AT, "statistics[2 * at])"),
    Mutant("means past the end", "if mean < n:", "if True:"),
    Mutant("seen at the start of a mean", "(mean + 1) * length - 1", "mean * length"),
    Mutant("the last mean never ends", "types.int64(last))", "types.int64(last + length))"),
    Mutant("all queries see", SEES, "start"),
    Mutant("queries of the rows before", SEES, "sees - first"),
    Mutant("the first rows", "start = types.int64(row) * size", "start = types.int64(0)"),
    Mutant("queries past the end", "min(start + size, types.int64(queries))", "start + size"),
    Mutant("one head of a group", "for h in range(group):", "for h in range(1):"),
    Mutant("heads of the first group", "types.int64(plane) * group + h", "types.int64(plane) + h"),
    Mutant("one mean of a thread", "together * per_column, THREADS", "THREADS, THREADS"),
    Mutant("columns of the first block", "types.int64(part) * together", "types.int64(0)"),
    Mutant("columns past the end", "tid < together and column + tid < columns:", "tid < together:"),
    Mutant("one thread for a column", "min(per_column, types.int32(THREADS))", "types.int32(1)"),
    Mutant("the first rows of all", "* all_rows + first_row + row", "* all_rows + row"),
    Mutant("rows of the scores for all", "int64(plane) * all_rows", "int64(plane) * rows"),
)
OF_BEST = (
    Mutant("−0 below 0", "float_bits(x + 0.0)", "float_bits(x)"),
    Mutant("negative scores the wrong way", "bits ^ (bits >> 31 & 0x7FFFFFFF) ^ -1", "bits ^ -1"),
    Mutant("NaN as its bits", "select(equal(x, x), bits", "select(equal(bits, bits), bits"),
    Mutant("smallest first", "(other < own) ==", "(other > own) =="),
    Mutant("columns past the end", "if column < columns:", "if True:"),
    Mutant("the last admissible column", "if column > end:", "if column >= end:"),
    Mutant("all are admissible", "if column > end:", "if False:"),
    Mutant("one more sink", "column < sinks or", "column <= sinks or"),
    Mutant("one less local block", "column > end - local", "column > end - local + 1"),
    Mutant("equal scores by chance", "| types.int64(column)", "| types.int64(column ^ 1)"),
    Mutant("last of plane 0", "last[of_plane]", "last[0]"),
    Mutant(
        "a run upwards",
        "types.int32(size - 1), types.int32(size >> 1)",
        "types.int32(size >> 1), types.int32(size >> 1)",
    ),
    Mutant(
        "the other slot's lane",
        "types.int32(flipped - WARP))\n                    y",
        "flipped - flipped)\n                    y",
    ),
    Mutant("half the sizes", "while size <= CAPACITY:", "while size < CAPACITY:"),
    Mutant("half of the strides", "while stride > 0:", "while stride > 1:"),
    Mutant("past the width", "if j < width:", "if True:"),
    Mutant(
        "counts above the width",
        "max(types.int32(end + 1), types.int32(0)), types.int32(width))",
        "max(types.int32(end + 1), types.int32(0)), types.int32(columns))",
    ),
    Mutant("counts below 0", "max(types.int32(end + 1), types.int32(0))", "types.int32(end + 1)"),
)
REACH = {
    MEANS: ("halves", "vectors", "elements"),
    PRODUCTS: ("several-tiles",),
    WEIGHTS: ("causal", "before", "many-means", "several-blocks", "not-finite"),
    BEST: ("one-warp", "two-warps", "four-warps", "more-queries"),
}
FAMILY = Family(
    "block_selection",
    (MEANS, PRODUCTS, WEIGHTS, BEST, HOST),
    CASES,
    [
        *((MEANS, mutant) for mutant in OF_MEANS),
        *((PRODUCTS, mutant) for mutant in OF_PRODUCTS),
        *((WEIGHTS, mutant) for mutant in OF_WEIGHTS),
        *((BEST, mutant) for mutant in OF_BEST),
    ],
    generate=(MEANS, PRODUCTS, WEIGHTS, BEST),
    reach=REACH.get,
)
