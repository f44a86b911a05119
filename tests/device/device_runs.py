"""Runs through the public API on CuPy arrays, with yardsticks, framed and guarded memory."""

import functools
import importlib.util
import os

import cupy
import numpy as np
import pytest
from reference import attention_and_gradients, plain_computation
from scipy.sparse import csr_array

import masks
import nbflash
from nbflash import testing
from nbflash.planning import dispatch

IMPL = "simt"


def _where_it_runs(impl):
    reasons = dispatch.why_not_here(impl)
    return pytest.mark.skipif(bool(reasons), reason="; ".join(reasons))


ON_TENSOR_CORES, ON_HOPPER = map(_where_it_runs, ("sm80", "sm90"))
OF_TENSOR_CORES = (
    pytest.param("sm80", marks=ON_TENSOR_CORES),
    pytest.param("sm90", marks=ON_HOPPER),
)
IMPLS = (IMPL, *OF_TENSOR_CORES)
by_impl = pytest.mark.parametrize("impl", IMPLS)
by_half_impl = pytest.mark.parametrize("impl", OF_TENSOR_CORES)
by_mode = pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
USUAL = {"simt": "float32", "sm80": "float16", "sm90": "float16"}  # where the dtype does not matter
RESULTS = ("out", "lse", "dq", "dk", "dv")
# The budgets of FlashAttention-2's own tests, in units of the plain computation's error: a
# gradient goes through one more product and one more rounded operand than the output.
FACTORS = (2, 2, 3, 3, 3)
MARGIN = 512

DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")}
if importlib.util.find_spec("ml_dtypes"):
    import ml_dtypes

    DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)

# (dtype, head_dim, rows read four elements at a time): what is compiled before the tests start.
GRID = tuple(
    (dtype, head_dim)
    for dtype, head_dims in {
        "float32": (1, 5, 32, 64, 100, 111, 128, 192, 256),
        "float16": (8, 59, 64, 128, 200),
        "bfloat16": (17, 64, 96, 128, 256),
        "float64": (3, 64, 128, 256),
    }.items()
    for head_dim in head_dims
    if dtype in DTYPES
)
UNALIGNED = tuple(
    (d, n) for d, n in (("float32", 64), ("float16", 64), ("bfloat16", 96)) if d in DTYPES
)
COMBINATIONS = tuple((d, n, n % 4 == 0) for d, n in GRID) + tuple((*c, False) for c in UNALIGNED)


def count_from(variable, default):
    """How many cases to run: an environment variable, or its default."""
    return int(os.environ.get(variable, default))


def full_tiles():
    """A mask without masked tiles: blocks of 128, the queries end within one."""
    rng = np.random.default_rng(0)
    kept = rng.random((9, 12)) < 0.4
    kept[4], kept[:, 5] = False, False  # nobody attends, nobody is attended
    return masks.from_scipy(csr_array(kept), block=128, shape=(1031, 1536))


@functools.cache
def gallery(nq, nk, batch=2, heads=2):
    return testing.mask_gallery(nq, nk, batch=batch, heads=heads)


@functools.lru_cache(maxsize=64)
def _kept(mask):
    return cupy.asarray(mask.dense())


def blocks_of_64(name):
    """A mask of 1000 tokens for which backward passes by tensor cores take tiles of 64 keys."""
    blocks = masks.random(1000, block=64, density=0.15, seed=1)
    return {"full": blocks, "masked": blocks & masks.causal(1000)}[name]


HALF_LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 300)
HALF_HEADS = ((2, 2), (2, 1), (3, 1), (4, 1), (6, 2), (8, 1))


def half_cases(head_dims):
    """``name, dtype, head_dim, nq, nk, heads, scale``: every mask with every (dtype, head_dim)."""
    for i, name in enumerate(gallery(8, 8)):
        for j, (dtype, head_dim) in enumerate(head_dims):
            nq = HALF_LENGTHS[(i + 2 * j) % len(HALF_LENGTHS)]
            nk = HALF_LENGTHS[(3 * i + j) % len(HALF_LENGTHS)]
            heads = HALF_HEADS[(i + j) % len(HALF_HEADS)]
            scale = -0.5 * head_dim**-0.5 if (i + j) % 7 == 0 else None
            yield name, dtype, head_dim, nq, nk, heads, scale


def make_qkv(batch, nq, nk, heads, heads_kv, head_dim, dtype, seed=0):
    """q, k, v and dout on the device."""
    shapes = batch, nq, nk, heads, heads_kv, head_dim
    return tuple(map(cupy.asarray, testing.make_qkv(*shapes, DTYPES[dtype], seed)))


def run(inputs, mask=None, *, scale=None, deterministic=False, out=None, dlse=None, impl=None):
    """``(out, lse, dq, dk, dv)`` through the public API."""
    (q, k, v, dout), impl = inputs, impl or IMPL
    out, lse = nbflash.attention(q, k, v, mask, scale=scale, out=out, return_lse=True, impl=impl)
    options = {"dlse": dlse, "scale": scale, "deterministic": deterministic, "impl": impl}
    return out, lse, *nbflash.attention_backward(dout, q, k, v, out, lse, mask, **options)


