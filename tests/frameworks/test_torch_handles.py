"""What a call says besides its tensors; tensors of CUDA memory, which are in host memory here."""

import contextlib
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from stand_ins import Cupy

import masks
from nbflash import torch as nt
from nbflash.inputs import arrays
from nbflash.torch import handles, memory, operators
from nbflash.torch.handles import handle_of, spec_of
from nbflash.torch.late_masks import Documents

ARGUMENTS = {
    "mask": [None, masks.causal(9), masks.dense(9, 9), Documents(False), Documents(True)],
    "causal": [False, True, np.True_],
    "window": [None, (3, 0), (3, 1), (3, None)],
    "scale": [None, 0.5, 0.25, 1.0, 1],
    "stages": [None, nt.scores.softcap(2.0).stages, nt.scores.softcap(3.0).stages],
    "dropout": [0.0, 0.25, 0.5, 0],
    "deterministic": [False, True],
    "impl": ["auto", "cpu"],
}
FIRST = {name: values[0] for name, values in ARGUMENTS.items()}


def test_each_argument_makes_another_handle():
    given = [FIRST | {name: x} for name, values in ARGUMENTS.items() for x in values[1:]]
    given = [FIRST, *given]
    made = [handle_of(**each) for each in given]
    assert len(set(made)) == len(given)
    assert [handle_of(**each) for each in given] == made
    for each, handle in zip(given, made, strict=True):
        spec = spec_of(handle)
        assert spec.given == tuple(each[x] for x in ("mask", "causal", "window", "scale", "impl"))
        assert (spec.stages, spec.dropout) == (each["stages"], each["dropout"])
        assert spec.deterministic == each["deterministic"]


def test_a_list_is_the_window_of_a_tuple():
    lists, tuples = (handle_of(**FIRST | {"window": kind((3, 0))}) for kind in (list, tuple))
    assert lists == tuples


@pytest.fixture
def on_cuda(monkeypatch):
    """Tensors say that they are in CUDA memory, and what stream torch works on."""
    current = SimpleNamespace(cuda_stream=3)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    return current


def test_scores_in_cuda_memory_are_one_with_new_contents(on_cuda, monkeypatch):
    """One for each stream, dtype of q, shape and dtype; read in the precision of sums."""
    monkeypatch.setattr(handles.memory, "native_of", lambda x: x)
    monkeypatch.setattr(handles.scores, "build", lambda stages, given: [stages, *given])
    stages = nt.scores.compose(nt.scores.bias(torch.ones(1)), nt.scores.relative(torch.ones(1)))
    spec = spec_of(handle_of(**FIRST | {"stages": stages.stages}))
    given = torch.randn(1, 2, 3, 4, dtype=torch.float16), torch.randn(2, 5)
    first = spec.score(given, torch.bfloat16)
    assert [x.dtype for x in first[1:]] == [torch.float32] * 2
    for scale in (1, 2):
        tensors = [scale * x for x in given]
        made = spec.score(tensors, torch.bfloat16)
        assert made is first
        assert made[0] is stages.stages
        assert all(torch.equal(a, b.float()) for a, b in zip(made[1:], tensors, strict=True))
    in_double = spec.score(given, torch.float64)
    assert [x.dtype for x in in_double[1:]] == [torch.float64] * 2
    others = [in_double, spec.score([given[0].float(), given[1]], torch.bfloat16)]
    others.append(spec.score([given[0][..., :3], given[1]], torch.bfloat16))
    on_cuda.cuda_stream = 4
    others.append(spec.score(given, torch.bfloat16))
    assert len({id(x) for x in (first, *others)}) == 5
    on_cuda.cuda_stream = 3
    assert spec.score(given, torch.bfloat16) is first


