"""The kernel that joins the splits of a decode, against `nbflash.merge` of float64 parts."""

import numpy as np
import pytest
from decode_runs import check_combined, check_shifted, combined, parts
from simt_runs import DTYPES

from nbflash import testing


# Splits fewer than warps, as many, in whole steps and beside them, more than the lanes of a warp.
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 8, 33, 70])
@pytest.mark.parametrize("head_dim", [1, 32, 40])
def test_parts_of_which_some_are_empty(splits, head_dim):
    check_combined(*parts(splits, 2, 3, 2, head_dim, empty=0.3))


@pytest.mark.parametrize("warps", [1, 2, 8])
def test_warps(warps):
    check_combined(*parts(11, 1, 2, 3, 33, empty=0.2), warps=warps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    wide = np.float64 if dtype == "float64" else np.float32
    check_combined(*parts(5, 2, 1, 2, 24, wide), DTYPES[dtype])


@pytest.mark.parametrize("splits", [1, 9])
def test_rows_that_no_split_attends(splits):
    part_o, part_lse = parts(splits, 2, 2, 2, 8)
    part_lse[:, 1, 0], part_o[:, 1, :, 0] = -np.inf, 0
    out, lse = check_combined(part_o, part_lse)
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
        check_combined(part_o, part_lse + np.float32(shift))
        check_shifted(np.copysign(1024, shift))


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
