"""The kernel that joins the splits of a decode."""

import numpy as np
from decode_runs import check_combined, check_shifted, parts
from mutant_family import Family
from mutants import Mutant

from nbflash import testing
from nbflash.cuda import simulator as sim

PARTS, COMBINE = "nbflash.cuda.tile.split_kv", "nbflash.backends.split_kv.combine"
JOINING = (
    Mutant("maximum of lane 0's splits", "        m = warp_max(m)\n", ""),
    Mutant("sum of lane 0's splits", "return m, warp_sum(l)", "return m, l"),
    Mutant("weights in base 2", "* LOG2_E)", "* 1.0)"),
    Mutant(
        "an exponent between two large numbers",
        "exp2((lse - guarded(m)) * LOG2_E)",
        "exp2(lse * LOG2_E - guarded(m) * LOG2_E)",
    ),
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
    Mutant(
        "maximum of the first 32 splits",
        "for s in range(lane, splits, WARP):",
        "for s in range(lane, min(splits, WARP), WARP):",
        0,
        2,
    ),
    Mutant(
        "sum of the first 32 splits",
        "for s in range(lane, splits, WARP):",
        "for s in range(lane, min(splits, WARP), WARP):",
        1,
        2,
    ),
    Mutant("maximum of split 0", "part_lse[s * rows + at]", "part_lse[at]", 0, 2),
    Mutant("columns behind the last part", "if head_dim % WARP:", "if False:"),
    Mutant(
        "weights of the row of O",
        "load(part_lse, first + at + s)",
        "load(part_lse, first + row + s)",
    ),
    Mutant(
        "parts behind the last are read",
        "[select(t, u * step * rows, 0) for u, t in enumerate(there)]",
        "[u * step * rows for u, _ in enumerate(there)]",
    ),
)
COMBINING = (
    Mutant("query and head swapped", "row % heads, row //", "row % nq, row //"),
    Mutant("heads of the LSE as queries", "(b * heads + h) * nq + i", "row"),
    Mutant("the first warp alone", "at, splits, warp, lane", "at, splits, 8 * warp, lane"),
    Mutant("one warp's sum", "for w in range(WARPS)", "for w in range(1)"),
    Mutant("never divided", "total /= l", "total *= 1"),
    Mutant("out as if contiguous", "+ i * o_stride[1]", "+ i * o_stride[2] * heads"),
    Mutant("warps as far apart as columns", "smem[w * WIDTH + d]", "smem[w * HEAD_DIM + d]"),
    Mutant("out of batch 0", "o_base = b * o_stride[0] + i", "o_base = i"),
    Mutant(
        "nothing divided by nothing",
        "            if l != ZERO:\n                total /= l\n",
        "            total /= l\n",
    ),
    Mutant(
        "shared memory of one warp",
        "self.warps * self.width * self.accumulator",
        "self.width * self.accumulator",
    ),
)
MUTANTS = [(PARTS, mutant) for mutant in JOINING] + [(COMBINE, mutant) for mutant in COMBINING]


def several(module):
    with sim.options(race=True):
        check_combined(*parts(7, 2, 3, 2, 5, empty=0.3), module=module, warps=2)


def strided(module):
    """A query without keys and one with the last split's alone; out has an order of its own."""
    part_o, part_lse = parts(33, 1, 3, 1, 8)
    for query, empty in ((1, 33), (2, 32)):
        part_lse[:empty, 0, 0, query], part_o[:empty, 0, query] = -np.inf, 0
    out = testing.poisoned((1, 1, 3, 11)).transpose(0, 2, 1, 3)[..., :8]
    check_combined(part_o, part_lse, module=module, warps=1, out=out)


FAMILY = Family(
    "combine",
    (PARTS, COMBINE),
    {
        "several": lambda modules: several(modules[COMBINE]),
        "strided": lambda modules: strided(modules[COMBINE]),
        "shifted": lambda modules: check_shifted(1024, module=modules[COMBINE]),
    },
    MUTANTS,
    generate=(COMBINE,),
)
