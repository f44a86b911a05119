"""nbflash's own functions of tensors give tensors, with the numbers of arrays."""

import numpy as np
import pytest
import torch
from tensors import as_array, as_numpy, assert_close, on_host, qkv
from torch._dynamo.exc import TorchDynamoException

import masks
import nbflash
from nbflash import torch as operators


def assert_tensors(got, want):
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, torch.Tensor)
        assert np.array_equal(as_numpy(a), on_host(b))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_and_its_gradients(dtype):
    tensors = [x.detach() for x in qkv(dtype=dtype)]
    arrays = [as_array(x) for x in tensors]
    forward, backward = [], []
    for *inputs, dout in (tensors, arrays):
        forward.append(nbflash.attention(*inputs, causal=True, return_lse=True))
        given = dout, *inputs, *forward[-1]
        backward.append(nbflash.attention_backward(*given, causal=True))
    assert_tensors(*forward)
    assert_tensors(*backward)
    plan = nbflash.plan(*tensors[:3], causal=True)
    results, pullback = plan.vjp(*tensors[:3], return_lse=True)
    assert_tensors(results, forward[1])
    assert_tensors(pullback(tensors[3]), backward[1])


def test_out_is_returned():
    q, k, v, _ = (x.detach() for x in qkv())
    out = torch.empty_like(q)
    assert nbflash.attention(q, k, v, out=out) is out


def test_merging_and_decode():
    q, k, v, dout = (x.detach() for x in qkv(2, 4, 20))
    sink = torch.randn(4, dtype=q.dtype)
    given, results = [q, k, v, dout, sink, torch.tensor([20, 9], dtype=torch.int32)], []
    for a, b, c, d, e, lengths in (given, map(as_array, given)):
        out, lse = nbflash.attention(a, b, c, return_lse=True)
        made = [*nbflash.merge(out, lse, out, lse), *nbflash.merge_sink(out, lse, e)]
        made += nbflash.merge_backward(d, out, lse, out, lse)
        made += nbflash.merge_sink_backward(d, out, lse, e)
        results.append([*made, nbflash.decode(a, b, c, lengths)])
    assert_tensors(*results)


def test_coverage():
    q, k, _, _ = (x.detach() for x in qkv())
    chosen = nbflash.selection.mean_pooled(q, k, block=8, topk=2, causal=True)
    want = nbflash.selection.coverage(*map(as_numpy, (q, k)), chosen)
    assert np.array_equal(nbflash.selection.coverage(q, k, chosen), want)


def test_who_wants_gradients_is_sent_to_nbflash_torch():
    q, k, v, _ = qkv()
    with pytest.raises(TypeError, match=r"nbflash\.torch takes tensors with gradients"):
        nbflash.attention(q, k, v)


def traced(function):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_calls_within_torch_compile_are_operators():
    q, k, v, dout = qkv(1, 4, 20)
    lengths = torch.tensor([20], dtype=torch.int32)
    mask, sink = masks.window(4, 20, left=5, right=0), torch.randn(4, dtype=q.dtype)

    def layer(q, k, v):
        out, lse = nbflash.attention(q, k, v, mask, scale=0.3, return_lse=True)
        out, lse = nbflash.merge_sink(*nbflash.merge(out, lse, out, lse), sink)
        return out, lse, nbflash.decode(q.detach(), k.detach(), v.detach(), lengths, window=(7, 0))

    def plain(q, k, v):
        out, lse = operators.attention(q, k, v, mask, scale=0.3, return_lse=True)
        return operators.merge_sink(*operators.merge(out, lse, out, lse), sink)[0]

    got = traced(layer)(q, k, v)
    want = layer(*(x.detach() for x in (q, k, v)))
    assert_close(got, want)
    learned = torch.autograd.grad(got[0], (q, k, v), dout)
    assert_close(learned, torch.autograd.grad(plain(q, k, v), (q, k, v), dout))


def test_what_is_no_operator_says_so_within_torch_compile():
    q, k, v, dout = (x.detach() for x in qkv(1, 20, 20))
    out, lse = nbflash.attention(q, k, v, return_lse=True)
    with pytest.raises(TorchDynamoException, match=r"q is traced by torch\.compile"):
        traced(nbflash.attention_backward)(dout, q, k, v, out, lse)
    with pytest.raises(TorchDynamoException, match="out must be None within"):
        traced(nbflash.attention)(q, k, v, out=out)
    with pytest.raises(TorchDynamoException, match="seed must be given"):
        traced(nbflash.attention)(q, k, v, dropout=0.5)
    with pytest.raises(TorchDynamoException, match="impl must be 'auto' within"):
        traced(nbflash.decode)(q, k, v, torch.tensor([20], dtype=torch.int32), impl="cpu")
