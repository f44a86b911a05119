"""merge and merge_sink on host arrays: the whole from its parts, with its gradients."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from api_calls import LAYOUTS, by_impl
from central_differences import assert_central_differences
from merged_parts import check_merge, check_sink

import nbflash
from nbflash import reference
from nbflash.merging import add_into, merge_into
from nbflash.testing import assert_within_reference, error_budget, make_qkv, mask_gallery

EPS = np.finfo(np.float64).eps
DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
by_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
# Below one tile, a tile and a row, several tiles; keys cut within a tile.
SHAPES = [(1, 2, 1), (5, 9, 4), (33, 65, 17), (150, 133, 70)]
MASKS = ["dense", "causal", "dead-scattered", "per-batch-per-head"]


def lse_dtype(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def make_parts(count, dtype, shape=(2, 13, 3, 8), spread=1.0, seed=0, garbage=np.nan):
    """Parts that are empty here and there, in some rows all of them, and hold garbage there."""
    rng = np.random.default_rng(seed)
    batch, nq, heads, _ = shape
    parts = []
    for i in range(count):
        lse = spread * rng.standard_normal((batch, heads, nq))
        lse[:, :, i::5] = -np.inf
        lse[:, :, 1] = -np.inf
        out = rng.standard_normal(shape)
        out[np.isneginf(lse).swapaxes(1, 2)] = garbage
        parts.append((out.astype(dtype), lse.astype(lse_dtype(dtype))))
    return parts


def exact_merge(parts):
    return reference.merge(_wide(parts))


def exact_merge_backward(dout, dlse, parts):
    return [*itertools.chain(*reference.merge_backward(dout, dlse, _wide(parts)))]


def _wide(parts):
    return [(out.astype(np.float64), lse) for out, lse in parts]


def plain_merge(parts):
    """The equations of `reference.merge` in the precision of the parts: the yardstick."""
    outs, lses = zip(*parts, strict=True)
    lse = np.logaddexp.reduce(lses)
    weights = plain_weights(lses, lse)
    out = sum(w * x.astype(lse.dtype) for w, x in zip(weights, outs, strict=True))
    return out.astype(outs[0].dtype), lse


def plain_merge_backward(dout, dlse, parts):
    whole, lse = plain_merge(parts)
    wide = dout.astype(lse.dtype)
    gradients = []
    weights = plain_weights([x for _, x in parts], lse)
    for (out, _), w in zip(parts, weights, strict=True):
        towards = np.sum(wide * (out.astype(lse.dtype) - whole.astype(lse.dtype)), axis=-1)
        dlse_p = w[..., 0].swapaxes(1, 2) * (dlse + towards.swapaxes(1, 2))
        gradients += (w * wide).astype(dout.dtype), dlse_p
    return gradients


def plain_weights(lses, lse):
    finite = np.where(np.isneginf(lse), 0, lse)
    return [np.exp(x - finite).swapaxes(1, 2)[..., None] for x in lses]


def gradients_into(part, seed=1):
    """dout and dlse of a merged part."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(x.shape).astype(x.dtype) for x in part)


def vjp_of(impl, inputs, scale=None):
    q, k, v, _ = inputs
    return lambda part: nbflash.plan(q, k, v, part, scale=scale, impl=impl).vjp(
        q, k, v, return_lse=True
    )


@by_impl
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("nq", "nk", "cut"), SHAPES)
def test_two_parts_are_the_whole_attention(nq, nk, cut, name, impl):
    """With causal masks and dead rows, rows that see one part alone, or nothing at all."""
    mask, inputs = mask_gallery(nq, nk, batch=2, heads=4)[name], make_qkv(2, nq, nk, 4, 2, 8)
    check_merge(vjp_of(impl, inputs), mask, inputs, cut)


@by_impl
@by_dtype
def test_parts_of_every_dtype(dtype, impl):
    mask, inputs = mask_gallery(40, 50)["window"], make_qkv(2, 40, 50, 3, 1, 16, dtype)
    check_merge(vjp_of(impl, inputs, -0.7), mask, inputs, 31, scale=-0.7)


