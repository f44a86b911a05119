"""The public API on the simulator, with the configurations that the tables choose."""

import numpy as np
import pytest
from simt_runs import DTYPES, assert_close, bits, expected

import masks
import nbflash
from nbflash.testing import make_qkv, mask_gallery


def run(inputs, mask=None, *, deterministic=False, **options):
    q, k, v, dout = inputs
    out, lse = nbflash.attention(q, k, v, mask, impl="simt", return_lse=True, **options)
    grads = nbflash.attention_backward(
        dout, q, k, v, out, lse, mask, impl="simt", deterministic=deterministic, **options
    )
    return out, lse, *grads


# Every table and its rows for small head_dim; a head_dim beyond 128 takes other rows.
CASES = [
    ("causal", (5, 9), 1, 8, "float32", False),
    ("dead-scattered", (9, 5), 1, 3, "float16", True),
    ("window", (3, 7), 1, 64, "bfloat16", False),
    ("per-batch-per-head", (4, 6), 2, 5, "float64", True),
    ("butterfly", (2, 3), 1, 100, "float32", True),
    ("padding", (13, 19), 1, 130, "float32", False),
]


@pytest.mark.parametrize(("name", "shape", "heads", "head_dim", "dtype", "deterministic"), CASES)
def test_table_configurations(name, shape, heads, head_dim, dtype, deterministic):
    mask = mask_gallery(*shape, heads=heads)[name]
    inputs = make_qkv(mask.batch or 1, *shape, heads, 1, head_dim, DTYPES[dtype])
    got = run(inputs, mask, deterministic=deterministic)
    assert_close(got, *expected(mask, *inputs))


def test_mask_causal_and_window_join():
    inputs = make_qkv(1, 6, 9, 1, 1, 4)
    joined = masks.causal(6, 9) & masks.window(6, 9, left=3, right=None)
    got = run(inputs, causal=True, window=(3, None), scale=-0.3)
    assert_close(got, *expected(joined, *inputs, scale=-0.3))


def test_strided_lse():
    """The caller's LSE may be a view; its gaps hold NaN."""
    mask, (q, k, v, dout) = mask_gallery(5)["causal"], make_qkv(1, 5, 5, 2, 2, 4, np.float64)
    out, lse = nbflash.attention(q, k, v, mask, impl="simt", return_lse=True)
    wide = np.full((1, 2, 9), np.nan)
    wide[..., :5] = lse
    whole, parts = (
        nbflash.attention_backward(dout, q, k, v, out, x, mask, impl="simt", deterministic=True)
        for x in (lse, wide[..., :5])
    )
    assert bits(whole) == bits(parts)


def test_given_output_and_plan():
    mask, (q, k, v, dout) = mask_gallery(5)["dead-keys"], make_qkv(1, 5, 5, 1, 1, 4, np.float64)
    target = np.full((1, 5, 1, 9), np.nan)[..., 2:6]
    plan = nbflash.plan(q, k, v, mask, impl="simt")
    out, lse = plan(q, k, v, out=target)
    assert out is target
    assert bits([np.ascontiguousarray(out), lse]) == bits(run((q, k, v, dout), mask)[:2])
    _, pullback = plan.vjp(q, k, v)
    grads = plan.backward(dout, q, k, v, np.array(out, order="C"), lse, deterministic=True)
    assert bits(pullback(dout, deterministic=True)) == bits(grads)


def test_negative_strides_are_named():
    q, k, v, _ = make_qkv(1, 5, 5, 1, 1, 4)
    with pytest.raises(ValueError, match=r"simulator takes no negative strides, got \(80, -16,"):
        nbflash.attention(q[:, ::-1], k, v, impl="simt")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_device_without_room_is_named(direction, monkeypatch):
    """No plan without a forward kernel, no gradients without a backward kernel."""
    from nbflash.cuda.device import Simulated

    limit = 1024 if direction == "forward" else 48 * 1024
    monkeypatch.setattr(Simulated, "smem_limit", limit)
    inputs = make_qkv(1, 3, 3, 1, 1, 200)
    with pytest.raises(ValueError, match=f"no {direction} kernel for float32 and head_dim 200"):
        run(inputs)


def test_no_keys_and_no_queries():
    out, lse, dq, dk, dv = run(make_qkv(1, 3, 0, 2, 1, 4))
    assert not out.any()
    assert np.isneginf(lse).all()
    assert (dq.shape, dk.shape, dv.shape) == ((1, 3, 2, 4), (1, 0, 1, 4), (1, 0, 1, 4))
    assert not dq.any()
    _, _, dq, dk, dv = run(make_qkv(1, 0, 3, 2, 1, 4))
    assert dq.shape == (1, 0, 2, 4)
    assert not dk.any()
    assert not dv.any()
