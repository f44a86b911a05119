"""What the lanes of a warp find together: sums, maxima, the first value behind a bound."""

import numpy as np
from mutant_family import Family
from mutants import Mutant
from numba import cuda, types

from nbflash.cuda.tile import warp_reduce as lanes

SIZES = (0, 1, 31, 32, 33, 1000, 40_000)


def found(module, values, begin, end, bound):
    """What every lane of a warp is told."""

    @cuda.jit
    def kernel(values, out):
        lane = types.int32(cuda.threadIdx.x)
        at = module.first_behind(values, types.int32(begin), types.int32(end), bound, lane)
        out[lane] = at

    out = np.full(32, -1, np.int32)
    kernel[1, 32](values, out)
    return out


def check_search(module):
    """Bounds before, at, between and behind the values; parts that begin and end inside."""
    rng = np.random.default_rng(0)
    for size in SIZES:
        values = np.sort(rng.choice(4 * size + 1, size, replace=False)).astype(np.int32)
        begin, end = size // 7, size - size // 5
        part = values[begin:end]
        bounds = [-1, 4 * size + 2, *rng.integers(0, 4 * size + 1, 3), *part[:1], *part[-1:]]
        for bound in bounds:
            expected = begin + np.searchsorted(part, bound)
            np.testing.assert_array_equal(found(module, values, begin, end, bound), expected)


def check_reductions(module):
    """Of numbers whose sums are exact; NaN loses a maximum."""
    values = np.random.default_rng(0).permutation(32).astype(np.float32)
    with_nan = np.where(values == 31, np.float32(np.nan), values)

    @cuda.jit
    def kernel(values, with_nan, out):
        lane = cuda.threadIdx.x
        out[0, lane] = module.warp_sum(values[lane])
        out[1, lane] = module.warp_max(with_nan[lane])

    out = np.full((2, 32), -1, np.float32)
    kernel[1, 32](values, with_nan, out)
    np.testing.assert_array_equal(out, np.repeat([[496], [30]], 32, axis=1))


REDUCTIONS = (
    Mutant("a sum of half the lanes", "WARP, operator.add", "WARP // 2, operator.add"),
    Mutant("the maximum of half the lanes", "WARP, maximum", "WARP // 2, maximum"),
    Mutant("the maximum of lanes for their sum", "WARP, operator.add", "WARP, maximum"),
)
SEARCH = (
    Mutant("places past the end", "at < end and values", "values"),
    Mutant("a place too many", "(below - 1) * step + 1", "(below - 1) * step + 2"),
    Mutant("a place too few", "min(begin + below * step, end)", "begin + below * step - 1"),
    Mutant("bound itself", "values[at] < bound", "values[at] <= bound"),
    Mutant("one round", "while begin < end:", "if begin < end:"),
)


NAME = lanes.__name__
FAMILY = Family(
    "lanes",
    (NAME,),
    {
        "search": lambda modules: check_search(modules[NAME]),
        "reductions": lambda modules: check_reductions(modules[NAME]),
    },
    [(NAME, mutant) for mutant in (*SEARCH, *REDUCTIONS)],
    errors=(AssertionError, LookupError),
)
