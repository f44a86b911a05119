"""KVCache in CUDA memory holds what it holds in host memory."""

import cupy
import ml_dtypes
import numpy as np
import pytest

import nbflash
from nbflash.testing import assert_within_reference, make_qkv


def filled(device, dtype, source):
    """A cache after appends, a fork that copies and a free, and the sequences left."""
    move = cupy.asarray if device == "cuda" else np.asarray
    _, k, v, _ = make_qkv(3, 1, 9, 2, 2, 8, source)
    k[0, 1] = 0
    cache = nbflash.KVCache(12, 4, 2, 8, dtype, device=device)
    a, b = cache.allocate(2)
    cache.append([a, b], move(k[:2, :6]), move(v[:2, :6]))
    c = cache.fork(a)
    cache.append([c, b], move(k[1:, 6:]), move(v[1:, 6:]))
    cache.free([a])
    return cache, [b, c]


@pytest.mark.parametrize(
    ("dtype", "source"),
    [
        (np.float16, np.float16),
        ("bfloat16", ml_dtypes.bfloat16),
        (np.float32, np.float32),
        (np.int8, np.float32),
        ("float8_e4m3fn", np.float32),
    ],
    ids=["f16", "bf16", "f32", "int8", "e4m3"],
)
def test_the_same_as_in_host_memory(dtype, source):
    (cache, ids), (host, _) = (filled(device, dtype, source) for device in ("cuda", "cpu"))
    table, lengths = cache.block_table(ids), cache.lengths(ids)
    assert isinstance(table, cupy.ndarray)
    assert (table.dtype, lengths.dtype) == (np.int32, np.int32)
    assert lengths.get().tolist() == host.lengths(ids).tolist() == [9, 9]
    assert table.get().tolist() == host.block_table(ids).tolist()
    again = cupy.empty_like(lengths), cupy.empty_like(table)
    assert cache.lengths(ids, out=again[0]) is again[0]
    assert cache.block_table(ids, out=again[1]) is again[1]
    assert [x.get().tolist() for x in again] == [x.get().tolist() for x in (lengths, table)]
    for got, want in zip(cache._arrays, host._arrays, strict=True):
        rows = [x[table.get()].reshape(2, 12, -1)[:, :9] for x in (got.get(), want)]
        assert rows[0].tobytes() == rows[1].tobytes()


def test_decode_reads_it():
    (cache, ids), (host, _) = (filled(x, np.float32, np.float32) for x in ("cuda", "cpu"))
    q, _, _, _ = make_qkv(2, 1, 1, 4, 2, 8)
    got, low = (
        nbflash.decode(x, c.k, c.v, c.lengths(ids), block_table=c.block_table(ids))
        for x, c in ((cupy.asarray(q), cache), (q, host))
    )
    with np.errstate(invalid="ignore"):  # rows without a token may hold anything
        wide = [x.astype(np.float64) for x in (q, host.k, host.v)]
    ref = nbflash.decode(*wide, host.lengths(ids), block_table=host.block_table(ids))
    assert_within_reference(got.get(), ref, low)


def test_host_tokens_are_refused_by_a_cache_in_cuda_memory():
    cache, ids = filled("cuda", np.float32, np.float32)
    k = np.zeros((2, 1, 2, 8), np.float32)
    with pytest.raises(ValueError, match=r"k must be on the cache's device .*cuda.* got .*cpu"):
        cache.append(ids, k, k)