@by_impl
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("nq", "nk", "_cut"), SHAPES)
def test_a_sink_is_one_more_column(nq, nk, _cut, name, impl):
    """Below, among and above the scores; a row that attends nothing has the sink alone."""
    mask, inputs = mask_gallery(nq, nk, batch=2, heads=4)[name], make_qkv(2, nq, nk, 4, 2, 8)
    check_sink(vjp_of(impl, inputs), mask, inputs, np.float32([-3, 0, 0.5, 4]))


@by_impl
@by_dtype
def test_sinks_of_every_dtype(dtype, impl):
    mask, inputs = mask_gallery(40, 50)["dead-scattered"], make_qkv(2, 40, 50, 2, 1, 16, dtype)
    sink = np.array([0.3, -1.2], lse_dtype(dtype))
    check_sink(vjp_of(impl, inputs, -0.7), mask, inputs, sink, scale=-0.7)


@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
@by_dtype
def test_merge_is_that_of_the_reference(dtype, spread):
    """Empty parts hold NaN; where the LSE are large, their difference still counts in full."""
    a, b = make_parts(2, dtype, spread=spread)
    clean = make_parts(2, dtype, spread=spread, garbage=0)
    results = nbflash.merge(*a, *b)
    dout, dlse = gradients_into(results)
    got = *results, *nbflash.merge_backward(dout, *a, *b, dlse=dlse)
    exact = *exact_merge(clean), *exact_merge_backward(dout, dlse, clean)
    low = *plain_merge(clean), *plain_merge_backward(dout, dlse, clean)
    names = ("out", "lse", "dout_a", "dlse_a", "dout_b", "dlse_b")
    for name, x, *values in zip(names, got, exact, low, strict=True):
        assert_within_reference(x, *values, name=name)
        assert x.dtype == values[1].dtype


def test_the_lse_keeps_what_a_small_part_adds():
    """Beside an LSE of 0, where 1 and the part's sum together are not representable."""
    out, small = (
        np.zeros((1, 12, 1, 4), np.float32),
        -np.arange(4, 16, dtype=np.float32)[None, None],
    )
    _, lse = nbflash.merge(out, np.zeros_like(small), out, small)
    assert lse.tobytes() == np.log1p(np.exp(small)).tobytes()


def test_weights_keep_their_precision_at_any_shift():
    """All LSE larger by 2^20: the same output and gradients, to the bit."""
    rng, shift = np.random.default_rng(0), np.float32(2**20)
    outs = [rng.standard_normal((1, 9, 2, 4)).astype(np.float32) for _ in "ab"]
    lses = [rng.integers(-32, 33, (1, 2, 9)).astype(np.float32) / 8 for _ in "ab"]
    near, far = ([*zip(outs, (x + s for x in lses), strict=True)] for s in (0, shift))
    out, lse = nbflash.merge(*near[0], *near[1])
    out_far, lse_far = nbflash.merge(*far[0], *far[1])
    assert out_far.tobytes() == out.tobytes()
    assert np.array_equal(lse_far, np.float32(np.float64(shift) + lse))
    dout, dlse = gradients_into((out, lse))
    gradients = (nbflash.merge_backward(dout, *a, *b, dlse=dlse) for a, b in (near, far))
    for x, y in zip(*gradients, strict=True):
        assert x.tobytes() == y.tobytes()


@by_dtype
def test_any_order_of_many_parts(dtype):
    """(a + b) + c and a + (b + c): each merge rounds to the dtype."""
    a, b, c = make_parts(3, dtype, shape=(2, 33, 3, 16))
    left = nbflash.merge(*nbflash.merge(*a, *b), *c)
    right = nbflash.merge(*a, *nbflash.merge(*b, *c))
    clean = make_parts(3, dtype, shape=(2, 33, 3, 16), garbage=0)
    low = plain_merge([plain_merge(clean[:2]), clean[2]])
    for x, y, ref, yardstick in zip(left, right, exact_merge(clean), low, strict=True):
        assert_within_reference(x, ref, yardstick, factor=4)  # two merges
        assert_within_reference(y, ref, yardstick, factor=4)
        finite = np.isfinite(ref)
        apart = np.abs(x[finite].astype(np.float64) - y[finite].astype(np.float64))
        assert apart.max() <= error_budget(ref, yardstick, factor=4)


