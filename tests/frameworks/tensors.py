"""Tensors for the tests, and what nbflash itself makes of them."""

import queue

import ml_dtypes
import numpy as np
import torch

import masks
import nbflash
from nbflash.distributed import LocalCommunicator
from nbflash.testing import make_qkv

DEVICE = torch.get_default_device().type
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def qkv(batch=2, nq=33, nk=33, heads=4, heads_kv=2, head_dim=16, dtype="float64", seed=0):
    """q, k and v that ask for gradients, and dout."""
    given = make_qkv(batch, nq, nk, heads, heads_kv, head_dim, seed=seed)
    *inputs, dout = (torch.tensor(x).to(DTYPES[dtype]) for x in given)
    return *(x.requires_grad_() for x in inputs), dout


#: What NumPy and CuPy do not know: the integers that hold its bits, and its name.
BITS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
}


def as_array(x):
    """A copy of a tensor as nbflash takes it: of NumPy, or of CuPy where the tensor is on a GPU."""
    x = x.detach().clone()
    bits, dtype = BITS.get(x.dtype, (None, None))
    words = x if bits is None else x.view(bits)
    if x.device.type == "cuda":
        import cupy

        array = cupy.from_dlpack(words)
    else:
        array = words.numpy()
    return array if bits is None else array.view(dtype)


def on_host(array):
    """An array of NumPy or CuPy as one of NumPy."""
    return array.get() if hasattr(array, "get") else array


def as_numpy(x):
    """A copy of a tensor as an array of NumPy."""
    return on_host(as_array(x))


def of_core(q, k, v, dout, mask=None, *, dlse=None, deterministic=False, **options):
    """``(out, lse, dq, dk, dv)`` of nbflash on arrays where the tensors are; arrays of NumPy."""
    q, k, v, dout = map(as_array, (q, k, v, dout))
    out, lse = nbflash.attention(q, k, v, mask, return_lse=True, **options)
    dlse = None if dlse is None else as_array(dlse)
    given = dout, q, k, v, out, lse, mask
    options |= {"dlse": dlse, "deterministic": deterministic}
    gradients = nbflash.attention_backward(*given, **options)
    return tuple(map(on_host, (out, lse, *gradients)))


def decoded_by_core(q, k, v, lengths, **options):
    """``(out, lse)`` of nbflash's decode on arrays where the tensors are; arrays of NumPy."""
    arrays = [as_array(x) for x in (q, k, v, lengths)]
    return [on_host(x) for x in nbflash.decode(*arrays, **options, return_lse=True)]


def of_torch(attention, q, k, v, dout, dlse=None):
    """The same of a function of tensors that returns ``(out, lse)``."""
    out, lse = attention(q, k, v)
    gradients = [dout] if dlse is None else [dout, dlse]
    results = [out] if dlse is None else [out, lse]
    return out, lse, *torch.autograd.grad(results, (q, k, v), gradients)


def assert_same_bits(got, want):
    """Tensors hold exactly the numbers of arrays."""
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert np.array_equal(as_numpy(a), b, equal_nan=True), name


TERMS = 1024  # of a sum, at most


def assert_close(got, want):
    """`torch.testing.assert_close`, but float64 within what sums round: torch lets float32 pass."""
    if not isinstance(got, torch.Tensor):
        for pair in zip(got, want, strict=True):
            assert_close(*pair)
        return
    is_double = got.dtype == torch.float64
    budget = TERMS * torch.finfo(torch.float64).eps if is_double else None
    torch.testing.assert_close(got, want, rtol=budget, atol=budget)


def sdpa(q, k, v, attended=None, score=None):
    """Attention of torch's own operations: ``(out, lse)``."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    s = s if score is None else score(s)
    if attended is not None:
        s = s.masked_fill(~attended, -torch.inf)
    p = torch.softmax(s, dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), torch.logsumexp(s, dim=-1)


N = 33
BLOCKS = nbflash.BlockMap(
    np.arange(12).reshape(2, 2, 3, 1) % 5, shape=(N, N), block=(16, 8), within=masks.causal(N)
)
# One each of what a call has besides q, k and v.
OPTIONS = {
    "nothing": {},
    "mask": {"mask": masks.per_head([masks.local(N, block=n) for n in (4, 8, 12, 16)])},
    "blocks": {"mask": BLOCKS},
    "causal": {"causal": True},
    "window": {"window": [5, 2]},
    "open window": {"window": (None, 4)},
    "scale": {"scale": 0.7},
    "score": {"score": nbflash.scores.alibi([0.5, 0.25, 0.125, 0.0625])},
    "dropout": {"dropout": 0.25, "seed": [3, 2**63]},
} | ({"impl": {"impl": "reference"}} if DEVICE == "cpu" else {})


def only_rank():
    """The communicator of one rank."""
    return LocalCommunicator(0, [[queue.SimpleQueue()]])
