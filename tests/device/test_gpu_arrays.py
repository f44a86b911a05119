"""Arrays of other kinds and layouts on the device: DLPack, the array interface, views."""

import importlib.util

import cupy
import numpy as np
import pytest
from device_runs import (
    DTYPES,
    USUAL,
    assert_close,
    bits,
    by_impl,
    expected,
    gallery,
    host,
    make_qkv,
    run,
)

import nbflash
from nbflash import testing

NATIVE = [d for d in DTYPES if d != "bfloat16"]


class OnlyDLPack:
    """What a foreign library offers: DLPack and nothing else."""

    def __init__(self, x):
        self._x = x

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


class OnlyInterface:
    """``__cuda_array_interface__`` and nothing else."""

    def __init__(self, x):
        self.__cuda_array_interface__ = x.__cuda_array_interface__
        self._alive = x


@pytest.fixture(scope="module")
def mask():
    return gallery(150, 170)["causal"]


@pytest.mark.parametrize("wrap", [OnlyDLPack, OnlyInterface])
@pytest.mark.parametrize("dtype", NATIVE)
def test_foreign_arrays(wrap, dtype, mask):
    inputs = make_qkv(1, 150, 170, 2, 1, 64, dtype)
    whole = bits(run(inputs, mask, deterministic=True))
    results = run([wrap(x) for x in inputs], mask, deterministic=True)
    assert all(isinstance(x, cupy.ndarray) for x in results)
    assert bits(results) == whole


@pytest.mark.parametrize("kind", ["strided", "negative"])
def test_foreign_views(kind, mask):
    inputs = make_qkv(1, 150, 170, 2, 1, 64, "float32")
    whole = bits(run(inputs, mask, deterministic=True))
    if kind == "strided":
        views = [cupy.repeat(x, 2, axis=1)[:, ::2] for x in inputs]
    else:
        views = [x[:, ::-1].copy()[:, ::-1] for x in inputs]
    assert bits(run([OnlyInterface(x) for x in views], mask, deterministic=True)) == whole
    assert bits(run(views, mask, deterministic=True)) == whole


TORCH_DTYPES = ("float16", "bfloat16", "float32")
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


@needs_torch
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_tensors(dtype, mask):
    import torch

    inputs = make_qkv(1, 150, 170, 2, 1, 64, dtype)
    whole = bits(run(inputs, mask, deterministic=True))
    raw = [torch.from_dlpack(x.view(np.uint8)) for x in inputs]
    tensors = [x.view(getattr(torch, dtype)) for x in raw]
    results = run(tensors, mask, deterministic=True)
    assert all(isinstance(x, torch.Tensor) for x in results)
    assert bits([cupy.from_dlpack(x.view(torch.uint8)) for x in results]) == whole


@needs_torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["dense", "causal", "butterfly", "sinks"])
def test_at_most_twice_the_error_of_torch(name, dtype):
    import torch

    shape = gallery(257, 257)[name]
    inputs = make_qkv(2, 257, 257, 4, 2, 64, dtype)
    q, k, v = (
        torch.from_dlpack(x.view(np.uint8)).view(getattr(torch, dtype)).transpose(1, 2)
        for x in inputs[:3]
    )
    keep = torch.from_numpy(shape.dense()).to(q.device)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=keep
    )
    theirs = theirs.transpose(1, 2).float().cpu().numpy().astype(DTYPES[dtype])
    (ref, *_), _ = expected(inputs, shape)
    testing.assert_within_reference(host(run(inputs, shape)[0]), ref, theirs)


@by_impl
def test_strided_lse(impl, mask):
    """The caller's LSE may be a view; its gaps hold NaN."""
    q, k, v, dout = make_qkv(2, 150, 170, 4, 2, 64, USUAL[impl])
    out, lse = nbflash.attention(q, k, v, mask, impl=impl, return_lse=True)
    wide = cupy.full((2, 4, 200), np.nan, np.float32)
    wide[..., :150] = lse
    whole, parts = (
        nbflash.attention_backward(dout, q, k, v, out, x, mask, impl=impl, deterministic=True)
        for x in (lse, wide[..., :150])
    )
    assert bits(whole) == bits(parts)


@by_impl
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "tokens", "heads"])
def test_broadcast_inputs(axis, impl, mask):
    inputs = [
        cupy.broadcast_to(x.take(cupy.asarray([0]), axis), x.shape)
        for x in make_qkv(2, 150, 170, 2, 2, 64, USUAL[impl])
    ]
    whole = [cupy.array(x, order="C") for x in inputs]
    options = {"deterministic": True, "impl": impl}
    assert bits(run(inputs, mask, **options)) == bits(run(whole, mask, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_storage_offsets_of_single_elements(offset, dtype, mask):
    """A base address that only its item size divides: rows are read one element at a time."""
    inputs = make_qkv(1, 150, 170, 2, 1, 64, dtype)
    moved = []
    for x in inputs:
        buffer = cupy.empty(x.size + 8, x.dtype)
        view = buffer[offset : offset + x.size].reshape(x.shape)
        view[...] = x
        moved.append(view)
    assert_close(run(moved, mask), *expected(inputs, mask))