@by_dtype
def test_order_of_two_parts_does_not_matter_to_the_bit(dtype):
    a, b = make_parts(2, dtype, spread=30)
    for x, y in zip(nbflash.merge(*a, *b), nbflash.merge(*b, *a), strict=True):
        assert x.tobytes() == y.tobytes()


@by_dtype
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 3.0])
def test_an_empty_part_changes_nothing(dtype, garbage):
    """And gets no gradient; the other part gets all of it, as it came, be it infinite."""
    ((out, lse),) = make_parts(1, dtype, garbage=0)
    part = out, lse
    empty = np.full_like(out, garbage), np.full_like(lse, -np.inf)
    dout, dlse = gradients_into(part)
    dout[0, 3], live = np.inf, lse > -np.inf
    wanted = np.where(live.swapaxes(1, 2)[..., None], dout, 0), np.where(live, dlse, 0)
    dlse[~live] = garbage
    for given, first in ((part + empty, True), (empty + part, False)):
        for x, y in zip(nbflash.merge(*given), part, strict=True):
            np.testing.assert_array_equal(x, y)
        gradients = nbflash.merge_backward(dout, *given, dlse=dlse)
        kept, none = (gradients[:2], gradients[2:]) if first else (gradients[2:], gradients[:2])
        for x, y, zero in zip(kept, wanted, none, strict=True):
            np.testing.assert_array_equal(x, y.astype(x.dtype))
            assert not zero.any()


def test_nothing_merged_with_nothing():
    out, lse = np.full((1, 3, 2, 4), np.nan, np.float32), np.full((1, 2, 3), -np.inf, np.float32)
    merged_out, merged_lse = nbflash.merge(out, lse, out, lse)
    assert not merged_out.any()
    assert np.isneginf(merged_lse).all()
    for x in nbflash.merge_backward(out, out, lse, out, lse, dlse=np.full_like(lse, np.nan)):
        assert not x.any()


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 2, 0), (1, 1, 1, 1)])
def test_arrays_without_elements(shape):
    batch, nq, heads, _ = shape
    part = np.ones(shape, np.float32), np.zeros((batch, heads, nq), np.float32)
    out, lse = nbflash.merge(*part, *part)
    np.testing.assert_array_equal(out, part[0])
    assert lse.shape == part[1].shape
    *_, dsink = nbflash.merge_sink_backward(part[0], *part, np.zeros(heads, np.float32))
    assert dsink.shape == (heads,)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_attended_takes_part_honestly(poison):
    """What is not finite in a live row reaches the result of that row and no other."""
    (out, lse), other = make_parts(2, np.float32, garbage=0)
    lse[1, 0, 2] = other[1][1, 0, 2] = 0
    bad_out, bad_lse, row = out.copy(), lse.copy(), np.zeros(out.shape[:3], bool)
    bad_out[1, 2, 0] = bad_lse[1, 0, 2] = poison
    row[1, 2, 0] = True
    merged_out, merged_lse = nbflash.merge(bad_out, lse, *other)
    np.testing.assert_array_equal(~np.isfinite(merged_out).all(axis=-1), row)
    np.testing.assert_array_equal(merged_lse, nbflash.merge(out, lse, *other)[1])
    merged_out, merged_lse = nbflash.merge(out, bad_lse, *other)
    np.testing.assert_array_equal(np.isnan(merged_out).all(axis=-1), row)
    np.testing.assert_array_equal(np.isnan(merged_lse).swapaxes(1, 2), row)


