"""The CPU kernels against the float64 reference: every tile kind, layout, dtype and hazard.

Tiles are given explicitly and small, so that a few dozen tokens make several tiles and a ragged
one, and so that every grid holds sequences shorter than one tile.
"""

import functools

import ml_dtypes
import numba
import numpy as np
import poisoned_rows
import pytest

import masks
from masks.tiles import INTERVAL
from nbflash import reference
from nbflash.backends.cpu import blas, kernels, sizes, softmax
from nbflash.backends.cpu import passes as cpu
from nbflash.schedule.tile_schedule import TileSchedule
from nbflash.testing import (
    assert_blocks_within_reference,
    assert_within_reference,
    code_word_oracle,
    low_precision,
    low_precision_backward,
    make_qkv,
    mask_gallery,
    poisoned,
)

T = 16
LENGTHS = (1, 2, T - 1, T, T + 1, 2 * T - 1, 2 * T + 1)
DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
NAMES = tuple(mask_gallery(8))
gallery = functools.cache(mask_gallery)


def run(mask, q, k, v, dout, tile=(T, T), scale=None, outputs=None):
    """out, lse, dq, dk, dv on poisoned outputs; ``lse`` in the working precision."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    schedule = TileSchedule.from_mask(mask, *tile)
    real = np.float64 if q.dtype == np.float64 else np.float32
    lse = poisoned((q.shape[0], q.shape[2], q.shape[1]), real)
    out, dq, dk, dv = outputs or (poisoned(x.shape, x.dtype) for x in (q, q, k, v))
    cpu.forward(q, k, v, out, lse, schedule, scale)
    cpu.backward(dout, q, k, v, out, lse, np.zeros_like(lse), dq, dk, dv, schedule, scale)
    return out, lse, dq, dk, dv


def expected(mask, q, k, v, dout, scale=None):
    """The float64 reference and the plain computation in q's dtype, of the same five arrays."""
    ref = reference.attention(q, k, v, mask, scale)
    ref += reference.attention_backward(dout, q, k, v, mask, scale)
    low = low_precision(q, k, v, mask, scale)
    low += low_precision_backward(dout, q, k, v, mask, scale)
    return ref, low


def check(mask, q, k, v, dout, tile=(T, T), scale=None):
    got = run(mask, q, k, v, dout, tile, scale)
    ref, low = expected(mask, q, k, v, dout, scale)
    for name, *results in zip(("out", "lse", "dq", "dk", "dv"), got, ref, low, strict=True):
        assert_within_reference(*results, name=name)
    return got