def expected(inputs, mask, scale=None):
    """The float64 reference and the plain computation in q's dtype, both on the host.

    Of each element the plain computation that is furthest from the reference, of three orders of
    summation and at least by the smallest number of its type, an LSE by more: a maximum over a
    few elements says little.
    """
    q, k, v, dout = inputs
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keep = _kept(mask)
    ref = [host(x) for x in attention_and_gradients(dout, q, k, v, keep, scale)]
    orders = [plain_computation(dout, q, k, v, keep, scale, order) for order in range(3)]
    lse_type = np.dtype("float64" if q.dtype == np.float64 else "float32")
    types = q.dtype, lse_type, *(q.dtype,) * 3
    least = [np.spacing(np.zeros((), dtype)) for dtype in types]
    # That of numbers near 1, which the logarithm of a sum rounds to: a scale of 0 counts as 1e-30.
    least[1] = np.spacing(np.ones((), lse_type))
    return ref, list(map(_furthest, ref, zip(*orders, strict=True), types, least))


def _furthest(ref, candidates, dtype, least):
    worst = least + host(candidates[0]).astype(dtype)
    for other in candidates[1:]:
        other = host(other).astype(dtype)
        with np.errstate(invalid="ignore"):
            further = abs(np.float64(other) - ref) > abs(np.float64(worst) - ref)
        worst = np.where(further, other, worst)
    return worst


def host(x):
    """``x`` as a NumPy array."""
    return x.get() if hasattr(x, "get") else np.asarray(x)


def assert_close(got, ref, low, only=RESULTS, strict=True):
    """Hold the results to their budgets; not ``strict``: the first ones only."""
    for name, factor, x, *values in zip(RESULTS, FACTORS, got, ref, low, strict=strict):
        if name in only:
            testing.assert_within_reference(host(x), *values, name=name, factor=factor)


def check(inputs, mask, **options):
    """Run and compare; returns the five results."""
    got = run(inputs, mask, **options)
    assert_close(got, *expected(inputs, mask, options.get("scale")))
    return got


def bits(results):
    """The results as bytes on the host, to compare bit for bit."""
    return [host(x).tobytes() for x in results]


def differing(a, b):
    """Number of bytes in which two lists of contiguous device arrays differ, on the device."""
    return sum((raw(x) != raw(y)).sum() for x, y in zip(a, b, strict=True))


def raw(x):
    """A contiguous array as bytes."""
    return x.reshape(-1).view(np.uint8)


def poisoned_block(size):
    """An allocation of the default pool, full of NaN of every type."""
    block = cupy.get_default_memory_pool().malloc(size)
    if size:
        block.memset_async(0xFF, size, cupy.cuda.get_current_stream())
    return block


class Guarded:
    """An allocator whose blocks lie between margins that nobody may touch."""

    def __init__(self):
        self._blocks = []

    def __call__(self, size):
        whole = poisoned_block(size + 2 * MARGIN)
        self._blocks.append((whole, size))
        return whole + MARGIN

    def assert_margins_untouched(self):
        for whole, size in self._blocks:
            data = cupy.ndarray((size + 2 * MARGIN,), np.uint8, whole)
            edges = cupy.concatenate([data[:MARGIN], data[MARGIN + size :]])
            assert bool((edges == 0xFF).all()), f"written outside a block of {size} bytes"
        assert self._blocks


class Framed:
    """A copy of ``x`` with its own axis order, gaps, direction and offset, in a buffer of NaN.

    Parameters
    ----------
    x : device array (batch, n, heads, head_dim)
    rng : numpy.random.Generator
        Chooses the layout.
    quantum : int
        Elements of which every stride and the offset are multiples.
    backwards : float
        Share of the axes that run backwards in memory.
    """

    def __init__(self, x, rng, quantum=1, backwards=0.2):
        order, strides, step = rng.permutation(3), [0, 0, 0, 1], x.shape[3]
        for axis in order:
            step += int(rng.integers(0, 3)) * quantum
            step = -(-step // quantum) * quantum
            strides[axis] = step
            step *= x.shape[axis]
        first = MARGIN + int(rng.integers(0, 4)) * quantum
        size = first + step + MARGIN
        for axis in order:
            if rng.random() < backwards:
                first += (x.shape[axis] - 1) * strides[axis]
                strides[axis] = -strides[axis]
        self._bits = np.dtype(f"uint{8 * x.itemsize}")
        self._poison = np.iinfo(self._bits).max  # all ones are NaN in every type
        self._place = first, x.shape, tuple(s * x.itemsize for s in strides)
        self._buffer = cupy.full(size, self._poison, self._bits)
        self._view(self._buffer)[...] = cupy.ascontiguousarray(x).view(self._bits)
        self.x = self._view(self._buffer.view(x.dtype))

    def _view(self, buffer):
        first, shape, strides = self._place
        return cupy.lib.stride_tricks.as_strided(buffer[first:], shape, strides)

    def assert_gaps_untouched(self):
        """What is not part of the view is still NaN."""
        outside = self._buffer.copy()
        self._view(outside)[...] = self._poison
        assert bool((outside == self._poison).all()), "written between the rows"