def test_parts_at_both_ends_of_the_range():
    """The difference of the LSE overflows; the weights are still 1 and 0."""
    out_a, out_b, dout = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 4), np.float32)
    lse = np.full((1, 2, 5), np.finfo(np.float32).max)
    for x, y in zip(nbflash.merge(out_a, lse, out_b, -lse), (out_a, lse), strict=True):
        np.testing.assert_array_equal(x, y)
    dout_a, _, dout_b, dlse_b = nbflash.merge_backward(dout, out_a, lse, out_b, -lse)
    np.testing.assert_array_equal(dout_a, dout)
    assert not dout_b.any()
    assert not dlse_b.any()


def test_the_gradient_of_a_sink_is_summed_in_float64():
    """float32 would lose the ones. Where nothing is attended, it is dlse that is summed."""
    out, lse = np.zeros((4, 1, 1, 2), np.float32), np.full((4, 1, 1), -np.inf, np.float32)
    dlse = np.float32([2**24, 1, 1, -(2**24)]).reshape(lse.shape)
    dsink = nbflash.merge_sink_backward(out, out, lse, np.zeros(1, np.float32), dlse=dlse)[2]
    assert dsink == 2
    assert dsink.dtype == np.float32


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_merge_equal_central_differences(seed):
    """Of every out and lse of two parts, one of which may be empty in a row."""
    a, b = make_parts(2, np.float64, (1, 6, 2, 2), seed=seed, garbage=0)
    arrays = [*a, *b]
    dout, dlse = gradients_into(a, seed)
    gradients = nbflash.merge_backward(dout, *arrays, dlse=dlse)
    assert_central_differences(nbflash.merge, arrays, gradients, dout, dlse)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_a_sink_equal_central_differences(seed):
    (part,) = make_parts(1, np.float64, (2, 6, 2, 2), seed=seed, garbage=0)
    arrays = [*part, np.random.default_rng(seed).standard_normal(2)]
    dout, dlse = gradients_into(part, seed)
    gradients = nbflash.merge_sink_backward(dout, *arrays, dlse=dlse)
    assert_central_differences(nbflash.merge_sink, arrays, gradients, dout, dlse)


