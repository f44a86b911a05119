"""The kernel that joins the splits of a decode."""

import numpy as np
from decode_runs import check_combined, parts
from mutant_family import Family
from mutants import Mutant

from nbflash import testing
from nbflash.cuda import simulator as sim

PARTS, COMBINE = "nbflash.cuda.tile.split_kv", "nbflash.backends.split_kv.combine"
JOINING = (
    Mutant("maximum of lane 0's splits", "        m = warp_max(m)\n", ""),
    Mutant("sum of lane 0's splits", "return m, warp_sum(l)", "return m, l"),
    Mutant("weights in base 2", "* LOG2_E)", "* 1.0)"),
    Mutant("an empty maximum unguarded", "lse - guarded(m)", "lse - m"),
    Mutant("every warp sums all", "split += ahead * step", "split += ahead"),
    Mutant("a step too far", "split + step * u < splits", "split + u < splits"),
    Mutant("steps without their width", "u * step * rows", "u * rows"),
    Mutant("the first part in place of those behind the last", "select(t, x, ZERO)", "x"),
    Mutant("a split short", "while split < splits", "while split < splits - 1"),
    Mutant("lse of no split is zero", "value = NEG_INF", "value = ZERO"),
    Mutant("lse without the sum", "m + accumulator(math.log2(l)) * accumulator(LN2)", "m"),
    Mutant(
        "lse in base 2",
        "accumulator(math.log2(l)) * accumulator(LN2)",
        "accumulator(math.log2(l))",
    ),
)
COMBINING = (
    Mutant("query and head swapped", "row % heads, row //", "row % nq, row //"),
    Mutant("heads of the LSE as queries", "(b * heads + h) * nq + i", "row"),
    Mutant("the first warp alone", "at, splits, warp, lane", "at, splits, 8 * warp, lane"),
    Mutant("one warp's sum", "for w in range(WARPS)", "for w in range(1)"),
    Mutant("never divided", "total /= l", "total *= 1"),
    Mutant("out as if contiguous", "+ i * o_stride[1]", "+ i * o_stride[2] * heads"),
)
MUTANTS = [(PARTS, mutant) for mutant in JOINING] + [(COMBINE, mutant) for mutant in COMBINING]


def several(module):
    with sim.options(race=True):
        check_combined(*parts(7, 2, 3, 2, 5, empty=0.3), module=module, warps=2)


def strided(module):
    """One query without keys; out lies in an order of its own."""
    part_o, part_lse = parts(9, 1, 2, 1, 8)
    part_lse[:, 0, 0, 1], part_o[:, 0, 1] = -np.inf, 0
    out = testing.poisoned((1, 1, 2, 11)).transpose(0, 2, 1, 3)[..., :8]
    check_combined(part_o, part_lse, module=module, warps=1, out=out)


FAMILY = Family(
    "combine",
    (PARTS, COMBINE),
    {
        "several": lambda modules: several(modules[COMBINE]),
        "strided": lambda modules: strided(modules[COMBINE]),
    },
    MUTANTS,
    generate=(COMBINE,),
)
