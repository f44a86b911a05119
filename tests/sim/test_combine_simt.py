"""The kernel that joins the splits of a decode, against `nbflash.merge` of float64 parts."""

import numpy as np
import pytest
from decode_runs import combined, merged, parts
from mutant_family import Family
from mutants import Mutant
from simt_runs import DTYPES

from nbflash import testing
from nbflash.cuda import simulator as sim

PARTS, COMBINE = "nbflash.cuda.tile.split_kv", "nbflash.backends.split_kv.combine"


def check(part_o, part_lse, dtype=np.float32, **how):
    got = combined(part_o, part_lse, dtype, **how)
    ref = merged(part_o.astype(np.float64), part_lse.astype(np.float64))
    low_out, low_lse = merged(part_o, part_lse)
    with np.errstate(over="ignore"):
        low = low_out.astype(dtype), low_lse
    for name, *values in zip(("out", "lse"), got, ref, low, strict=True):
        testing.assert_within_reference(*values, name=name)
    return got


# Splits fewer than warps, as many, in whole steps and beside them, more than the lanes of a warp.
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 8, 33, 70])
@pytest.mark.parametrize("head_dim", [1, 32, 40])
def test_parts_of_which_some_are_empty(splits, head_dim):
    check(*parts(splits, 2, 3, 2, head_dim, empty=0.3))


@pytest.mark.parametrize("warps", [1, 2, 8])
def test_warps(warps):
    check(*parts(11, 1, 2, 3, 33, empty=0.2), warps=warps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    wide = np.float64 if dtype == "float64" else np.float32
    check(*parts(5, 2, 1, 2, 24, wide), DTYPES[dtype])


@pytest.mark.parametrize("splits", [1, 9])
def test_rows_that_no_split_attends(splits):
    part_o, part_lse = parts(splits, 2, 2, 2, 8)
    part_lse[:, 1, 0], part_o[:, 1, :, 0] = -np.inf, 0
    out, lse = check(part_o, part_lse)
    assert not out[1, :, 0].any()
    assert np.isneginf(lse[1, 0]).all()


@pytest.mark.parametrize("splits", [1, 6])
def test_a_row_of_one_split_is_that_split(splits):
    """To the bit: its weight is 1, all others 0."""
    part_o, part_lse = parts(splits, 2, 3, 2, 8, empty=1.0)
    one, one_lse = parts(1, 2, 3, 2, 8)
    part_o[-1], part_lse[-1] = one[0], one_lse[0]
    out, lse = combined(part_o, part_lse, np.float32)
    np.testing.assert_array_equal(out, one[0])
    np.testing.assert_array_equal(lse, one_lse[0])


def test_large_logarithms():
    part_o, part_lse = parts(4, 1, 2, 2, 8)
    for shift in (-1000, 1000):
        check(part_o, part_lse + np.float32(shift))


def test_a_nan_stays_in_its_row():
    part_o, part_lse = parts(6, 2, 2, 2, 8)
    clean = combined(part_o, part_lse, np.float32)
    part_o[4, 1, 0, 1, 3] = np.nan
    part_lse[2, 0, 1, 1] = np.nan
    out, lse = combined(part_o, part_lse, np.float32)
    hit = np.isnan(out)
    assert np.argwhere(hit.all(axis=-1)).tolist() == [[0, 1, 1]]
    assert np.argwhere(hit.any(axis=-1)).tolist() == [[0, 1, 1], [1, 0, 1]]
    assert np.argwhere(np.isnan(lse)).tolist() == [[0, 1, 1]]
    np.testing.assert_array_equal(out[~hit], clean[0][~hit])


def test_strided_out():
    """Heads outside, with gaps that stay as they are."""
    part_o, part_lse = parts(3, 2, 3, 2, 8)
    memory = testing.poisoned((2, 2, 3, 11))
    out = memory.transpose(0, 2, 1, 3)[..., :8]
    plain = combined(part_o, part_lse, np.float32)[0]
    assert combined(part_o, part_lse, np.float32, out=out)[0].tobytes() == plain.tobytes()
    assert np.isnan(memory[..., 8:]).all()


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
        check(*parts(7, 2, 3, 2, 5, empty=0.3), module=module, warps=2)


def strided(module):
    """One query without keys; out lies in an order of its own."""
    part_o, part_lse = parts(9, 1, 2, 1, 8)
    part_lse[:, 0, 0, 1], part_o[:, 0, 1] = -np.inf, 0
    memory = testing.poisoned((1, 1, 2, 11))
    check(part_o, part_lse, module=module, warps=1, out=memory.transpose(0, 2, 1, 3)[..., :8])


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


@FAMILY.each_case
def test_the_cases_of_the_faults_pass(case):
    FAMILY.passes(case)


@FAMILY.each_mutant
def test_mutant_is_caught(mutant, assert_killed):
    assert_killed(FAMILY, mutant)
