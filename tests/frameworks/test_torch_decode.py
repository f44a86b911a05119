"""decode of tensors: every argument arrives, of any strides, in eager mode and in a graph."""

import numpy as np
import pytest
import torch
from tensors import DEVICE, as_array, as_numpy, on_host, qkv

import masks
import nbflash
from nbflash import torch as nt

BATCH, NQ, CAPACITY = 2, 3, 24
LENGTHS = torch.tensor([20, 7], dtype=torch.int32)
DRAW = torch.Generator(torch.get_default_device()).manual_seed(2)
BIAS = torch.randn(1, 4, 1, CAPACITY, generator=DRAW)


def inputs(dtype="float32"):
    q, k, v, _ = (x.detach() for x in qkv(BATCH, NQ, CAPACITY, dtype=dtype))
    return {"q": q, "k_cache": k, "v_cache": v, "lengths": LENGTHS}


def with_last_axis_apart(given):
    q = given["q"]
    return {"q": q.transpose(1, 3).contiguous().transpose(1, 3)}


def heads_first(given):
    caches = {x: given[x].transpose(1, 2).contiguous() for x in ("k_cache", "v_cache")}
    return {name: x.transpose(1, 2) for name, x in caches.items()}


def pages(given):
    """In another order, and some of them nobody's."""
    table = torch.randperm(BATCH * 3 + 2)[: BATCH * 3].reshape(BATCH, 3).to(torch.int32)
    caches = {}
    for name in ("k_cache", "v_cache"):
        caches[name] = given[name].new_full((BATCH * 3 + 2, 8, 2, 16), torch.nan)
        caches[name][table.flatten().long()] = given[name].reshape(BATCH * 3, 8, 2, 16)
    return caches | {"block_table": table}


def eight_bits(dtype):
    def change(given):
        caches = {x: (8 * given[x]).to(dtype) for x in ("k_cache", "v_cache")}
        return caches | {"k_scale": torch.tensor([0.25, 0.5]), "v_scale": torch.tensor([2.0, 3.0])}

    return change


# What a call has besides the inputs, or in their place.
CALLS = {
    "plain": lambda given: {},
    "q of any strides": with_last_axis_apart,
    "caches of any strides": heads_first,
    "lengths": lambda given: {"lengths": torch.tensor([9, 24], dtype=torch.int32)},
    "mask": lambda given: {"mask": masks.window(NQ, CAPACITY, left=9, right=1)},
    "window": lambda given: {"window": [4, 1]},
    "open window": lambda given: {"window": (3, None)},
    "scale": lambda given: {"scale": 0.7},
    "constant score": lambda given: {"score": nbflash.scores.softcap(0.5)},
    "score": lambda given: {"score": nt.scores.bias(BIAS)},
    "pages": pages,
    "int8": eight_bits(torch.int8),
    "float8": eight_bits(torch.float8_e4m3fn),
}
if DEVICE == "cpu":  # on a GPU slopes are numbers
    SLOPES = torch.arange(4) / 8
    CALLS["score of a few numbers"] = lambda given: {"score": nt.scores.alibi(SLOPES)}


def expected(given):
    """Of nbflash, of arrays."""
    given = given | {"q": given["q"].contiguous()}
    if isinstance(score := given.get("score"), nt.scores.TensorScore):
        (stage,), (array,) = score.stages, score.tensors
        given["score"] = stage.make(as_array(array))
    arrays = {name: as_array(x) if torch.is_tensor(x) else x for name, x in given.items()}
    return [on_host(x) for x in nbflash.decode(**arrays, return_lse=True)]


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("call", CALLS)
def test_arguments(call, dtype, in_graph):
    given = inputs(dtype)
    given |= CALLS[call](given)
    run = nt.decode
    if in_graph:
        torch.compiler.reset()
        run = torch.compile(nt.decode, fullgraph=True, backend="aot_eager")
    got, want = run(**given, return_lse=True), expected(given)
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(as_numpy(a), b)
    assert torch.equal(nt.decode(**given), got[0])
    same = np.array_equal(want[0], expected(inputs(dtype))[0])
    if call != "pages" or DEVICE == "cpu":  # a GPU's kernel splits keys by pages
        assert same == (call in ("plain", "pages") or "strides" in call)
