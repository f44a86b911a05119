"""Every tensor with its own strides: the bits of the contiguous run, and gaps left alone."""

import numpy as np
import pytest
from simt_runs import DTYPES, Geometry, bits, run

from nbflash import testing
from nbflash.testing import make_qkv, mask_gallery

ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
MARGIN = 64  # elements before and after


class Framed:
    """A copy of ``x`` with its own axis order, steps and row gaps, in a buffer full of NaN."""

    def __init__(self, x, seed, quantum=1):
        rng = np.random.default_rng(seed)
        order = [*ORDERS[seed % len(ORDERS)], 3]
        shape = [x.shape[axis] for axis in order]
        steps = [*rng.integers(1, 3, 3), 1]
        row = -(-(shape[3] + seed % 3) // quantum) * quantum
        spaced = [n * step for n, step in zip(shape[:3], steps, strict=False)]
        start = MARGIN + seed % 4 * quantum
        size = int(np.prod(spaced)) * row
        self.buffer = np.full(start + size + MARGIN, np.nan, x.dtype)
        self.inside = np.zeros(self.buffer.shape, bool)
        self.x, marked = (
            self._view(b, start, spaced, row, steps, shape, order)
            for b in (self.buffer, self.inside)
        )
        marked[...] = True
        self.x[...] = x

    @staticmethod
    def _view(buffer, start, spaced, row, steps, shape, order):
        parent = buffer[start : start + int(np.prod(spaced)) * row].reshape(*spaced, row)
        view = parent[tuple(slice(None, None, step) for step in steps[:3])][..., : shape[3]]
        return view.transpose(np.argsort(order))

    def assert_gaps_untouched(self):
        assert np.isnan(self.buffer[~self.inside].astype(np.float32)).all()


def as_written(x):
    return np.ascontiguousarray(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_every_tensor_has_its_own_layout(seed, dtype):
    vectors = seed % 2 == 0
    geometry = Geometry(vectors=vectors, deterministic=seed % 3 == 0, vector_red=vectors)
    mask = mask_gallery(11, 9, batch=2)["butterfly-or-local-causal"]
    inputs = make_qkv(2, 11, 9, 2, 1 + seed % 2, 8 if vectors else 5, DTYPES[dtype], seed)
    plain = run(geometry, mask, *inputs)
    q, k, v, dout = (Framed(x, seed + i, 4 if vectors else 1) for i, x in enumerate(inputs))
    empty = [testing.poisoned(x.shape, x.dtype) for x in (inputs[0], *inputs[:3])]
    outputs = [Framed(x, seed + 4 + i, 4) for i, x in enumerate(empty)]
    tensors = (q, k, v, dout)
    moved = run(geometry, mask, *(f.x for f in tensors), outputs=[f.x for f in outputs])
    assert bits(map(as_written, moved)) == bits(plain)
    assert bits(as_written(f.x) for f in tensors) == bits(inputs)
    for framed in (*tensors, *outputs):
        framed.assert_gaps_untouched()


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "tokens", "heads"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
def test_broadcast_inputs(axis, deterministic):
    """Strides of zero along one axis; the arrays are read-only."""
    mask, geometry = mask_gallery(11)["causal"], Geometry(deterministic=deterministic)
    inputs = [np.broadcast_to(x.take([0], axis), x.shape) for x in make_qkv(2, 11, 11, 2, 2, 8)]
    assert not inputs[0].flags.writeable
    whole = [np.array(x, order="C") for x in inputs]
    assert bits(run(geometry, mask, *inputs)) == bits(run(geometry, mask, *whole))


@pytest.mark.parametrize("stride", [0, 3_331_333, 99_990_001])
def test_strides_of_axes_of_length_one_do_not_matter(stride):
    mask, geometry = mask_gallery(17, 9)["causal"], Geometry()
    inputs = make_qkv(1, 17, 9, 1, 1, 8)

    def restrided(x):
        strides = (stride * x.itemsize, x.strides[1], stride * x.itemsize, x.itemsize)
        return np.lib.stride_tricks.as_strided(x, x.shape, strides)

    moved = run(geometry, mask, *map(restrided, inputs))
    assert bits(moved) == bits(run(geometry, mask, *inputs))
