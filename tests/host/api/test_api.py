"""attention and attention_backward on host arrays: results, semantics, layouts."""

import itertools
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from api_calls import LAYOUTS, attend, by_impl, padded, run_all

import masks
import nbflash
from nbflash import reference
from nbflash.testing import (
    assert_within_reference,
    low_precision,
    low_precision_backward,
    make_qkv,
    poisoned,
)


def attended(impl, nq, nk, mask=None, **options):
    """The mask seen through the API: with Q = 0 and V = 1, rows of out are 1 / keys attended."""
    q, k = np.zeros((1, nq, 1, 256), np.float32), np.zeros((1, nk, 1, 256), np.float32)
    v = np.zeros_like(k)
    v[0, np.arange(nk), 0, np.arange(nk)] = 1
    out = nbflash.attention(q, k, v, mask, impl=impl, **options)
    return out[0, :, 0, :nk] > 0


def assert_matches_reference(impl, arrays, mask, options):
    """Forward and backward of ``impl`` within the budget, for the joined mask of the options."""
    q, k, v, dout = arrays
    got = run_all(impl, q, k, v, dout, mask, **options)
    keep = effective(mask, q, k, options)
    assert_within_budget(got, arrays, keep, options.get("scale"))


def assert_within_budget(got, arrays, keep, scale=None):
    """All five results within the error of plain dense attention in the inputs' precision."""
    q, k, v, dout = arrays
    wide = np.float64 if q.dtype == np.float64 else np.float32
    assert [x.dtype for x in got] == [q.dtype, wide, q.dtype, q.dtype, q.dtype]
    expected = reference.attention(q, k, v, keep, scale)
    expected += reference.attention_backward(dout, q, k, v, keep, scale)
    low = low_precision(q, k, v, keep, scale)
    low += low_precision_backward(dout, q, k, v, keep, scale)
    names = ("out", "lse", "dq", "dk", "dv")
    for name, *results in zip(names, got, expected, low, strict=True):
        assert_within_reference(*results, name)


def effective(mask, q, k, options):
    """The joined mask, cell by cell from the definitions of causal and window."""
    nq, nk = q.shape[1], k.shape[1]
    keep = np.ones((nq, nk), bool) if mask is None else mask.dense()
    distance = np.arange(nk) - (np.arange(nq)[:, None] + nk - nq)
    if options.get("causal"):
        keep = keep & (distance <= 0)
    left, right = options.get("window") or (None, None)
    if left is not None:
        keep = keep & (distance >= -left)
    if right is not None:
        keep = keep & (distance <= right)
    return keep


# Below one tile, one tile and a row, several tiles; more keys than queries and the reverse.
SIZES = [(1, 1), (5, 9), (129, 129), (70, 200), (200, 70)]
OPTIONS = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"window": (17, 3)},
    "causal-window": {"causal": True, "window": (30, None)},
    "scale": {"scale": -0.3},
}


@by_impl
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_float32_matches_the_reference(impl, size, options):
    arrays = make_qkv(2, *size, 4, 2, 16)
    assert_matches_reference(impl, arrays, None, options)


DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


@by_impl
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_other_dtypes_match_the_reference(impl, dtype):
    arrays = make_qkv(1, 100, 150, 2, 1, 24, dtype)
    assert_matches_reference(impl, arrays, None, {"causal": True})


N = 150
MASKS = {
    "butterfly": masks.butterfly(N, block=16),
    "scattered": masks.from_dense(np.random.default_rng(1).random((N, N)) < 0.1),
    "documents": masks.documents([20, 70, 60]),
    "per-head": masks.per_head([masks.causal(N), masks.dense(N), masks.local(N, block=8)] * 2),
    "per-batch": masks.per_batch([masks.strided(N, block=8, stride=3), masks.prefix(N, 40)]),
    "empty": masks.from_dense(np.zeros((N, N), bool)),
}


@by_impl
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window": (80, None)}], ids=["mask", "and"]
)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_match_the_reference(impl, mask, options):
    arrays = make_qkv(2, N, N, 6, 3, 16)
    assert_matches_reference(impl, arrays, mask, options)


