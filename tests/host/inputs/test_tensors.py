"""Tensors by their pointers, with a torch that is not there."""

import sys
import types

import ml_dtypes
import numpy as np
import pytest

import nbflash
from nbflash.inputs import tensors
from nbflash.inputs.arrays import native
from nbflash.inputs.tensors import CudaTensor

STEPS = 96, 24, 8, 1


class Size(tuple):
    """As torch.Size: equal to a tuple."""


class Tensor:
    """What nbflash reads of one, and what it asks it to do."""

    shape, layout, is_cuda, requires_grad, negated = (
        Size((1, 4, 3, 8)),
        "strided",
        True,
        False,
        False,
    )

    def __init__(self, name="x", dtype="torch.float16", **changed):
        self.name, self.dtype, self.calls = name, dtype, []
        vars(self).update(changed)

    def __getattr__(self, name):
        def call(*given, **named):
            self.calls.append((name, given, named))
            return Tensor(name) if name in ("detach", "clone", "reshape") else None

        return call

    def data_ptr(self):
        return 4104

    def get_device(self):
        return 3

    def stride(self):
        return STEPS

    def is_neg(self):
        return self.negated

    def numel(self):
        return 96

    def is_contiguous(self):
        return "contiguous"

    def __setitem__(self, index, value):
        self.calls.append((index, value))


class Parameter(Tensor):
    """Plain, too."""


class Subclass(Tensor):
    """Of somebody's own."""


@pytest.fixture
def torch(monkeypatch):
    tensors._plain_kinds.cache_clear()
    tensors._torch_dtype.cache_clear()
    found = types.SimpleNamespace(
        Tensor=Tensor,
        nn=types.SimpleNamespace(Parameter=Parameter),
        strided="strided",
        contiguous_format="rows",
        device=lambda *which: which,
        empty=lambda shape, **how: Tensor("new", shape=shape, how=how),
        **{name: f"torch.{name}" for name in ("float16", "bfloat16", "float32", "int32")},
    )
    found.traces = False
    found.compiler = types.SimpleNamespace(is_compiling=lambda: found.traces)
    monkeypatch.setitem(sys.modules, "torch", found)
    monkeypatch.delitem(sys.modules, "nbflash.torch", raising=False)
    yield found
    tensors._plain_kinds.cache_clear()
    tensors._torch_dtype.cache_clear()


def test_what_kernels_read_of_a_tensor(torch):
    x = CudaTensor(Tensor())
    assert (x.ptr, x.data.ptr, x.device_id, x.data.device_id) == (4104, 4104, 3, 3)
    assert (x.shape, x.ndim, x.size, x.itemsize) == ((1, 4, 3, 8), 4, 96, 2)
    assert type(x.shape) is tuple  # a message has no torch.Size
    assert (x.strides, x.dtype) == ((192, 48, 16, 2), np.float16)
    assert x.flags.c_contiguous == "contiguous"
    assert x.signature == ((1, 4, 3, 8), STEPS, "torch.float16", 3, 8)


def test_what_torch_does_with_one(torch):
    tensor = Tensor()
    x, value = CudaTensor(tensor), CudaTensor(Tensor("value"))
    assert x.copy().tensor.name == "clone"
    assert x.reshape((4, 24)).tensor.name == "reshape"
    x.fill(7)
    x[2:] = value
    names = [call[0] for call in tensor.calls]
    assert names == ["detach", "reshape", "fill_", slice(2, None)]
    assert [call[1] for call in tensor.calls[1:]] == [((4, 24),), (7,), value.tensor]


