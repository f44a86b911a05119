"""The backward kernels of tensor cores: parity block by block, exact results, garbage, scores."""

import cupy
import numpy as np
import pytest
from device_runs import (
    DTYPES,
    assert_close,
    blocks_of_64,
    by_half_impl,
    by_mode,
    expected,
    full_tiles,
    gallery,
    half_cases,
    host,
    make_qkv,
    run,
)

import nbflash
from nbflash.backends.sm80.executor import Sm80Executor
from nbflash.backends.sm90.backward import choice
from nbflash.schedule.tile_schedule import TileSchedule
from nbflash.testing import assert_blocks_within_reference, code_word_oracle

pytestmark = [by_half_impl, pytest.mark.usefixtures("one_pass")]

HEAD_DIMS = tuple(
    (dtype, head_dim)
    for dtype, head_dims in {
        "float16": (8, 64, 72, 128, 192, 256),
        "bfloat16": (64, 96, 128, 136, 200, 256),
    }.items()
    for head_dim in head_dims
    if dtype in DTYPES
)
MODES = ((64, False), (64, True), (192, False))  # one pass; two, of each column kernel
CASES = tuple(half_cases(HEAD_DIMS))
BLOCK = 64


def check(impl, inputs, mask, **options):
    """All five results within their budgets."""
    got = run(inputs, mask, impl=impl, **options)
    assert_close(got, *expected(inputs, mask, options.get("scale")))
    return got


@pytest.mark.parametrize(("name", "dtype", "head_dim", "nq", "nk", "heads", "scale"), CASES)
def test_backward(impl, name, dtype, head_dim, nq, nk, heads, scale):
    mask = gallery(nq, nk, heads=heads[0] if name.startswith("per-") else 2)[name]
    inputs = make_qkv(mask.batch or 1, nq, nk, *heads, head_dim, dtype, seed=nq + nk)
    check(impl, inputs, mask, scale=scale)


@pytest.mark.parametrize(("name", "dtype", "head_dim", "nq", "nk", "heads", "scale"), CASES)
def test_two_passes(impl, name, dtype, head_dim, nq, nk, heads, scale):
    """The same grid in deterministic mode, twice: the same bits."""
    mask = gallery(nq, nk, heads=heads[0] if name.startswith("per-") else 2)[name]
    inputs = make_qkv(mask.batch or 1, nq, nk, *heads, head_dim, dtype, seed=nq + nk)
    first, again = (check(impl, inputs, mask, scale=scale, deterministic=True) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert host(a).tobytes() == host(b).tobytes()


@pytest.mark.parametrize("name", ["dense", "causal", "butterfly", "local", "bigbird", "random"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "deterministic"),
    [
        ("float16", 64, False),
        ("bfloat16", 128, False),
        ("float16", 64, True),
        ("bfloat16", 128, True),
        ("bfloat16", 192, False),
        ("float16", 256, False),
    ],
)
def test_longer_sequences(impl, name, dtype, head_dim, deterministic):
    """Several rows and columns for every block, and every block of the gradients by itself."""
    inputs, mask = make_qkv(3, 1031, 1500, 16, 4, head_dim, dtype), gallery(1031, 1500)[name]
    got = run(inputs, mask, impl=impl, deterministic=deterministic)
    ref, low = expected(inputs, mask)
    for which, x, *values in list(zip(("dq", "dk", "dv"), got[2:], ref[2:], low[2:], strict=True)):
        assert_blocks_within_reference(host(x), *values, BLOCK, name=which, factor=3)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 128)])
def test_schedules_without_masked_tiles(impl, dtype, head_dim, deterministic):
    """They have kernels of their own."""
    mask = full_tiles()
    inputs = make_qkv(3, *mask.shape, 16, 4, head_dim, dtype)
    assert TileSchedule.from_mask(mask, 128, 128).full_tiles
    check(impl, inputs, mask, deterministic=deterministic)


def rows_kept(impl, spec, deterministic):
    """Rows of the tiles that blocks keep, keys or queries."""
    if impl == "sm90":
        return {choice.columns_config(spec).tile_n, choice.dq_config(spec).tile_m}
    return {config.kept for config in Sm80Executor(spec)._table_backward(deterministic)}