@by_impl
@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_query_heads_share_key_heads_in_order(impl, group):
    """Head h reads kv head h // group, whose values are all h // group: a mean of 17 equal ones."""
    q, k, v, _ = make_qkv(1, 9, 17, 6, 6 // group, 8)
    v[:] = np.arange(6 // group)[:, None]
    out = nbflash.attention(q, k, v, impl=impl)
    rounding = k.shape[1] * np.finfo(out.dtype).eps
    expected = np.broadcast_to(np.arange(6) // group, (9, 6))
    np.testing.assert_allclose(out[0, :, :, 0], expected, rounding)


@by_impl
def test_causal_is_bottom_right_aligned(impl):
    assert attended(impl, 2, 4, causal=True).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert attended(impl, 4, 2, causal=True).tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]


@by_impl
def test_window_is_inclusive_and_bottom_right_aligned(impl):
    assert attended(impl, 3, 3, window=(1, 0)).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert attended(impl, 2, 4, window=(0, 1)).tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]
    assert attended(impl, 2, 4, window=[None, 0]).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert attended(impl, 2, 4, window=(None, None)).all()


@by_impl
def test_mask_causal_and_window_are_joined_by_and(impl):
    mask = masks.strided(8, block=1, stride=2)
    seen = attended(impl, 8, 8, mask, causal=True, window=(4, 9))
    distance = np.arange(8)[:, None] - np.arange(8)
    np.testing.assert_array_equal(seen, mask.dense() & (distance >= 0) & (distance <= 4))


@by_impl
def test_rows_that_attend_nothing_are_zero(impl):
    nq, nk = 40, 25
    q, k, v, dout = make_qkv(2, nq, nk, 2, 2, 8)
    out, lse = attend(impl, q, k, v, causal=True)
    dq, dk, dv = nbflash.attention_backward(dout, q, k, v, out, lse, causal=True, impl=impl)
    dead = nq - nk
    assert (out[:, :dead] == 0).all()
    assert (lse[:, :, :dead] == -np.inf).all()
    assert (dq[:, :dead] == 0).all()
    assert np.isfinite(lse[:, :, dead:]).all()
    assert (out[:, dead:] != 0).all()
    for gradient in (dq, dk, dv):
        assert np.isfinite(gradient).all()


@by_impl
@pytest.mark.parametrize("poison", [np.nan, np.inf], ids=["nan", "inf"])
def test_masked_out_keys_and_values_never_reach_the_result(impl, poison):
    """Keys 40 to 59 of 90 are attended by no one; they hold NaN or Inf, inside and beyond tiles."""
    q, k, v, dout = make_qkv(1, 90, 90, 2, 1, 8)
    keep = np.random.default_rng(2).random((90, 90)) < 0.3
    keep[:, 40:60] = False
    mask = masks.from_dense(keep)
    k[:, 40:60], v[:, 40:60] = poison, poison
    got = run_all(impl, q, k, v, dout, mask)
    assert (got[3][:, 40:60] == 0).all()
    assert (got[4][:, 40:60] == 0).all()
    assert_within_budget(got, (q, k, v, dout), mask)


@by_impl
@pytest.mark.parametrize("empty", ["batch", "nq", "nk", "nq-and-nk"])
def test_empty_axes_are_legal(impl, empty):
    batch = 0 if empty == "batch" else 2
    nq = 0 if "nq" in empty else 5
    nk = 0 if "nk" in empty else 7
    q, k, v, dout = make_qkv(batch, nq, nk, 4, 2, 8)
    out, lse, dq, dk, dv = run_all(impl, q, k, v, dout, causal=True, window=(3, None))
    assert out.shape == q.shape == dq.shape
    assert dk.shape == dv.shape == k.shape
    assert lse.shape == (batch, 4, nq)
    assert (out == 0).all()
    assert (lse == -np.inf).all()
    for gradient in (dq, dk, dv):
        assert (gradient == 0).all()


@by_impl
def test_out_receives_the_result_and_is_returned(impl):
    q, k, v, _ = make_qkv(2, 33, 21, 2, 2, 8)
    expected = nbflash.attention(q, k, v, impl=impl)
    heads_first = poisoned((2, 2, 33, 8)).transpose(0, 2, 1, 3)
    spaced = poisoned((2, 66, 2, 12))[:, ::-2, :, 2:10]
    for out in (poisoned(q.shape), heads_first, spaced):
        for _ in range(2):
            out.fill(np.nan)
            assert nbflash.attention(q, k, v, out=out, impl=impl) is out
            np.testing.assert_array_equal(out, expected)
    assert np.isnan(spaced.base[:, ::-2, :, :2]).all()
    assert np.isnan(spaced.base[:, ::2]).all()


@by_impl
def test_out_may_interleave_with_an_input(impl):
    """Q and out side by side in one buffer overlap in addresses but share no element."""
    q, k, v, _ = make_qkv(2, 33, 21, 2, 2, 8)
    expected = nbflash.attention(q, k, v, impl=impl)
    buffer = poisoned((2, 33, 2, 2, 8))
    buffer[:, :, 0] = q
    nbflash.attention(buffer[:, :, 0], k, v, out=buffer[:, :, 1], impl=impl)
    np.testing.assert_array_equal(buffer[:, :, 1], expected)
    np.testing.assert_array_equal(buffer[:, :, 0], q)


@by_impl
@pytest.mark.parametrize("shift", range(4))
def test_every_array_may_have_its_own_layout(impl, shift):
    """Results are bitwise those of contiguous arrays; the gaps hold NaN."""
    q, k, v, dout = make_qkv(2, 45, 37, 4, 2, 8)
    out, lse, *expected = run_all(impl, q, k, v, dout, causal=True)
    layout = list(itertools.islice(itertools.cycle(LAYOUTS), shift, shift + 5))
    q, k, v, dout, out_ = (f(x) for f, x in zip(layout, (q, k, v, dout, out), strict=True))
    np.testing.assert_array_equal(attend(impl, q, k, v, causal=True)[0], out)
    lse = padded(lse[..., None, :])[..., 0, :]
    got = nbflash.attention_backward(dout, q, k, v, out_, lse, causal=True, impl=impl)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@by_impl
def test_broadcast_and_read_only_inputs(impl):
    q, k, v, dout = make_qkv(3, 20, 30, 2, 2, 8)
    k, v = k[:1], v[:1]
    whole = [np.repeat(x, 3, axis=0) for x in (k, v)]
    shared = [np.broadcast_to(x, (3, *x.shape[1:])) for x in (k, v)]
    for x, y in zip(run_all(impl, q, *shared, dout), run_all(impl, q, *whole, dout), strict=True):
        np.testing.assert_array_equal(x, y)


@by_impl
def test_strides_of_axes_of_length_one_do_not_matter(impl):
    q, k, v, _ = make_qkv(1, 20, 30, 1, 1, 8)
    expected = nbflash.attention(q, k, v, impl=impl)
    q = np.lib.stride_tricks.as_strided(q, q.shape, (3331333, 32, 0, 4))
    np.testing.assert_array_equal(nbflash.attention(q, k, v, impl=impl), expected)


@by_impl
def test_strides_that_reach_no_element_do_not_matter(impl):
    """The last axis of head_dim 1, and every axis of an empty array."""
    q, k, v, _ = make_qkv(2, 20, 30, 2, 2, 1)
    expected = nbflash.attention(q, k, v, impl=impl)
    wide = np.concatenate([q, q], axis=3)
    np.testing.assert_array_equal(nbflash.attention(wide[..., ::2], k, v, impl=impl), expected)
    out = np.lib.stride_tricks.as_strided(poisoned((1, 1)), (0, 20, 2, 1), (0, 0, 0, 0))
    assert nbflash.attention(q[:0], k[:0], v[:0], out=out, impl=impl) is out


class Foreign:
    """Another library's host array: DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Subclass(np.ndarray):
    pass


@pytest.mark.parametrize("wrap", [Foreign, lambda x: x.view(Subclass)], ids=["dlpack", "subclass"])
def test_other_array_types_give_numpy_results(wrap):
    q, k, v, dout = make_qkv(1, 20, 30, 2, 2, 8)
    expected = run_all("reference", q, k, v, dout)
    out, lse = attend("reference", *map(wrap, (q, k, v)))
    arrays = map(wrap, (dout, q, k, v, out, lse))
    got = out, lse, *nbflash.attention_backward(*arrays, impl="reference")
    for x, y in zip(got, expected, strict=True):
        assert type(x) is np.ndarray
        np.testing.assert_array_equal(x, y)


class Standard(Foreign):
    """An array of a library of the array API standard."""

    def __array_namespace__(self):
        return Standard

    @classmethod
    def from_dlpack(cls, x):
        return cls(np.from_dlpack(x))


class OfPackage(Foreign):
    """An array of a library that has ``from_dlpack``, outside of the standard."""

    __module__ = "package.arrays"


@pytest.mark.parametrize("kind", [Standard, OfPackage])
def test_arrays_of_libraries_that_take_dlpack_give_such_arrays(kind, monkeypatch):
    package = types.ModuleType("package")
    package.from_dlpack = lambda x: OfPackage(np.from_dlpack(x))
    monkeypatch.setitem(sys.modules, "package", package)
    q, k, v, dout = make_qkv(2, 1, 30, 2, 2, 8)
    results = []
    for wrap in (np.asarray, kind):
        x, y, z, d = map(wrap, (q, k, v, dout))
        out, lse = nbflash.attention(x, y, z, return_lse=True)
        results.append([out, lse, *nbflash.attention_backward(d, x, y, z, out, lse)])
        results[-1] += [nbflash.decode(x, y, z, [20, 9]), *nbflash.merge(out, lse, out, lse)]
        planned, pullback = nbflash.plan(x, y, z).vjp(x, y, z)
        results[-1] += [planned, *pullback(d)]
    for expected, got in zip(*results, strict=True):
        assert type(got) is kind
        np.testing.assert_array_equal(got.array, expected)
    target = kind(np.empty_like(q))
    assert nbflash.attention(*map(kind, (q, k, v)), out=target) is target
    np.testing.assert_array_equal(target.array, results[0][0])


def test_bfloat16_through_dlpack_is_refused_with_what_to_do():
    """NumPy neither reads nor exports it; ``numpy.asarray`` of such arrays has it by ml_dtypes."""

    class Half(Foreign):
        dtype = "bfloat16"

        def __dlpack__(self, **kwargs):
            raise BufferError("Unsupported dtype in DLTensor.")

    q, k, v = (Half(x) for x in make_qkv(1, 9, 9, 1, 1, 8)[:3])
    with pytest.raises(TypeError, match=r"no bfloat16 through DLPack: pass numpy\.asarray\(q\)$"):
        nbflash.attention(q, k, v)


def test_auto_on_host_arrays_is_cpu():
    q, k, v, _ = make_qkv(1, 20, 30, 2, 2, 8)
    assert nbflash.plan(q, k, v).impl == "cpu"
    assert nbflash.why_not("auto", q, k, v) == nbflash.why_not("cpu", q, k, v) == []
    assert nbflash.why_not("reference", q, k, v, causal=True) == []
    reasons = " ".join(nbflash.why_not("sm90", q, k, v))
    assert "needs float16 or bfloat16, got float32" in reasons
    assert "got NumPy arrays" in reasons
    assert "16 bytes" not in reasons
    assert any("got NumPy arrays" in reason for reason in nbflash.why_not("simt", q, k, v))


@by_impl
def test_inputs_are_left_alone(impl):
    q, k, v, dout = make_qkv(2, 45, 37, 4, 2, 8)
    before = [x.copy() for x in (q, k, v, dout)]
    run_all(impl, q, k, v, dout, causal=True)
    for x, y in zip((q, k, v, dout), before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, float])
def test_a_scale_of_any_precision(kind):
    q, k, v, _ = make_qkv(1, 9, 9, 1, 1, 8)
    expected = nbflash.attention(q, k, v, scale=0.125)
    np.testing.assert_array_equal(nbflash.attention(q, k, v, scale=kind(0.125)), expected)
