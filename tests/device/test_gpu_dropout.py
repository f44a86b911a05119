"""Dropout on the device: the mask of every implementation, values, and a state in a CUDA graph."""

import functools

import cupy
import numpy as np
import pytest
from compile_ahead import SPECS, problem_of, sm90_specs
from device_runs import (
    DTYPES,
    FACTORS,
    IMPLS,
    ON_HOPPER,
    ON_TENSOR_CORES,
    RESULTS,
    bits,
    blocks_of_64,
    by_mode,
    gallery,
    host,
)

import masks
import nbflash
from nbflash import reference
from nbflash.definitions import philox
from nbflash.definitions.constants import DROPOUT_BLOCK as BLOCK
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.positions import Positions
from nbflash.inputs.problem import check_forward
from nbflash.planning.plan import plan_of
from nbflash.testing import (
    assert_within_reference,
    low_precision,
    low_precision_backward,
    make_qkv,
)

SEED = 2**63 + 5, 2**40 + 11
P = 0.2
SIZES = [("simt", dtype, head_dim) for dtype in DTYPES for head_dim in (64, 100, 256)]
SIZES += [  # every configuration's head_dim
    pytest.param(impl, dtype, head_dim, marks=marks)
    for impl, marks in (("sm80", ON_TENSOR_CORES), ("sm90", ON_HOPPER))
    for dtype in DTYPES
    if dtype in ("float16", "bfloat16")
    for head_dim in (8, 64, 72, 128, 192, 256)
]
PLACED_SIZES = [("simt", 64), ("sm80", 64), ("sm80", 128)]
PLACED_SIZES += [pytest.param("sm90", d, marks=ON_HOPPER) for d in (64, 128, 192, 256)]
PARTS = (1, 2, 6, 11), (0, 3, 4, 7, 9, 11)  # blocks of queries and of keys
by_impl = pytest.mark.parametrize("impl", IMPLS)


def kernels(impl=None, head_dim=None, dtype=None, kind=None, **_):
    """For `compile_ahead`."""
    if kind:
        yield sm90_specs, problem_of("bfloat16", head_dim), None, P, blocks_of_64(kind)
    elif dtype and head_dim:
        yield SPECS[impl], problem_of(dtype, head_dim), None, P


def run_once(inputs, mask, seed, *, impl="simt", deterministic=False):
    q, k, v, dout = inputs
    how = {"dropout": P, "seed": seed, "impl": impl}
    out, lse = nbflash.attention(q, k, v, mask, return_lse=True, **how)
    how["deterministic"] = deterministic
    return out, lse, *nbflash.attention_backward(dout, q, k, v, out, lse, mask, **how)


def check(inputs, mask, impl, deterministic=False):
    """All five results within their budgets."""
    (q, k, v, dout), how = inputs, {"dropout": P, "seed": SEED}
    given = map(cupy.asarray, inputs)
    got = run_once(given, mask, SEED, impl=impl, deterministic=deterministic)
    exact = reference.attention(q, k, v, mask, **how)
    exact += reference.attention_backward(dout, q, k, v, mask, **how)
    low = low_precision(q, k, v, mask, **how)
    low += low_precision_backward(dout, q, k, v, mask, **how)
    for name, factor, x, *values in zip(RESULTS, FACTORS, got, exact, low, strict=True):
        assert_within_reference(host(x), *values, name=name, factor=factor)


@by_mode
@pytest.mark.parametrize(("impl", "dtype", "head_dim"), SIZES)
def test_values_and_gradients(impl, head_dim, dtype, deterministic):
    """Below one tile, several tiles; heads that share."""
    for nq, nk, name in ((1, 3, "dense"), (63, 65, "causal"), (300, 190, "per-batch-per-head")):
        inputs = make_qkv(2, nq, nk, 4, 2, head_dim, DTYPES[dtype])
        check(inputs, gallery(nq, nk, heads=4)[name], impl, deterministic)


