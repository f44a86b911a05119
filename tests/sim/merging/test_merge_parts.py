"""The kernel that merges two parts, against NumPy's: every dtype, layout and kind of row."""

import ml_dtypes
import numpy as np
import pytest
from merge_runs import at_rows, check_merge, merged, part
from simt_runs import DTYPES

import nbflash
from nbflash import testing
from nbflash.backends.merging import host as merge_host
from nbflash.cuda import simulator as sim
from nbflash.merging import add_into

PLACES = np.array([1, 2, 5, 6, 11, 12, 17, 18, 19, 3], np.int32)


# Less than a block, a block, a query and a head beyond one.
@pytest.mark.parametrize(("n", "heads"), [(1, 1), (8, 8), (9, 9), (17, 3)])
@pytest.mark.parametrize("head_dim", [1, 4, 8, 40])
def test_shapes(n, heads, head_dim):
    with sim.options(race=True, seed=n):
        check_merge(part(2, n, heads, head_dim), part(2, n, heads, head_dim, seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    given = 2, 5, 2, 16, DTYPES[dtype]
    check_merge(part(*given), part(*given, seed=1))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_part_in_half_precision_into_float32(dtype):
    check_merge(part(1, 12, 2, 24), part(1, 12, 2, 24, dtype, seed=1))


@pytest.mark.parametrize("batch", [1, 2])
def test_some_rows(batch):
    """In any order; the others stay as they are, to the bit."""
    with sim.options(race=True, seed=1):
        check_merge(part(batch, 20, 3, 8), part(batch, 10, 3, 8, seed=1), PLACES)


@pytest.mark.design
@pytest.mark.parametrize("turned", range(6))
def test_every_array_has_strides_of_its_own(turned):
    """One with sequence and heads the other way around, the others as usual."""
    a, b = part(2, 9, 3, 8), part(2, 9, 3, 8, seed=1)
    expected, results = merged(a, b), tuple(np.full_like(x, np.nan) for x in a)
    given = [*a, *b, *results]
    swapped = given[turned].swapaxes(1, 2)
    given[turned] = np.ascontiguousarray(swapped).swapaxes(1, 2)
    merge_host.merge(given[:2], given[2:4], given[4:], None)
    for x, y in zip(given[4:], expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_either_order_gives_the_same_bits():
    a, b = part(2, 20, 3, 8, np.float16), part(2, 20, 3, 8, np.float16, seed=1)
    for x, y in zip(merged(a, b), merged(b, a), strict=True):
        assert x.tobytes() == y.tobytes()


def test_an_empty_part_changes_nothing():
    """Whatever it holds; two of them are zeros, and -inf."""
    (out, lse), nothing = part(1, 9, 2, 8, empty=0), np.full((1, 2, 9), -np.inf, np.float32)
    for garbage in (np.nan, np.inf, 3):
        empty = np.full_like(out, garbage), nothing
        for got in (merged((out, lse), empty), merged(empty, (out, lse))):
            np.testing.assert_array_equal(got[0], out)
            np.testing.assert_array_equal(got[1], lse)
        neither = merged(empty, empty)
        assert not neither[0].any()
        assert np.isneginf(neither[1]).all()


def test_what_is_not_finite_is_where_numpy_has_it():
    """LSE of inf and NaN beside numbers, -inf and each other; NaN and inf in O."""
    values = np.float32([-np.inf, np.inf, np.nan, 0, -3])
    lse_a, lse_b = (x.reshape(1, 1, -1).copy() for x in np.meshgrid(values, values))
    (out_a, _), (out_b, _) = part(1, 25, 1, 8, empty=0), part(1, 25, 1, 8, seed=1, empty=0)
    out_a[0, 18, 0, 3], out_b[0, 23, 0, 5], out_b[0, 4, 0, 1] = np.nan, np.inf, -np.inf
    expected = nbflash.merge(out_a, lse_a, out_b, lse_b)
    for x, y in zip(merged((out_a, lse_a), (out_b, lse_b)), expected, strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
        np.testing.assert_array_equal(np.isinf(x), np.isinf(y))
        finite = np.isfinite(y)
        assert finite.any()
        assert np.abs(x[finite] - y[finite]).max() <= 4 * np.spacing(np.float32(4))


@pytest.mark.parametrize("shift", [-(2.0**20), 2.0**20])
def test_weights_keep_their_precision_at_any_shift(shift):
    a, b = part(1, 9, 2, 8), part(1, 9, 2, 8, seed=1)
    a, b = ((x, np.rint(8 * lse) / 8) for x, lse in (a, b))  # the shift rounds nothing
    far = [(x, lse + np.float32(shift)) for x, lse in (a, b)]
    assert merged(*far)[0].tobytes() == merged(a, b)[0].tobytes()


def test_strided_memory():
    """Heads outside, with gaps that stay as they are; rows whose four elements are not aligned."""
    a, b = part(2, 9, 2, 6), part(2, 9, 2, 6, seed=1)
    memory = testing.poisoned((2, 2, 9, 7)), testing.poisoned((9, 2, 3))
    results = memory[0].transpose(0, 2, 1, 3)[..., :6], memory[1].transpose(1, 2, 0)[:, :2]
    for x, y in zip(results, a, strict=True):
        x[...] = y
    got = check_merge(a, b, memory=results)
    assert got[0].base is not None
    assert np.isnan(memory[0][..., 6]).all()
    assert np.isnan(memory[1][..., 2]).all()


def test_one_row_in_place_of_all():
    """As a sink is: its values and its logit have strides of 0."""
    a = part(2, 9, 3, 8)
    zeros = np.broadcast_to(np.zeros(8, np.float32), a[0].shape)
    sink = np.broadcast_to(np.float32([0.5, -np.inf, 3])[:, None], a[1].shape)
    check_merge(a, (zeros, sink))


def test_results_elsewhere():
    """In new arrays; both parts stay as they are."""
    a, b = part(1, 9, 2, 8), part(1, 9, 2, 8, seed=1)
    before, results = [x.copy() for x in (*a, *b)], tuple(testing.poisoned(x.shape) for x in a)
    merge_host.merge(a, b, results)
    for x, y in zip(results, merged(a, b), strict=True):
        assert x.tobytes() == y.tobytes()
    for x, y in zip((*a, *b), before, strict=True):
        assert x.tobytes() == y.tobytes()


def test_nothing_to_merge():
    a = part(1, 3, 2, 4)
    nothing = at_rows(a, slice(0))
    for x, y in zip(merged(a, nothing, np.zeros(0, np.int32)), a, strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(dtype):
    """Rounded once, to the bit as NumPy's; rows that are not named stay as they are."""
    total, given = (part(2, n, 3, 8, DTYPES[dtype], empty=0)[0] for n in (20, 10))
    for added in (given, given.astype(np.float64 if dtype == "float64" else np.float32)):
        for rows in (PLACES, slice(4, 14)):
            got, expected = total.copy(), total.copy()
            add_into(expected, added, rows)
            at, places = (got[:, rows], None) if isinstance(rows, slice) else (got, rows)
            with sim.options(race=True, seed=1):
                merge_host.add(at, added, places)
            assert got.tobytes() == expected.tobytes()
            assert got.tobytes() != total.tobytes()
