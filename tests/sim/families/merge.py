"""The kernel that merges two parts."""

import numpy as np
from merge_runs import check_merge, part
from mutant_family import Family
from mutants import Mutant

from nbflash import testing
from nbflash.cuda import simulator as sim
from nbflash.merging import add_into

MERGE, HOST = "nbflash.backends.merging.merge", "nbflash.backends.merging.host"
MUTANTS = (
    Mutant("the smaller LSE is the maximum", "lse_a > lse_b", "lse_a < lse_b"),
    Mutant("an empty maximum unguarded", "shift = shift_of(larger)", "shift = larger"),
    Mutant("lse without the sum", "log1p(p_a if p_a < p_b else p_b)", "log1p(ZERO)"),
    Mutant("weights that are not divided", "p_a / total, p_b / total", "p_a, p_b"),
    Mutant("an LSE that is NaN counts as none", "if total >= ZERO:", "if True:"),
    Mutant("an empty part a is read", "w_a = SKIP", "w_a = ZERO"),
    Mutant("an empty part b is read", "w_b = SKIP", "w_b = ZERO"),
    Mutant("a weight of NaN is none", "absent = weight < 0", "absent = not weight >= 0"),
    Mutant("rows of part b in their order", "places[i] if INDEXED else i)", "i)", 1, 2),
    Mutant("LSE of rows in their order", "places[i] if INDEXED else i)", "i)", 0, 2),
    Mutant("part b at the places of part a", "b * b_stride[0] + i *", "b * b_stride[0] + row *"),
    Mutant("LSE b at the places of LSE a", "h * lb_stride[1] + i *", "h * lb_stride[1] + row *"),
    Mutant("weights of another row", "head * QUERIES + query", "query * HEADS + head"),
    Mutant("the weights of part a for both", "smem[w], smem[w + 1]", "smem[w], smem[w]"),
    Mutant("the first half of a row", "for c in STEPS:", "for c in STEPS[:1]:"),
    Mutant("queries past the end", "tid < ROWS and i < n and h", "tid < ROWS and h"),
    Mutant(
        "heads of a whole block",
        "min(types.int32(HEADS), types.int32(heads - first_head))",
        "HEADS",
    ),
    Mutant("LSE where there is none", "if WEIGHTED and tid < ROWS", "if tid < ROWS"),
    Mutant("sums without part a", "w_a, w_b = ONE, ONE", "w_a, w_b = ZERO, ONE"),
    Mutant("every batch is the first", "types.int64(block // across // along)", "types.int64(0)"),
    Mutant("heads of the first block", "block % across * HEADS", "block % across * 0"),
)
BOUND = (
    Mutant("lanes that rows have not", "math.gcd(LANES, outs[0].shape[-1])", "LANES"),
    Mutant("as many blocks as queries need", "* -(-heads // HEADS)", ""),
    Mutant(
        "strides of an array that is like it",
        "(x.dtype.name, arrays.strides(x))",
        "(x.dtype.name, arrays.strides(tensors[0]))",
    ),
)


def rows(modules):
    """More heads and queries than a block has; some rows of part a, not in order."""
    with sim.options(race=True, seed=1):
        places = np.array([9, 1, 2, 4, 11, 5, 6, 7, 10], np.int32)
        given = part(2, 12, 9, 2, empty=0.3), part(2, 9, 9, 2, seed=1, empty=0.3)
        check_merge(*given, places, module=modules[HOST])


def whole(modules):
    """Two accesses a row, and one LSE that is NaN."""
    a, b = part(1, 3, 2, 8, empty=0), part(1, 3, 2, 8, seed=1, empty=0)
    check_merge(a, b, module=modules[HOST])
    a[1][0, 0, 1] = np.nan
    out, lse = (x.copy() for x in a)
    modules[HOST].merge((out, lse), b, (out, lse))
    assert np.argwhere(np.isnan(lse)).tolist() == [[0, 0, 1]]
    assert np.argwhere(np.isnan(out).all(-1)).tolist() == [[0, 1, 0]]


def padded(modules):
    """Rows of 6 elements that begin where four of them are aligned."""
    results = testing.poisoned((1, 2, 1, 8))[..., :6], testing.poisoned((1, 1, 2))
    a, b = part(1, 2, 1, 6, empty=0), part(1, 2, 1, 6, seed=1, empty=0)
    b = testing.poisoned((1, 2, 1, 8))[..., :6], b[1]
    b[0][...] = 1
    for x, y in zip(results, a, strict=True):
        x[...] = y
    check_merge(a, b, module=modules[HOST], memory=results)


def added(modules):
    """Parts in float32 to some rows of a total in half precision."""
    places = np.array([2, 0], np.int32)
    (total, _), (given, _) = part(1, 3, 2, 4, np.float16, empty=0), part(1, 2, 2, 4, empty=0)
    expected, got = total.copy(), total.copy()
    add_into(expected, given, places)
    modules[HOST].add(got, given, places)
    np.testing.assert_array_equal(got, expected)


FAMILY = Family(
    "merge",
    (MERGE, HOST),
    {"rows": rows, "whole": whole, "padded": padded, "added": added},
    [(MERGE, mutant) for mutant in MUTANTS] + [(HOST, mutant) for mutant in BOUND],
    generate=(MERGE,),
)