@pytest.mark.parametrize(
    ("x", "plain", "by_pointer"),
    [
        (Tensor(), True, True),
        (Parameter(), True, True),
        (Subclass(), False, False),
        (Tensor(layout="sparse"), False, False),
        (Tensor(negated=True), False, False),
        (Tensor(is_cuda=False), True, False),
        (Tensor(requires_grad=True), True, False),
    ],
)
def test_plain_tensors_of_cuda_memory_are_taken_by_pointer(x, plain, by_pointer, torch):
    assert tensors.is_plain(x) is plain
    for given in ([x], [Tensor(), x], [x, Tensor()]):
        found = tensors.by_pointer(given)
        assert (found is not None) == by_pointer, given
        if by_pointer:
            assert [y.tensor for y in found] == given


def test_what_is_traced_has_no_pointer(torch):
    torch.traces = True
    assert tensors.by_pointer([Tensor()]) is None


def test_what_is_no_tensor(torch, monkeypatch):
    assert tensors.is_tensor(Tensor())
    for given in ([1], [np.zeros(3), Tensor()], [Tensor(), np.zeros(3)]):
        assert tensors.by_pointer(given) is None
    monkeypatch.delitem(sys.modules, "torch")
    assert not tensors.is_tensor(Tensor())


@pytest.mark.parametrize("traces", [False, True])
@pytest.mark.parametrize("imported", [False, True])
def test_operators_take_the_place_of_traced_calls(traces, imported, torch, monkeypatch):
    torch.traces, operators = traces, types.SimpleNamespace(attention=lambda *given, **how: how)
    if imported:
        monkeypatch.setitem(sys.modules, "nbflash.torch", operators)
    x = Tensor()
    taken = traces and imported
    assert tensors.operators_for(x) is (operators if taken else None)
    assert tensors.operators_for(np.zeros(3)) is None
    if not taken:
        tensors.check_untraced({"lse": x})
        return
    with pytest.raises(TypeError, match=r"lse is traced by torch\.compile"):
        tensors.check_untraced({"q": np.zeros(3), "lse": x})
    with pytest.raises(TypeError, match=r"out is traced by torch\.compile"):
        native(q=np.zeros(3), out=x)
    given = {"causal": True, "window": (3, 0), "scale": 0.5, "score": None, "impl": "cpu"}
    given |= {"dropout": 0.25, "seed": 7, "return_lse": True}
    assert nbflash.attention(x, x, x, **given) == given
    with pytest.raises(ValueError, match="out must be None within"):
        nbflash.attention(x, x, x, out=x)
    with pytest.raises(ValueError, match="seed must be given"):
        nbflash.attention(x, x, x, dropout=0.5)


def test_memory_of_torch(torch):
    new = tensors.allocator(2)
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.int32):
        x = new((2, 3), np.dtype(dtype))
        name = f"torch.{np.dtype(dtype).name}"
        assert (x.tensor.shape, x.tensor.how) == ((2, 3), {"dtype": name, "device": ("cuda", 2)})


NUMBERS = ["float16", "float32", "float64", "int32", "int64", "int8", "uint8", "bool"]


@pytest.mark.parametrize("dtype", [*NUMBERS, "bfloat16", "float8_e4m3fn"])
def test_dtypes(dtype):
    assert tensors.numpy_dtype(f"torch.{dtype}").name == dtype
    with pytest.raises(TypeError, match=r"tensors must have a dtype of .*, got torch\.complex64"):
        tensors.numpy_dtype("torch.complex64")


class Shared:
    """An array of another library in host memory, which it does not hand out."""

    shape = (2,)

    def __init__(self, dtype):
        self.dtype = dtype

    def __dlpack__(self, **_):
        raise BufferError("no")

    def __dlpack_device__(self):
        return 1, 0


@pytest.mark.parametrize("dtype", ["float32", "library.bfloat16"])
def test_what_cannot_be_shared_says_why(dtype):
    """With what to do where NumPy has no such dtype."""
    hint = "; NumPy reads no bfloat16 through DLPack: pass numpy.asarray(k)"
    expected = f"cannot be shared: no{hint if 'bfloat16' in dtype else ''}"
    with pytest.raises(TypeError) as error:
        native(k=Shared(dtype))
    assert str(error.value) == f"k ({__name__}.Shared) {expected}"