@by_mode
@pytest.mark.parametrize("name", ["full", "masked"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float16", 64), ("bfloat16", 40), ("bfloat16", 128), ("float16", 72)]
)
def test_tiles_of_64_keys(impl, name, dtype, head_dim, deterministic):
    inputs, mask = make_qkv(2, 1000, 1000, 4, 2, head_dim, dtype), blocks_of_64(name)
    spec = nbflash.plan(*inputs[:3], mask=mask, impl=impl).spec
    assert rows_kept(impl, spec, deterministic) == {64}
    check(impl, inputs, mask, deterministic=deterministic)


@pytest.mark.parametrize(("head_dim", "deterministic"), MODES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["dense", "causal", "checkerboard", "dead-scattered", "random"])
def test_saturated_softmax_scatters(impl, name, dtype, head_dim, deterministic):
    nq, nk = 257, 300
    mask = gallery(nq, nk)[name]
    words = code_word_oracle(nq, head_dim, nk, mask, DTYPES[dtype])
    inputs = [cupy.asarray(x) for x in (words.q, words.k, words.v, words.dout)]
    options = {"scale": words.scale, "impl": impl, "deterministic": deterministic}
    _, _, dq, dk, dv = map(host, run(inputs, mask, **options))
    np.testing.assert_array_equal(dv, words.dv)
    assert not dq.any()
    assert not dk.any()


@pytest.mark.parametrize(("head_dim", "deterministic"), MODES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["padding", "dead-keys", "dead-scattered", "documents"])
def test_garbage_where_nothing_attends(impl, name, dtype, poison, head_dim, deterministic):
    mask, clean = gallery(190, 330)[name], make_qkv(2, 190, 330, 2, 1, head_dim, dtype)
    keep = np.broadcast_to(mask.dense(), (2, 2, 190, 330))
    rows = cupy.asarray(~keep.any(axis=3).transpose(0, 2, 1))
    keys = cupy.asarray(~keep.any(axis=(1, 2))[..., None])
    dirty = [x.copy() for x in clean]
    for x, where in zip(dirty, (rows, keys, keys, rows), strict=True):
        x[where] = poison
    got = run(dirty, mask, impl=impl, deterministic=deterministic)
    assert_close(got, *expected(clean, mask))


@pytest.mark.parametrize(("head_dim", "deterministic"), MODES)
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("name", ["window", "butterfly", "dead-scattered", "checkerboard"])
def test_one_poisoned_row(impl, name, which, head_dim, deterministic):
    """Only what it meets may change, and what it meets must show it."""
    n, bad = 300, 170
    mask, inputs = gallery(n, n)[name], make_qkv(1, n, n, 2, 2, head_dim, "float16")
    ref, low = expected(inputs, mask)
    dirty = [x.copy() for x in inputs]
    dirty["qkv".find(which)][:, bad] = np.nan
    keep = mask.dense()
    if which in "kv":
        rows, keys = keep[:, bad], (keep[keep[:, bad]]).any(axis=0)
    else:
        rows, keys = np.arange(n) == bad, keep[bad]
    got = [host(x) for x in run(dirty, mask, impl=impl, deterministic=deterministic)]
    for i, hit in ((2, rows), (3, keys), (4, keys)):
        alone = [x[:, ~hit] for x in (got[i], ref[i], low[i])]
        assert_blocks_within_reference(*alone, max(1, (~hit).sum()), factor=4)
    assert not np.isfinite(got[2][:, rows]).any()


@pytest.mark.parametrize(("head_dim", "deterministic"), MODES)
@pytest.mark.parametrize("shift", [120.0, -120.0, 1000.0, -1000.0])
@pytest.mark.parametrize("name", ["dense", "dead-scattered", "causal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_shifted_scores(impl, shift, name, dtype, head_dim, deterministic):
    """Very large and very negative LSE at ragged lengths."""
    nq, nk = 197, 331
    q, k, v, dout = make_qkv(1, nq, nk, 2, 1, head_dim, dtype, seed=3)
    q[..., -1] = 8
    k[..., -1] = shift
    check(impl, (q, k, v, dout), gallery(nq, nk)[name], deterministic=deterministic)


@pytest.mark.parametrize(("head_dim", "deterministic"), MODES)
@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_scales(impl, scale, head_dim, deterministic):
    inputs, mask = make_qkv(1, 190, 190, 2, 2, head_dim, "float16"), gallery(190, 190)["causal"]
    check(impl, inputs, mask, scale=scale, deterministic=deterministic)


@by_mode
@pytest.mark.parametrize("which", ["out", "dout"])
def test_contiguous_rows_off_alignment(impl, which, deterministic):
    """What counts as contiguous may start where TMA cannot."""
    q, k, v, dout = make_qkv(1, 70, 70, 1, 1, 64, "float16")
    moved = cupy.empty(q.size + 1, q.dtype)[1:].reshape(q.shape)
    if which == "dout":
        moved[...] = dout
        dout = moved
    options = {"out": moved if which == "out" else None, "deterministic": deterministic}
    check(impl, (q, k, v, dout), gallery(70, 70)["causal"], **options)
