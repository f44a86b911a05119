"""A gradient into the LSE on the device: merged partial attentions, garbage, layouts, graphs."""

import cupy
import numpy as np
import pytest
from device_runs import DTYPES, FACTORS, bits, by_half_impl, by_impl, by_mode, gallery, host
from merged_parts import check

import nbflash
from nbflash import reference
from nbflash.testing import assert_within_reference, low_precision_backward, make_qkv

pytestmark = pytest.mark.usefixtures("one_pass")
# Below one tile; a tile and a row; several tiles of either implementation.
SHAPES = ((1, 2, 1), (63, 65, 20), (129, 257, 128), (300, 190, 100))


def pullback_of(inputs, mask, impl, scale=None):
    """``(out, lse), pullback`` on the device."""
    q, k, v = map(cupy.asarray, inputs[:3])
    return nbflash.plan(q, k, v, mask, scale=scale, impl=impl).vjp(q, k, v, return_lse=True)


def vjp_of(inputs, impl, scale=None, *, deterministic=False):
    def vjp(part):
        results, pullback = pullback_of(inputs, part, impl, scale)

        def on_host(dout, dlse):
            dout, dlse = cupy.asarray(dout), cupy.asarray(dlse)
            return map(host, pullback(dout, dlse, deterministic=deterministic))

        return tuple(map(host, results)), on_host

    return vjp


@by_impl
@pytest.mark.parametrize("name", ["dense", "causal", "dead-scattered", "per-batch-per-head"])
@pytest.mark.parametrize(("nq", "nk", "cut"), SHAPES)
def test_merged_parts(nq, nk, cut, name, impl):
    """Rows that see one part alone, or nothing at all; grouped heads."""
    mask, inputs = gallery(nq, nk, heads=4)[name], make_qkv(2, nq, nk, 4, 2, 64, np.float16)
    check(vjp_of(inputs, impl), mask, inputs, cut)


@by_mode
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_simt(dtype, deterministic):
    inputs = make_qkv(2, 150, 170, 3, 1, 40, DTYPES[dtype])
    vjp = vjp_of(inputs, "simt", -0.3, deterministic=deterministic)
    check(vjp, gallery(150, 170)["window"], inputs, 90, scale=-0.3)


@by_half_impl
@by_mode
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 72), ("bfloat16", 128)])
def test_dtypes_of_tensor_cores(impl, dtype, head_dim, deterministic):
    inputs = make_qkv(2, 257, 300, 3, 1, head_dim, DTYPES[dtype])
    vjp = vjp_of(inputs, impl, deterministic=deterministic)
    check(vjp, gallery(257, 300)["butterfly"], inputs, 130)


@by_impl
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["window", "dead-scattered", "checkerboard", "dense"])
def test_one_poisoned_row(name, poison, impl):
    """It reaches dq of its row and dk of what the row attends, and no dv."""
    n, bad = 300, 170
    mask, inputs = gallery(n, n)[name], make_qkv(1, n, n, 2, 2, 64, np.float16)
    q, k, v, dout = inputs
    dlse = np.random.default_rng(0).standard_normal((1, 2, n)).astype(np.float32)
    exact = reference.attention_backward(dout, q, k, v, mask, dlse=dlse)
    low = low_precision_backward(dout, q, k, v, mask, dlse=dlse)
    dlse[..., bad] = poison
    keys = mask.dense()[bad]
    hits = (np.arange(n) == bad) & keys.any(), keys, np.zeros(n, bool)
    _, pullback = pullback_of(inputs, mask, impl)
    got = map(host, pullback(*map(cupy.asarray, (dout, dlse))))
    for x, hit, factor, *values in zip(got, hits, FACTORS[2:], exact, low, strict=True):
        assert_within_reference(*(y[:, ~hit] for y in (x, *values)), factor=factor)
        assert not np.isfinite(x[:, hit]).any()


@by_impl
def test_layouts_and_absence(impl):
    """Bit for bit; without dlse as with zeros. dQ of the one pass is in the order of arrival."""
    inputs, mask = make_qkv(2, 150, 170, 4, 2, 64, np.float16), gallery(150, 170)["causal"]
    _, pullback = pullback_of(inputs, mask, impl)
    dout, dlse = cupy.asarray(inputs[3]), cupy.random.default_rng(0).standard_normal((2, 4, 150))
    dlse = dlse.astype(np.float32)
    moved = cupy.ascontiguousarray(dlse.transpose(1, 0, 2)).transpose(1, 0, 2)
    wide = cupy.full((2, 4, 160), np.nan, np.float32)
    wide[..., 5:155] = dlse
    backwards = cupy.ascontiguousarray(dlse[::-1, ::-1])[::-1, ::-1]
    for first, *others in (
        (dlse, moved, wide[..., 5:155], backwards),
        (cupy.zeros_like(dlse), None),
    ):
        for deterministic in (False, True):
            expected, *got = (
                bits(pullback(dout, x, deterministic=deterministic)[0 if deterministic else 1 :])
                for x in (first, *others)
            )
            assert got == [expected] * len(got)


@by_impl
def test_graphs(impl):
    """The gradient of the LSE is read when the graph runs."""
    inputs, mask = make_qkv(1, 300, 300, 4, 2, 64, np.float16), gallery(300, 300)["causal"]
    dout, dlse = cupy.asarray(inputs[3]), cupy.zeros((1, 4, 300), np.float32)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        _, pullback = pullback_of(inputs, mask, impl)
        pullback(dout, dlse)
        stream.synchronize()
        stream.begin_capture()
        captured = pullback(dout, dlse)
        graph = stream.end_capture()
        dlse[...] = cupy.linspace(-2, 2, 300, dtype=np.float32)
        graph.launch(stream)
        eager = pullback(dout, dlse)
        without = pullback(dout)
        stream.synchronize()
    assert bits(captured[1:]) == bits(eager[1:])
    assert bits(captured[1:2]) != bits(without[1:2])
