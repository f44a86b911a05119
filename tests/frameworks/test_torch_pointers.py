"""Tensors in CUDA memory are read by pointer; here they are in host memory and say otherwise."""

import contextlib
import sys
import types

import numpy as np
import pytest
import torch
from tensors import as_numpy, qkv

import nbflash
from nbflash import torch as nt
from nbflash.cuda import availability
from nbflash.inputs import arrays, tensors
from nbflash.inputs.tensors import CudaTensor
from nbflash.planning import cache
from nbflash.planning import plan as planning
from nbflash.torch import memory

LAYOUTS = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part": lambda x: x[:, 3:, 1:],
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
    "empty": lambda x: x[:0],
}
by_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


class NumbersExecutor:
    """Keeps what it is given, and says what results are."""

    schedule = None

    def __init__(self):
        self.calls = []

    def bind_forward(self):
        return types.SimpleNamespace(is_cold=lambda: False)

    def forward(self, q, k, v, out, lse, *state):
        self.calls.append((q, k, v, out, lse, *state))
        out.fill(3)
        lse.fill(4)

    def backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, *state):
        self.calls.append((dout, q, k, v, out, lse, dlse, dq, dk, dv, *state))
        for value, x in enumerate((dq, dk, dv)):
            x.fill(value)


@pytest.fixture
def on_cuda(monkeypatch):
    """Tensors of host memory say that they are on device 0."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)


@pytest.fixture
def executor(on_cuda, monkeypatch):
    """A machine with a GPU whose kernels fill their results."""
    executor, empty = NumbersExecutor(), torch.empty
    device = types.SimpleNamespace(Device=contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=NoArray, cuda=device))
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(arrays, "_native_types", {np.ndarray, CudaTensor})
    monkeypatch.setattr(cache, "plans", cache.PlanCache(16))
    monkeypatch.setattr(availability, "why_not_cuda", lambda: [])
    monkeypatch.setattr(planning, "prepare", lambda *what: executor)

    def new(device, device_id, shape, dtype):
        return CudaTensor(empty(shape, dtype=getattr(torch, dtype)))

    monkeypatch.setattr(planning, "unpooled", new)
    monkeypatch.setattr(planning, "zeros", new)
    return executor


class NoArray:
    """CuPy is there, and nobody has an array of it."""


@by_layout
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_attributes_are_those_of_an_array(layout, dtype, on_cuda):
    x = layout(qkv(dtype=dtype)[3])
    given = CudaTensor(x)
    as_array = x.view(torch.int16) if dtype == "bfloat16" else x
    array = as_array.numpy()
    assert (given.shape, given.ndim) == (array.shape, array.ndim)
    assert (given.size, given.itemsize, given.ptr) == (array.size, array.itemsize, x.data_ptr())
    assert (given.dtype.name, given.data.ptr, given.data.device_id) == (dtype, x.data_ptr(), 0)
    if array.size:
        assert given.flags.c_contiguous == array.flags.c_contiguous
        assert given.strides == array.strides
        assert arrays.reach(given) == arrays.reach(array)
        assert arrays.strides(given) == arrays.strides(array)


@by_layout
def test_what_torch_does(layout, on_cuda):
    x = layout(qkv()[3])
    copy = CudaTensor(x).copy()
    assert copy.flags.c_contiguous
    assert torch.equal(copy.tensor, x)
    copy[...] = CudaTensor(2 * x)
    assert torch.equal(copy.tensor, 2 * x)
    flat = copy.reshape((x.numel(),))
    assert (flat.shape, flat.ptr) == ((x.numel(),), copy.ptr)
    copy.fill(7)
    assert torch.equal(copy.tensor, torch.full_like(x, 7))


def test_signatures_differ_with_what_a_plan_fixes(on_cuda):
    x = torch.zeros(2, 33, 4, 16, dtype=torch.float16)
    room = torch.zeros(x.numel() + 8, dtype=torch.float16)
    moved = [room[i : i + x.numel()].view(x.shape) for i in (0, 1, 8)]
    same = [CudaTensor(y).signature for y in (x, x + 1, moved[0], moved[2])]
    assert len(set(same)) == 1
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    others = [x[:1], x.bfloat16(), x.float(), strided, moved[1]]
    assert len({*same, *(CudaTensor(y).signature for y in others)}) == 1 + len(others)
    assert all(CudaTensor(y).signature not in {arrays.signature(x.numpy())} for y in (x, strided))


def test_what_is_read_by_pointer(on_cuda):
    x = torch.zeros(2)
    negated = torch.zeros(2, dtype=torch.complex64).conj().imag
    (found,) = tensors.by_pointer([torch.nn.Parameter(x, requires_grad=False)])
    assert found.ptr == x.data_ptr()
    for other in (x.clone().requires_grad_(), negated, x.to_sparse(), x.numpy()):
        assert tensors.by_pointer([x, other]) is None
        assert tensors.by_pointer([other]) is None


def test_attention_takes_and_gives_tensors(executor):
    q, k, v, dout = (x.detach() for x in qkv(dtype="bfloat16"))
    out, lse = nbflash.attention(q, k, v, causal=True, return_lse=True, impl="simt")
    gradients = nbflash.attention_backward(dout, q, k, v, out, lse, causal=True, impl="simt")
    forward, backward = executor.calls
    assert [x.tensor for x in forward[3:5]] == [out, lse]
    assert [x.ptr for x in forward[:3]] == [x.data_ptr() for x in (q, k, v)]
    assert [x.ptr for x in backward[:6]] == [x.data_ptr() for x in (dout, q, k, v, out, lse)]
    assert [(x.shape, x.dtype) for x in (out, lse)] == [
        (q.shape, torch.bfloat16),
        ((2, 4, 33), torch.float32),
    ]
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]
    assert [x.unique().tolist() for x in (out, lse, *gradients)] == [[3], [4], [0], [1], [2]]


def test_out_is_written_and_returned(executor):
    q, k, v, _ = (x.detach() for x in qkv(dtype="float16"))
    room = torch.zeros(2, 33, 4, 32, dtype=torch.float16)
    out = room[..., :16]
    assert nbflash.attention(q, k, v, out=out, impl="simt") is out
    assert (out == 3).all()
    assert (room[..., 16:] == 0).all()
    with pytest.raises(ValueError, match="out must not overlap q"):
        nbflash.attention(q, k, v, out=q, impl="simt")


def test_autograd_of_tensors_by_pointer(executor):
    q, k, v, dout = qkv(dtype="bfloat16")
    unaligned = torch.cat([q[..., :1], q], dim=-1).detach()[..., 1:].requires_grad_()
    for given in (q, unaligned):
        out = nt.attention(given, k, v, impl="simt")
        of_out = dout if given is q else torch.cat([dout[..., :1], dout], dim=-1)[..., 1:]
        gradients = torch.autograd.grad(out, (given, k, v), of_out)
        assert [x.unique().tolist() for x in (out, *gradients)] == [[3], [0], [1], [2]]
    read = [call[0] for call in executor.calls[::2]]
    assert read[0].ptr == q.data_ptr()
    assert read[1].ptr % 16 == 0
    assert np.array_equal(as_numpy(read[1].tensor), as_numpy(q))
    assert executor.calls[3][0].ptr % 16 == 0
    assert np.array_equal(as_numpy(executor.calls[3][0].tensor), as_numpy(dout))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_in_host_memory_are_read_where_they_are(dtype):
    """Of any strides but the last, and of 3 elements, which are not aligned."""
    x = torch.zeros(2, 4, 5, 3, dtype=dtype)
    for view in (x, x.transpose(1, 2), x[:, ::2, 1:], x.mT[..., :1]):
        assert memory.with_rows(view) is view
    for view in (x.transpose(2, 3), x[..., :1].expand(-1, -1, -1, 3)):
        assert memory.with_rows(view).is_contiguous()