def views(dtype):
    """Tensors of four axes with rows of 16 numbers, and what one of their strides is."""
    for axis, step in itertools.product(range(3), (1, 2, 4, 8, 16)):
        shape, strides = [2, 3, 2, 16], [384, 128, 32, 1]
        strides[axis] += step
        for n in (1, 2):
            shape[axis] = n
            yield torch.zeros(4096, dtype=dtype).as_strided(shape, strides), step if n > 1 else 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_in_cuda_memory_are_aligned(dtype, on_cuda):
    for x, step in views(dtype):
        read = memory.with_rows(x)
        copied = dtype != torch.float32 and step % 8 > 0
        assert (read is not x) == copied
        assert torch.equal(read, x)
        assert not copied or read.is_contiguous()


@pytest.mark.parametrize("start", range(1, 9))
def test_an_address_in_cuda_memory_is_aligned(start, on_cuda):
    room = torch.randn(512).half()
    x = room[start : start + 256].view(1, 4, 4, 16)
    read = memory.with_rows(x)
    assert read.data_ptr() % 16 == 0
    assert (read is x) == (start == 8)
    assert torch.equal(read, x)
    swapped = room[start : start + 256].view(1, 4, 4, 16).transpose(1, 2)
    assert memory.with_rows(swapped).is_contiguous() == (start < 8)
    apart = room.view(1, 16, 2, 16).transpose(2, 3)
    assert memory.with_rows(apart).is_contiguous()


def test_a_seed_in_cuda_memory_stays_there(on_cuda):
    seed = torch.tensor([5, -1])
    assert operators._seed(seed).tensor is seed
    assert operators._seed(None) is None


@pytest.fixture
def cupy(monkeypatch):
    made = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(arrays, "native", lambda **given: given)
    for cached in (memory._cupy, memory._stream):
        cached.cache_clear()
    yield made
    for cached in (memory._cupy, memory._stream):
        cached.cache_clear()


@pytest.mark.parametrize("by_protocol", [False, True])
def test_cupy_works_on_the_stream_of_torch(by_protocol, cupy, on_cuda):
    if by_protocol:
        of_protocol = lambda x: cupy.context("stream", x.__cuda_stream__())
        cupy.cuda.Stream.from_external = of_protocol
    tensor = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=1))
    with memory.on_device_of(tensor):
        entered = cupy.log[1:]
    stream = ((0, 3),) if by_protocol else (3, 1)
    allocator = memory._memory_of_torch
    assert entered == [("device", 1), ("stream", *stream), ("allocator", allocator)]
    assert cupy.log[0] == ("ndarray", (0,))  # which arrays of CuPy are known by
    assert [x[1] for x in cupy.log[4:]] == ["allocator", "stream", "device"]


def test_memory_of_cupy_is_that_of_a_tensor(cupy, monkeypatch):
    made, empty = [], torch.empty

    def noted(n, dtype, device):
        made.append((empty(n, dtype=dtype), device))
        return made[-1][0]

    monkeypatch.setattr(torch, "empty", noted)
    pointer = memory._memory_of_torch(40)
    ((held, device),) = made
    assert (held.nbytes, device) == (40, "cuda:1")
    (name, (kind, address, size, owner, number), offset) = pointer
    assert (name, kind, offset) == ("pointer", "memory", 0)
    assert (address, size, number) == (held.data_ptr(), 40, 1)
    assert owner is held


def test_cuda_tensors_without_cupy(monkeypatch):
    memory._cupy.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"CUDA tensors need CuPy: pip install 'nbflash\[cuda12"):
        memory._cupy()


def test_host_tensors_need_no_context():
    assert isinstance(memory.on_device_of(torch.zeros(1)), contextlib.nullcontext)


def test_native_arrays_share_memory():
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float8_e4m3fn, "float8_e4m3fn")):
        x = torch.arange(7).to(dtype)
        array = memory.native_of(x)
        assert (array.dtype.name, array.ctypes.data) == (name, x.data_ptr())
        assert array.astype(float).tolist() == list(range(7))
    assert memory.wide(torch.float64) == torch.float64
    assert {memory.wide(x) for x in (torch.float16, torch.bfloat16, torch.float32)} == {
        torch.float32
    }