@ON_HOPPER
@pytest.mark.parametrize("kind", ["full", "masked"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_of_64_keys(head_dim, kind):
    check(make_qkv(1, 1000, 1000, 4, 2, head_dim, DTYPES["bfloat16"]), blocks_of_64(kind), "sm90")


@by_mode
@by_impl
def test_the_mask_is_that_of_philox(impl, deterministic):
    """Equal scores and a unit matrix for V and dO: the results are the elements of P themselves."""
    n, heads = 200, 3
    q = cupy.zeros((2, n, heads, n), np.float16)
    eye = cupy.ascontiguousarray(cupy.broadcast_to(cupy.eye(n, dtype="f2")[:, None], q.shape))
    given = {"impl": impl, "deterministic": deterministic}
    out, _, _, _, dv = run_once((q, q, eye, eye), None, SEED, **given)
    kept = philox.kept((2, heads, n, n), P, SEED)
    np.testing.assert_array_equal(host(out) != 0, kept.transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(host(dv) != 0, kept.transpose(0, 3, 1, 2))


@ON_HOPPER
@pytest.mark.parametrize("p", [0.001, 0.03, 0.5, 0.96875])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_halves_are_compared_as_integers(head_dim, p):
    """By a comparison of float16: subnormal ones, infinity as threshold, and above it NaN."""
    n, heads = 4 * head_dim, 2
    q = cupy.zeros((1, n, heads, head_dim), np.float16)
    kept = philox.kept((1, heads, n, n), p, SEED).transpose(0, 2, 1, 3)
    for first in range(0, n, head_dim):
        columns = cupy.eye(n, head_dim, -first, dtype="f2")[:, None]
        v = cupy.ascontiguousarray(cupy.broadcast_to(columns, q.shape))
        out = nbflash.attention(q, q, v, dropout=p, seed=SEED, impl="sm90")
        np.testing.assert_array_equal(host(out) != 0, kept[..., first : first + head_dim])


def sign_of_gradients(n, head_dim, p, first, impl):
    """Scores are 0, dP is 1 and δ near 1 − 1 / n: dS is above 0 where an element is kept, else
    below. dQ for keys, and dK for queries, that are those of a unit matrix.
    """
    shape = 1, n, 2, head_dim
    zero, one = cupy.zeros(shape, np.float16), cupy.full(shape, 1, np.float16)
    v = one / np.float16(head_dim)
    eye = cupy.broadcast_to(cupy.eye(n, head_dim, -first, dtype="f2")[:, None], shape)
    how = {"dropout": p, "seed": SEED, "impl": impl, "scale": 1.0}
    for q, k in ((zero, cupy.ascontiguousarray(eye)), (cupy.ascontiguousarray(eye), zero)):
        out, lse = nbflash.attention(q, k, v, return_lse=True, **how)
        dq, dk, _ = nbflash.attention_backward(one, q, k, v, out, lse, **how)
        yield host(dk if k is zero else dq) > 0


@ON_HOPPER
@pytest.mark.parametrize("p", [0.03, 0.5, 0.9])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_mask_of_dp_is_that_of_philox(head_dim, p):
    n = 300
    kept = philox.kept((1, 2, n, n), p, SEED)
    for first in range(0, n, head_dim):
        by_rows, by_columns = sign_of_gradients(n, head_dim, p, first, "sm90")
        part = slice(first, first + head_dim)
        width = min(head_dim, n - first)
        expected = kept[..., part].transpose(0, 2, 1, 3)
        np.testing.assert_array_equal(by_rows[..., :width], expected)
        expected = kept[:, :, part].transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(by_columns[..., :width], expected)


@by_mode
@pytest.mark.parametrize(("impl", "head_dim"), PLACED_SIZES)
def test_part_of_a_sequence(impl, head_dim, deterministic):
    """Equal scores and columns of a unit matrix for V, and for dO: of the whole sequence's P."""
    n, heads = 11 * BLOCK + 9, 2
    places = [np.concatenate([np.arange(n)[BLOCK * b :][:BLOCK] for b in x]) for x in PARTS]
    part = Positions(*places)
    shapes = [(1, x.size, heads, head_dim) for x in places]
    q, k = (cupy.zeros(shape, np.float16) for shape in shapes)
    spec = AttentionSpec(check_forward(q, k, k), masks.dense(*map(len, places)), None, P, part)
    plan = plan_of(spec, impl)
    kept = philox.kept((1, heads, n, n), P, SEED)[:, :, places[0]][..., places[1]]
    for first in range(0, max(map(len, places)), head_dim):
        dout, v = (columns_of_unit_matrix(shape, first) for shape in shapes)
        out, lse = plan.run_forward(q, k, v, None, SEED)
        *_, dv = plan.run_backward(dout, q, k, v, out, lse, None, SEED, deterministic)
        by_rows, by_columns = kept.transpose(0, 2, 1, 3), kept.transpose(0, 3, 1, 2)
        for got, want in ((out, by_rows), (dv, by_columns)):
            want = want[..., first : first + head_dim]
            np.testing.assert_array_equal(host(got)[..., : want.shape[-1]] != 0, want)


def columns_of_unit_matrix(shape, first):
    columns = cupy.eye(shape[1], shape[3], -first, dtype="f2")[:, None]
    return cupy.ascontiguousarray(cupy.broadcast_to(columns, shape))


@by_impl
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_a_state_advances_in_a_graph(dtype, impl):
    """Every replay drops other elements: those of an eager call with the numbers of the state."""
    inputs = [cupy.asarray(x) for x in make_qkv(2, 300, 300, 4, 2, 64, np.float16)]
    run = functools.partial(run_once, impl=impl)
    mask, state = gallery(300, 300)["causal"], cupy.asarray([7, 0], dtype)
    pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        for _ in range(2):
            run(inputs, mask, state, deterministic=True)
            state[1:] += 1
        state[1] = 0
        stream.synchronize()
        stream.begin_capture()
        results = run(inputs, mask, state, deterministic=True)
        state[1:] += 1
        graph = stream.end_capture()
        seen = set()
        for offset in range(3):
            graph.launch(stream)
            stream.synchronize()
            assert bits(results) == bits(run(inputs, mask, (7, offset), deterministic=True))
            seen.add(tuple(bits(results)))
    assert len(seen) == 3