@by_dtype
def test_no_sink_and_no_dlse(dtype):
    """A sink of -inf is none, an absent dlse is zero."""
    (part,) = make_parts(1, dtype, garbage=0)
    none = np.full(3, -np.inf, part[1].dtype)
    for x, y in zip(nbflash.merge_sink(*part, none), part, strict=True):
        np.testing.assert_array_equal(x, y)
    dout, dlse = gradients_into(part)
    assert not nbflash.merge_sink_backward(dout, *part, none, dlse=dlse)[2].any()
    sink, zero = np.zeros_like(none), np.zeros_like(dlse)
    for function, given in (
        (nbflash.merge_backward, (dout, *part, *part)),
        (nbflash.merge_sink_backward, (dout, *part, sink)),
    ):
        for x, y in zip(function(*given), function(*given, dlse=zero), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("layout", [*LAYOUTS, np.asfortranarray], ids=lambda x: x.__name__)
def test_any_strides_and_results_that_attention_takes(layout):
    parts = make_parts(2, np.float32, (4, 6, 4, 8))
    dout, dlse = gradients_into(parts[0])
    arrays = dout, *parts[0], *parts[1], dlse
    moved = [layout(x[..., None])[..., 0] if x.ndim == 3 else layout(x) for x in arrays]
    sink = np.zeros(4, np.float32)
    for function, given, options in (
        (nbflash.merge, slice(1, 5), ()),
        (nbflash.merge_backward, slice(0, 5), ("dlse",)),
        (nbflash.merge_sink, slice(1, 3), ("sink",)),
        (nbflash.merge_sink_backward, slice(0, 3), ("sink", "dlse")),
    ):
        results = []
        for given_arrays in (arrays, moved):
            named = {"sink": sink, "dlse": given_arrays[-1]}
            named = {name: named[name] for name in options}
            results.append(function(*given_arrays[given], **named))
            assert isinstance(results[-1], tuple)
        for x, y in zip(*results, strict=True):
            np.testing.assert_array_equal(x, y)
            assert y.flags.c_contiguous


@by_dtype
@pytest.mark.parametrize(
    "rows", [slice(2, 7), np.array([8, 1, 5, 2, 11], np.int32)], ids=["run", "any"]
)
def test_some_rows_merged_in_place(dtype, rows):
    """What `merge` gives for them, -inf, NaN and infinite LSE among them; others stay."""
    (out, lse), (out_b, lse_b) = make_parts(2, dtype)
    part, at = (out_b[:, :5], lse_b[:, :, :5]), np.arange(13)[rows]
    lse[0, 0, at[0]], part[1][1, 2, 3], part[1][0, 1, 2] = np.nan, np.inf, -np.inf
    before, expected = (out.copy(), lse.copy()), nbflash.merge(out[:, at], lse[:, :, at], *part)
    merge_into((out, lse), part, rows)
    others = np.delete(np.arange(13), at)
    for x, y, z in zip((out, lse.swapaxes(1, 2)), expected, before, strict=True):
        y, z = (y, z) if y.ndim == 4 else (y.swapaxes(1, 2), z.swapaxes(1, 2))
        x, y, z = (values.astype(np.float64) for values in (x, y, z))
        np.testing.assert_array_equal(x[:, at], y)
        np.testing.assert_array_equal(x[:, others], z[:, others])
    assert np.isnan(lse[0, 0, at[0]])
    assert np.isnan(out[1, at[3], 2]).all()


@by_dtype
def test_sums_are_rounded_once(dtype):
    """A part of a little more than half a unit, which is half a unit if it is rounded itself."""
    wide, rows = lse_dtype(dtype), np.array([3, 0], np.int32)
    more = ml_dtypes.finfo(dtype).eps * wide(0.5 + 2**-13)
    total, part = np.full((1, 4, 1, 2), 1, dtype), np.full((1, 2, 1, 2), more, wide)
    add_into(total, part, rows)
    assert (total[:, rows] == (wide(1) + part).astype(dtype)).all()
    assert (total[:, 1:3] == 1).all()


def test_foreign_arrays_are_shared():
    class Foreign:
        def __init__(self, x):
            self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__

    a, b = make_parts(2, np.float32)
    results = (nbflash.merge(*a, *b), nbflash.merge(*map(Foreign, a + b)))
    for x, y in zip(*results, strict=True):
        assert type(y) is np.ndarray
        assert x.tobytes() == y.tobytes()


def test_inputs_are_left_alone():
    a, b = make_parts(2, np.float32)
    dout, dlse = gradients_into(a)
    before = [x.copy() for x in (*a, *b, dout, dlse)]
    nbflash.merge(*a, *b)
    nbflash.merge_backward(dout, *a, *b, dlse=dlse)
    nbflash.merge_sink_backward(dout, *a, np.zeros(3, np.float32), dlse=dlse)
    for x, y in zip((*a, *b, dout, dlse), before, strict=True):
        assert x.tobytes() == y.tobytes()


def test_gradients_of_parts_with_a_large_offset_in_common():
    """Only the difference of the outputs counts, and it is exact in float32."""
    rng = np.random.default_rng(0)
    steps = rng.integers(-4, 5, (2, 1, 5, 2, 16)).astype(np.float32) / 256
    out_a, out_b = 1000 + steps
    dout = rng.standard_normal(out_a.shape, np.float32)
    lse = np.zeros((1, 2, 5), np.float32)
    _, dlse_a, _, dlse_b = nbflash.merge_backward(dout, out_a, lse, out_b, lse)
    terms = dout.astype(np.float64) * (out_a - out_b)
    exact = terms.sum(-1).swapaxes(1, 2) / 4
    largest = abs(terms).sum(-1).swapaxes(1, 2) / 4
    assert (abs(dlse_a - exact) <= 16 * np.finfo(np.float32).eps * largest).all()
    np.testing.assert_array_equal(dlse_b, -dlse_a)