def same_bits(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("shape", [(1, 1), (T - 1, T + 1), (2 * T, 2 * T), (53, 23), (23, 53)])
@pytest.mark.parametrize("name", NAMES)
def test_every_pattern(name, shape):
    """All patterns, kinds and planes; nq != nk both ways; dead rows, keys, heads and batches."""
    check(gallery(*shape, heads=4)[name], *make_qkv(2, *shape, 4, 2, 8))


@pytest.mark.parametrize("tile", [(T, T), (8, 32), (48, 8)], ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize("name", ["dense", "causal", "checkerboard"])
@pytest.mark.parametrize("n", LENGTHS)
def test_lengths_around_the_tile(n, name, tile):
    check(gallery(n)[name], *make_qkv(2, n, n, 2, 2, 8), tile=tile)


@pytest.mark.parametrize("name", ["dense", "butterfly-or-local-causal", "dead-scattered", "sinks"])
def test_rows_longer_than_a_chunk(name, monkeypatch):
    """The online softmax and the sums across chunks, with one tile and with three to a chunk."""
    inputs = make_qkv(1, 150, 170, 2, 1, 8)
    for chunk in (T, 3 * T):
        monkeypatch.setattr(cpu, "CHUNK", chunk)
        check(gallery(150, 170)[name], *inputs)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ["causal", "dead-scattered", "per-head"])
def test_grouped_heads(ratio, name):
    mask = mask_gallery(37, 29, heads=2 * ratio)[name]
    check(mask, *make_qkv(2, 37, 29, 2 * ratio, 2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 3, 40, 64, 256])
@pytest.mark.parametrize("name", ["documents-causal", "tree", "per-batch-per-head"])
def test_dtypes_and_head_dims(name, head_dim, dtype):
    inputs = make_qkv(2, 35, 35, 2, 2, head_dim, DTYPES[dtype])
    got = check(gallery(35)[name], *inputs)
    assert [x.dtype for x in got if x.ndim == 4] == [DTYPES[dtype]] * 4


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_scale(scale, dtype):
    check(gallery(33)["causal"], *make_qkv(1, 33, 33, 2, 2, 8, DTYPES[dtype]), scale=scale)


@pytest.mark.parametrize("name", ["causal", "strided", "documents", "butterfly"])
def test_every_block_of_every_result(name):
    """Each block is held to its own budget, so no tile can hide behind a larger one."""
    mask, inputs = gallery(67, 59)[name], make_qkv(1, 67, 59, 2, 2, 16)
    ref, low = expected(mask, *inputs)
    for i, got in enumerate(run(mask, *inputs)):
        axis = 2 if i == 1 else 1
        assert_blocks_within_reference(got, ref[i], low[i], T, name=f"result {i}", axis=axis)


@pytest.mark.parametrize("name", ["causal", "dead-first", "dead-last", "dead-scattered", "empty"])
def test_rows_and_keys_without_partners(name):
    mask = gallery(53, 23)[name]
    out, lse, dq, dk, dv = run(mask, *make_qkv(1, 53, 23, 2, 2, 8))
    dead_rows, dead_keys = ~mask.dense().any(axis=1), ~mask.dense().any(axis=0)
    assert dead_rows.any()
    assert np.all(np.isneginf(lse[..., dead_rows]))
    for x, dead in ((out, dead_rows), (dq, dead_rows), (dk, dead_keys), (dv, dead_keys)):
        assert not x[:, dead].any()


LAYOUTS = {
    "heads-outside": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "batch-inside": lambda x: np.ascontiguousarray(np.moveaxis(x, 0, 2)).transpose(2, 0, 1, 3),
    "padded-rows": lambda x: np.pad(x, ((0, 0), (0, 0), (0, 0), (3, 5)))[..., 3:-5],
    "every-other-token": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "backwards": lambda x: x[:, ::-1].copy()[:, ::-1],
    "unit-stride-tokens": lambda x: np.ascontiguousarray(np.moveaxis(x, 1, 3)).transpose(
        0, 3, 1, 2
    ),
    "misaligned": lambda x: np.frombuffer(
        bytearray(b"\0" + x.tobytes()), x.dtype, offset=1
    ).reshape(x.shape),
    "odd-byte-strides": lambda x: np.pad(x.view(np.uint8), ((0, 0),) * 3 + ((0, 2),))[
        ..., :-2
    ].view(x.dtype),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f16", "f32", "f64"])
def test_layouts_of_inputs_and_outputs(layout, dtype):
    """Any strides give the bits of the contiguous arrays, and gaps stay untouched."""
    mask, move = gallery(37)["butterfly-or-local-causal"], LAYOUTS[layout]
    inputs = make_qkv(2, 37, 37, 2, 2, 24, DTYPES[dtype])
    plain = run(mask, *inputs)
    outputs = [move(poisoned(x.shape, x.dtype)) for x in (inputs[0], *inputs[:3])]
    assert same_bits(run(mask, *map(move, inputs), outputs=outputs), plain)


def test_broadcast_and_read_only_inputs():
    mask = gallery(37)["causal"]
    inputs = [np.broadcast_to(x[:1, :, :1], (2, 37, 4, 8)) for x in make_qkv(2, 37, 37, 4, 4, 8)]
    assert not inputs[0].flags.writeable
    assert same_bits(run(mask, *inputs), run(mask, *map(np.array, inputs)))


@pytest.mark.parametrize("limit", [24, 2**31 - 1])
def test_row_strides_beyond_32_bits_are_copied(limit, monkeypatch):
    """The limit itself would take 8 GiB; 48 elements stand for it."""
    mask, inputs = gallery(37)["causal"], make_qkv(2, 37, 37, 2, 2, 24)
    plain = run(mask, *inputs)
    monkeypatch.setattr(cpu, "MAX_ROW_STRIDE", limit)
    assert cpu._addressable(np.float32, inputs[0]) == (limit > 48)
    assert same_bits(run(mask, *inputs), plain)


def test_repeated_tokens_of_stride_zero():
    mask = gallery(37)["causal"]
    inputs = [np.broadcast_to(x[:, :1], (1, 37, 2, 8)) for x in make_qkv(1, 37, 37, 2, 2, 8)]
    assert same_bits(run(mask, *inputs), run(mask, *map(np.array, inputs)))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["padding", "window", "dead-keys", "dead-scattered", "butterfly"])
def test_masked_keys_never_reach_the_result(name, poison):
    """One key is poisoned: rows that do not attend it keep their bits' worth of accuracy."""
    mask, (q, k, v, dout) = gallery(53)[name], make_qkv(2, 53, 53, 2, 2, 8)
    keep = np.broadcast_to(mask.dense(), (2, 2, 53, 53))
    bad = int(np.argmin(keep.sum(axis=(0, 1, 2)) + np.arange(53) % 7))
    hit = keep[..., bad].any(axis=1).any(axis=0)
    k[:, bad], v[:, bad] = poison, poison
    out, lse, dq, _, _ = run(mask, q, k, v, dout)
    clean_k, clean_v = (np.where(np.isfinite(x), x, 0) for x in (k, v))
    ref, low = expected(mask, q, clean_k, clean_v, dout)
    for i, x in ((0, out), (2, dq)):
        assert_within_reference(x[:, ~hit], ref[i][:, ~hit], low[i][:, ~hit], name=f"result {i}")
    assert_within_reference(lse[..., ~hit], ref[1][..., ~hit], low[1][..., ~hit], name="lse")


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("tile", [(T, T), (8, 32)], ids=lambda t: f"{t[0]}x{t[1]}")
def test_poisoned_padding_of_keys_and_queries(poison, tile):
    """Garbage in rows and keys that the mask never uses changes no result or gradient."""
    n, used = 53, 29
    mask = masks.from_function(lambda q, kv: (q < used) & (kv < used) & (kv <= q), n, n)
    clean = make_qkv(1, n, n, 2, 2, 8)
    for x in clean:
        x[:, used:] = 0
    dirty = [x.copy() for x in clean]
    for x in dirty:
        x[:, used:] = poison
    ref, low = expected(mask, *clean)
    for i, got in enumerate(run(mask, *dirty, tile=tile)):
        assert_within_reference(got, ref[i], low[i], name=f"result {i}")


@pytest.mark.parametrize("tile", [(T, T), (8, 32)], ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize("name", poisoned_rows.MASKS)
@pytest.mark.parametrize("which", poisoned_rows.INPUTS)
def test_one_row_of_nan(which, name, tile):
    """A row whose scores are all NaN shows it, and what does not meet it does not."""
    mask, inputs = gallery(53)[name], make_qkv(1, 53, 53, 2, 2, 8)
    one = functools.partial(run, mask, tile=tile)
    poisoned_rows.check(one, mask, inputs, which, 30)


@pytest.mark.parametrize("shift", [120.0, -120.0, 1000.0, -1000.0])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", ["dense", "dead-scattered"])
def test_shifted_logits(shift, dtype, name):
    """All scores of a row move by the same amount, far outside the range of exp."""
    q, k, v, dout = make_qkv(1, 41, 41, 2, 2, 16, DTYPES[dtype])
    q[..., 0], k[..., 0] = 1, 4 * shift
    check(gallery(41)[name], q, k, v, dout)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("name", ["dense", "butterfly", "checkerboard", "causal"])
def test_saturated_softmax_is_exact(name, dtype):
    mask = gallery(40)[name]
    words = code_word_oracle(40, 8, mask=mask, dtype=DTYPES[dtype])
    out, lse, dq, dk, dv = run(mask, words.q, words.k, words.v, words.dout, scale=words.scale)
    assert np.array_equal(out, words.out)
    assert np.array_equal(lse, words.lse.astype(np.float32))
    assert not dq.any()
    assert not dk.any()
    assert np.array_equal(dv, words.dv)


@pytest.mark.parametrize("name", ["dense", "dead-scattered", "butterfly-causal", "per-head"])
@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64"])
def test_bits_do_not_depend_on_the_run_or_the_threads(name, dtype, monkeypatch):
    mask, inputs = gallery(83, heads=4)[name], make_qkv(2, 83, 83, 4, 2, 16, DTYPES[dtype])
    first = run(mask, *inputs)
    for threads in (1, 2, 3, 5, 5, 5):
        monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", threads)
        assert same_bits(run(mask, *inputs), first)


def test_batch_element_does_not_depend_on_its_batch():
    inputs = make_qkv(3, 47, 47, 2, 1, 16)
    mask = gallery(47)["causal"]
    whole = run(mask, *inputs)
    for b in range(3):
        alone = run(mask, *(x[b : b + 1] for x in inputs))
        assert same_bits(alone, [x[b : b + 1].copy() for x in whole])


def test_lse_of_other_keys_gives_their_share_of_the_gradients():
    """With the LSE of all keys, gradients over two key sets add up to those of all keys."""
    q, k, v, dout = make_qkv(1, 33, 33, 1, 1, 8, np.float64)
    halves = [
        masks.from_function(lambda q, kv, s=s: (kv % 2 == s) & (q >= 0), 33, 33) for s in (0, 1)
    ]
    whole = masks.dense(33, 33)
    out, lse, dq, dk, dv = run(whole, q, k, v, dout)
    total = [np.zeros_like(x) for x in (dq, dk, dv)]
    for half in halves:
        part = [poisoned(x.shape, x.dtype) for x in (dq, dk, dv)]
        schedule = TileSchedule.from_mask(half, T, T)
        cpu.backward(dout, q, k, v, out, lse, np.zeros_like(lse), *part, schedule, 8**-0.5)
        total = [a + b for a, b in zip(total, part, strict=True)]
    ref, low = expected(whole, q, k, v, dout)
    for got, r, w in zip(total, ref[2:], low[2:], strict=True):
        assert_within_reference(got, r, w)


@numba.njit
def _exp2_of(x):
    y = np.empty_like(x)
    for i in range(x.size):
        y[i] = softmax.exp2(x[i])
    return y


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_exp2_polynomial(real):
    """Within two units in the last place, and the corners that the kernels rely on."""
    lowest = np.finfo(real).minexp
    x = np.concatenate([np.linspace(lowest, 0, 40_001), -np.logspace(-9, 0, 999)]).astype(real)
    exact = np.exp2(x.astype(np.longdouble))
    error = np.abs(_exp2_of(x) - exact) / np.spacing(exact.astype(real))
    assert error.max() <= 2
    corners = _exp2_of(np.array([0, -1, lowest - 1, -1e6, -np.inf, np.nan], real))
    assert corners[:5].tolist() == [1, 0.5, 0, 0, 0]
    assert np.isnan(corners[5])


def test_kernels_compile_where_no_cache_can_be_written():
    """A function without a source file has no cache directory either."""
    namespace = {}
    exec("def kernel(x):\n    return x + 1", namespace)
    assert kernels.compiled(namespace["kernel"])(1) == 2


def test_blas_is_described():
    name, *advice = blas.describe()
    assert "OpenBLAS" in name
    assert all("OPENBLAS_CORETYPE" in line for line in advice)


def test_blas_threads_are_restored():
    assert blas.thread_functions is not None
    _, get = blas.thread_functions
    before = get()
    with blas.one_thread(), blas.one_thread():
        assert get() == 1
    assert get() == before


def test_blas_threads_are_restored_after_an_error():
    _, get = blas.thread_functions
    before = get()
    with pytest.raises(ZeroDivisionError), blas.one_thread():
        _ = 1 // (get() - 1)
    assert get() == before


@pytest.mark.parametrize("name", NAMES)
def test_default_tile_sizes_fit_every_mask(name):
    mask = gallery(140)[name]
    tile = cpu.tile_sizes(16, mask)
    assert set(tile) <= {32, 64, 128}
    check(mask, *make_qkv(2, 140, 140, 2, 2, 16), tile=tile)


@pytest.mark.parametrize(
    ("mask", "size"),
    [
        (masks.dense(512, 512), 128),
        (masks.causal(1024, 1024), 128),
        (masks.window(1024, 1024, left=16, right=0), 32),
        (masks.butterfly(1024, block=128), 128),
        (masks.butterfly(1024, block=64), 64),
        (masks.butterfly(1024, block=32), 32),
        (masks.per_head([masks.random(512, 32, 0.1, seed=s) for s in range(2)]), 32),
        (masks.from_function(lambda q, kv: (q + kv) % 2 == 0, 256, 256), 128),
    ],
    ids=lambda x: str(x) if isinstance(x, int) else None,
)
def test_tiles_follow_the_pattern(mask, size):
    assert cpu.tile_sizes(64, mask) == (size, size)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("name", NAMES)
def test_live_tiles_are_counted_inside_larger_ones(name, size):
    """Never fewer than there are; exact for patterns of blocks and bits."""
    n = 3 * sizes.LARGEST
    for plane in gallery(n)[name].planes:
        tiles, exact = plane.tiles(sizes.LARGEST, sizes.LARGEST), plane.tiles(size, size).kinds.nnz
        counted = sizes._live(tiles, size)
        assert exact <= counted
        if not (tiles.kinds.data == INTERVAL).any():
            assert counted == exact


@pytest.mark.parametrize("mask", [masks.causal(384, 300), masks.window(384, left=40, right=9)])
def test_live_tiles_of_intervals_are_those_between_their_bounds(mask):
    """Rows without keys have none."""
    n, keys = sizes.LARGEST, mask.shape[1]
    tiles, dense = mask.tiles(n, n), mask.dense()
    for size in (32, 64, 128):
        count = n * n // size**2 * int((tiles.kinds.data != INTERVAL).sum())
        for row, col in zip(*(tiles.kinds.tocoo().coords), strict=True):
            if tiles.kinds[row, col] == INTERVAL:
                for first in range(row * n, (row + 1) * n, size):
                    seen = np.flatnonzero(dense[first : first + size].any(axis=0))
                    there = seen[(seen >= col * n) & (seen < min((col + 1) * n, keys))]
                    count += len(set(there // size))
        assert sizes._live(tiles, size) == count
