"""nbflash.jax on buffers in CUDA memory, by stand-ins: addresses, streams, and room of XLA's."""

import itertools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stand_ins import Cupy

from nbflash import jax as of_jax
from nbflash.jax import _Room


class Buffer:
    """What XLA gives to a callback."""

    def __init__(self, address, shape, dtype, place=(2, 1)):
        self.shape, self.dtype, self._place = shape, dtype, place
        self.__cuda_array_interface__ = {"data": (address, False)}

    def __dlpack_device__(self):
        return self._place


@pytest.mark.parametrize("with_room", [False, True])
def test_buffers_are_arrays_of_cupy_on_the_stream_of_xla(with_room, monkeypatch):
    cupy = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(of_jax, "native", lambda **given: given)
    given = [Buffer(64, (2, 3), "float16"), Buffer(128, (4,), "uint32")]
    results = [Buffer(256, (5, 1), "bfloat16")]
    room = Buffer(1 << 20, (4096,), "uint8") if with_room else None
    with of_jax._native(SimpleNamespace(stream=9), given, results, room) as made:
        entered = cupy.log[1:]
    arrays = [("ndarray", x.shape, np.dtype(x.dtype)) for x in (*given, *results)]
    assert entered[:2] == [("device", 1), ("stream", 9, 1)]
    entered = entered[2:]
    if with_room:
        kind, allocator = entered.pop(0)
        assert kind == "allocator"
        memory = allocator(100)[1]
        assert memory == ("memory", 1 << 20, 100, room, 1)
    assert [x[:3] for x in entered] == arrays
    for (_, _, _, pointer), x in zip(entered, (*given, *results), strict=True):
        name, (_, address, _, owner, device), offset = pointer
        assert (name, address, device, offset) == ("pointer", of_jax._address(x), 1, 0)
        assert owner is x
    assert tuple(map(len, made)) == (2, 1)
    left = ["allocator"] * with_room + ["stream", "device"]
    assert [x[1] for x in cupy.log if x[0] == "left"] == left


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (2, 257, 3, 72), (1, 4096, 2, 128)])
def test_room_holds_gradients_and_statistics(shape, dtype, monkeypatch):
    """dQ in the precision of sums, of whole tiles, and two numbers a row, all aligned."""
    q = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    assert of_jax._room(q, q) == 0
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    batch, nq, heads, head_dim = shape
    rows = batch * heads * -(-nq // 256) * 256
    width = -(-head_dim // 64) * 64
    assert of_jax._room(q, q) >= 4 * rows * (width + 2) + 3 * 512
    assert of_jax._room(q, q) <= 8 * rows * (width + 8) + 8 * 512


def test_words_of_a_seed():
    """In host memory NumPy's, unsigned; others are left where they are."""
    words = np.array([1, 2, 2**32 - 1, 2**32 - 1], np.uint32)
    assert of_jax._state(words, 0.0) is None
    assert of_jax._state(words, 0.5).tolist() == [1 + (2 << 32), 2**64 - 1]
    elsewhere = SimpleNamespace(view=lambda dtype: dtype)
    assert of_jax._state(elsewhere, 0.5) == "int64"


@pytest.mark.parametrize("base", [0, 8, 511])
def test_what_a_room_gives_lies_apart(base):
    """Aligned, within the buffer, in any order of sizes; what does not fit is the pool's."""
    buffer = SimpleNamespace(
        shape=(1 << 16,), __cuda_array_interface__={"data": ((1 << 30) + base, False)}
    )
    cuda = SimpleNamespace(
        UnownedMemory=lambda start, size, owner, device: range(start, start + size),
        MemoryPointer=lambda memory, offset: memory,
    )
    pool = SimpleNamespace(malloc=lambda size: None)
    room = _Room(SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool), buffer, 0)
    sizes = np.random.default_rng(base).integers(1, 2000, 60).tolist()
    found = [room(size) for size in sizes]
    given = [x for x in found if x is not None]
    assert 30 < len(given) < 60
    assert [len(x) for x in given] == [
        n for x, n in zip(found, sizes, strict=True) if x is not None
    ]
    assert all(x.start % 512 == 0 for x in given)
    assert (1 << 30) + base <= given[0].start
    assert all(one.stop <= other.start for one, other in itertools.pairwise(given))
    assert given[-1].stop <= (1 << 30) + base + buffer.shape[0]
