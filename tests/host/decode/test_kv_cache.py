"""KVCache: sharing, storage, and errors, none of which may change it."""

import contextlib
import copy
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from decode_cases import DTYPES
from kv_cases import HEADS, D, contents, tokens
from numpy.lib.stride_tricks import as_strided

import nbflash
from nbflash import kv_cache
from nbflash.kv_cache import KVCache
from nbflash.testing import make_qkv


def filled(pages=8, page_size=4, n=6, dtype=np.float32):
    """A cache with two sequences of n tokens."""
    cache = KVCache(pages, page_size, HEADS, D, dtype)
    sequences = cache.allocate(2)
    given = np.float16 if dtype == np.float16 else np.float32
    cache.append(sequences, *(x.astype(given) for x in tokens(2, n)))
    return cache, sequences


def test_a_fork_shares_full_pages_and_copies_the_last_one_on_writing():
    cache, (a, _) = filled()
    c = cache.fork(a)
    assert cache.block_table([c]).tolist() == cache.block_table([a]).tolist()
    before = cache.block_table([a])
    cache.append([c], *tokens(1, 1, first=50))
    after = cache.block_table([a, c])
    assert after[0].tolist() == before[0].tolist()
    assert (after[0] == after[1]).tolist() == [True, False]
    cache.free([a])
    assert np.array_equal(contents(cache, c)[0][:6], tokens(2, 6)[0][0])
    assert np.array_equal(contents(cache, c)[0][6:], tokens(1, 1, first=50)[0][0])


def test_an_append_of_no_tokens_takes_no_page_in_place_of_one_that_is_shared():
    cache, (a, _) = filled()
    c = cache.fork(a)
    before = cache.block_table([a, c]).tolist(), cache.free_pages
    cache.append([c], *tokens(1, 0))
    assert (cache.block_table([a, c]).tolist(), cache.free_pages) == before


def test_tables_are_where_the_kernels_of_a_device_read_them(monkeypatch):
    cache, sequences = filled()
    monkeypatch.setattr(kv_cache, "resident", lambda tables: [x.tolist() for x in tables])
    expected = cache.block_table(sequences), cache.lengths(sequences)
    cache._where = "cuda", 0
    found = cache.block_table(sequences), cache.lengths(sequences)
    assert found == tuple(x.tolist() for x in expected)


@pytest.mark.parametrize("dtype", [np.float16, np.int8, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_memory_of_its_own(copied, dtype):
    """What is appended to it arrives there, and nowhere else."""
    given = np.float16 if dtype == np.float16 else np.float32
    (expected, (a, _)), (cache, _) = filled(dtype=dtype), filled(dtype=dtype)
    other, before = copied(cache), contents(cache, a)
    for each in (expected, other):
        each.append([a], *(x.astype(given) for x in tokens(1, 1, first=50)))
    for wanted, of in ((contents(expected, a), other), (before, cache)):
        for found, x in zip(contents(of, a), wanted, strict=True):
            np.testing.assert_array_equal(found, x)


def test_forks_that_grow_together_copy_one_page_less_than_they_are():
    """Two free pages: the last of three forks keeps the page that the others copy."""
    cache, (a, b) = filled(pages=6)
    forks = [a, cache.fork(a), cache.fork(a)]
    cache.append(forks, *tokens(3, 2, first=60))
    assert cache.free_pages == 0
    for i, s in enumerate(forks):
        k, _ = contents(cache, s)
        assert np.array_equal(k, np.concatenate([tokens(2, 6)[0][0], tokens(3, 2, 60)[0][i]]))
    assert np.array_equal(contents(cache, b)[0], tokens(2, 6)[0][1])
    cache.free([*forks, b])
    assert cache.free_pages == 6


def test_rejected_drafts_leave_pages_to_others():
    """Of a fork: what it shares stays with the other, what it writes then is its own."""
    cache, (a, b) = filled()
    c = cache.fork(a)
    cache.append([c], *tokens(1, 6, first=50))
    assert cache.free_pages == 2
    cache.truncate(c, 8)
    assert cache.free_pages == 3
    cache.truncate(c, 3)
    assert cache.free_pages == 4
    assert cache.block_table([c]).tolist() == cache.block_table([a])[:, :1].tolist()
    cache.append([c], *tokens(1, 1, first=70))
    assert np.array_equal(contents(cache, a)[0], tokens(2, 6)[0][0])
    mine = [tokens(2, 6)[0][0][:3], tokens(1, 1, first=70)[0][0]]
    assert np.array_equal(contents(cache, c)[0], np.concatenate(mine))
    cache.truncate(b, 0)
    cache.truncate(b, 0)
    assert cache.lengths([a, b, c]).tolist() == [6, 0, 4]
    assert cache.free_pages == 5


def test_tables_for_decode():
    cache, (a, b) = filled()
    (empty,) = cache.allocate()
    table, lengths = cache.block_table([b, empty, a], width=3), cache.lengths([b, empty, a])
    assert table.tolist() == [[2, 3, -1], [-1, -1, -1], [0, 1, -1]]
    assert lengths.tolist() == [6, 0, 6]
    assert table.dtype == lengths.dtype == np.int32
    assert cache.block_table([]).shape == (0, 0)
    assert repr(cache) == "KVCache(8 pages of 4 tokens, 4 free, 3 sequences, float32, cpu)"


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_over_the_cache_is_decode_over_contiguous_memory(dtype):
    q, k, v, _ = make_qkv(2, 3, 21, 4, HEADS, 16, DTYPES[dtype])
    cache = KVCache(9, 4, HEADS, 16, DTYPES[dtype])
    a, b = cache.allocate(2)
    cache.append([a], k[:1, :9], v[:1, :9])
    cache.append([b], k[1:, :5], v[1:, :5])
    c = cache.fork(b)
    for i in range(5, 7):
        cache.append([c], k[1:, i : i + 1], v[1:, i : i + 1])
    ids = [a, c]
    lengths, table = cache.lengths(ids), cache.block_table(ids)
    got = nbflash.decode(q, cache.k, cache.v, lengths, block_table=table, return_lse=True)
    want = nbflash.decode(q, k, v, np.array([9, 7], np.int32), return_lse=True)
    assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


class Refusing(np.ndarray):
    """An array as CuPy 14.2 has float8: a view of another, but neither allocated nor copied."""

    def __new__(cls, shape, dtype):
        cls.refuse(dtype)
        return super().__new__(cls, shape, dtype)

    @staticmethod
    def refuse(dtype):
        if dtype.name.startswith("float8"):
            raise ValueError(f"Unsupported dtype {dtype}")

    def __setitem__(self, at, x):
        self.refuse(self.dtype)
        self.refuse(x.dtype)
        super().__setitem__(at, x)


def test_float8_is_held_as_what_cupy_allocates_and_copies(monkeypatch):
    expected, _ = filled(dtype="float8_e4m3fn")
    monkeypatch.setattr(kv_cache, "allocator", lambda *_: (Refusing, contextlib.nullcontext()))
    with pytest.raises(ValueError, match="Unsupported dtype float8_e4m3fn"):
        Refusing((2, 2), expected.dtype)
    cache, (a, b) = filled(dtype="float8_e4m3fn")
    for x in (cache, expected):
        x.append([x.fork(a), b], *tokens(2, 3, first=50))
    assert cache.k.dtype == cache.v.dtype == "float8_e4m3fn"
    for s in (a, b, 2):
        pairs = zip(contents(cache, s), contents(expected, s), strict=True)
        assert all(np.array_equal(*(x.view(np.uint8) for x in pair)) for pair in pairs)


def snapshot(cache):
    arrays = [x.tobytes() for x in cache._arrays]
    return dict(cache._sequences), list(cache._free), list(cache._holders), arrays


K, V = tokens(2, 3)
SHAPE = r"must have shape \(sequences, tokens, heads_kv, head_dim\) = \(2, tokens, 2, 3\), got"
APPEND = {
    "swapped": (
        {"k": tokens(2, 1)[0].astype(">f4")},
        TypeError,
        "k must have dtype float32, got >f4",
    ),
    "full": ({"k": tokens(2, 20)[0], "v": tokens(2, 20)[1]}, MemoryError, "needs 11 pages of 4"),
    "unknown": (
        {"sequences": [0, 9]},
        ValueError,
        "sequences must be allocated .* got 9; the cache holds 3",
    ),
    "twice": ({"sequences": [1, 1]}, ValueError, r"sequences must be distinct, got \[1, 1\]"),
    "number": ({"sequences": 0}, TypeError, "sequences must be a list of numbers, got 0"),
    "word": ({"sequences": "01"}, TypeError, "sequences must be a list of numbers, got '01'"),
    "flags": ({"sequences": [False, True]}, TypeError, "sequences must be an integer, got False"),
    "float": ({"sequences": [0.0, 1]}, TypeError, "sequences must be an integer, got 0.0"),
    "negative": ({"sequences": [-1, 1]}, ValueError, "sequences must be at least 0, got -1"),
    "k-list": ({"k": [1.0]}, TypeError, "k must be a NumPy or CuPy array, .* got list"),
    "k-axes": ({"k": K[0]}, ValueError, rf"k {SHAPE} \(3, 2, 3\)"),
    "v-heads": ({"v": V[:, :, :1]}, ValueError, rf"v {SHAPE} \(2, 3, 1, 3\)"),
    "v-sequences": ({"v": V[:1]}, ValueError, rf"v {SHAPE} \(1, 3, 2, 3\)"),
    "v-tokens": ({"v": V[:, :2]}, ValueError, r"v must have the shape of k, .* \(2, 2, 2, 3\)"),
    "k-dtype": (
        {"k": K.astype(np.float64)},
        TypeError,
        "k must have dtype float32, got float64",
    ),
}


@pytest.mark.parametrize(("changed", "error", "match"), APPEND.values(), ids=APPEND)
def test_append_refuses_and_changes_nothing(changed, error, match):
    cache, ids = filled()
    cache.fork(ids[0])
    before = snapshot(cache)
    with pytest.raises(error, match=match):
        cache.append(**{"sequences": ids, "k": K, "v": V} | changed)
    assert snapshot(cache) == before


def test_integers_are_refused_by_a_quantised_cache():
    cache, ids = filled(dtype=np.int8)
    with pytest.raises(TypeError, match=r"k must have dtype float16, .* got int8"):
        cache.append(ids, K.astype(np.int8), V)


def test_tokens_on_another_device_are_refused():
    cache, ids = filled()
    cache._where = ("cuda", 1)
    match = r"k must be on the cache's device \('cuda', 1\), got \('cpu', 0\)"
    with pytest.raises(ValueError, match=match):
        cache.append(ids, K, V)


class Lost:
    """Tokens that cannot be read."""

    def view(self, dtype):
        raise RuntimeError("device lost")


def test_a_failure_while_writing_loses_nothing(monkeypatch):
    """The keys are there, in pages of the sequences' own; then the memory fails."""
    cache, (a, b) = filled()
    c = cache.fork(a)
    cache.truncate(c, 5)  # the last to be named, and not the longest that holds the page
    before, texts = snapshot(cache)[:3], [contents(cache, s) for s in (a, b, c)]
    monkeypatch.setattr(KVCache, "_stored", lambda self, k, v: (k, Lost()))
    with pytest.raises(RuntimeError, match="device lost"):
        cache.append([a, b, c], *tokens(3, 3, first=90))
    assert snapshot(cache)[:3] == before
    assert all(map(np.array_equal, texts, (contents(cache, s) for s in (a, b, c))))


def test_out_is_written_and_returned():
    cache, ids = filled()
    lengths, table = np.full((2, 4), 7, np.int32)[:, ::2][:, 0], np.full((2, 5), 7, np.int32)
    assert cache.lengths(ids, out=lengths) is lengths
    assert cache.block_table(ids, out=table) is table
    assert lengths.tolist() == cache.lengths(ids).tolist()
    assert table.tolist() == cache.block_table(ids, 5).tolist()


USES = {
    "fork": (
        lambda c: c.fork(7),
        ValueError,
        "sequence must be allocated .* got 7; the cache holds 2 sequences",
    ),
    "fork-list": (lambda c: c.fork([0, 1]), TypeError, r"sequence must be an integer, got \[0, 1"),
    "truncate": (lambda c: c.truncate(7, 0), ValueError, "sequence must be allocated .* got 7"),
    "truncate-list": (lambda c: c.truncate([0], 0), TypeError, "sequence must be an integer"),
    "longer": (lambda c: c.truncate(1, 7), ValueError, "length must be at most 6, .* 1, got 7"),
    "length": (lambda c: c.truncate(1, -1), ValueError, "length must be at least 0, got -1"),
    "length-float": (lambda c: c.truncate(1, 2.0), TypeError, "length must be an integer"),
    "free": (lambda c: c.free([0, 7, 9]), ValueError, "sequences must be allocated .* got 7"),
    "free-twice": (lambda c: c.free([0, 0]), ValueError, "sequences must be distinct"),
    "lengths": (lambda c: c.lengths([7]), ValueError, "sequences must be allocated"),
    "table": (lambda c: c.block_table([7]), ValueError, "sequences must be allocated"),
    "width": (lambda c: c.block_table([0], 1), ValueError, "width must be at least 2, .* got 1"),
    "width-float": (lambda c: c.block_table([0], 2.0), TypeError, "width must be an integer"),
    "out-shape": (
        lambda c: c.lengths([0], out=np.empty(2, np.int32)),
        ValueError,
        r"out must be int32 \(1,\) on \('cpu', 0\), got int32 \(2,\)",
    ),
    "out-dtype": (
        lambda c: c.block_table([0], out=np.empty((1, 3))),
        ValueError,
        r"out must be int32 \(1, 3\) .* got float64 \(1, 3\)",
    ),
    "out-narrow": (
        lambda c: c.block_table([0], out=np.empty((1, 1), np.int32)),
        ValueError,
        r"out must be int32 \(1, 2\) .* got int32 \(1, 1\)",
    ),
    "out-number": (lambda c: c.block_table([0], out=5), TypeError, "out must be a NumPy or CuPy"),
    "out-read-only": (
        lambda c: c.lengths([0], out=np.broadcast_to(np.int32(0), 1)),
        ValueError,
        "out must be writeable, got a read-only array",
    ),
    "out-overlapping": (
        lambda c: c.block_table([0], out=as_strided(np.zeros(1, np.int32), (1, 2), (8, 0))),
        ValueError,
        r"out must not overlap itself, got strides \(8, 0\)",
    ),
    "out-list": (lambda c: c.lengths([0], out=[0]), TypeError, "out must be a NumPy or CuPy array"),
    "no-list": (lambda c: c.free(np.array(0)), TypeError, "sequences must be a list of numbers"),
    "count": (lambda c: c.allocate(0), ValueError, "count must be at least 1, got 0"),
}


@pytest.mark.parametrize(("use", "error", "match"), USES.values(), ids=USES)
def test_methods_refuse_and_change_nothing(use, error, match):
    cache, _ = filled()
    before = snapshot(cache)
    with pytest.raises(error, match=match):
        use(cache)
    assert snapshot(cache) == before


def test_a_freed_sequence_is_unknown():
    cache, (a, _) = filled()
    cache.free([a])
    with pytest.raises(
        ValueError, match=r"sequences must be allocated and .*got 0; .* holds 1 sequence$"
    ):
        cache.lengths([a])
    assert cache.allocate() == [2]


NEW = {
    "pages": ({"pages": 0}, ValueError, "pages must be at least 1, got 0"),
    "pages-array": ({"pages": np.ones(2, int)}, TypeError, "pages must be an integer, got array"),
    "too-many": ({"pages": 10**30}, ValueError, "pages must be at most 2147483647, got 10000"),
    "page-size": ({"page_size": 1.5}, TypeError, "page_size must be an integer, got 1.5"),
    "heads": ({"heads_kv": True}, TypeError, "heads_kv must be an integer, got True"),
    "head-dim": ({"head_dim": 257}, ValueError, "head_dim must be 1 to 256, got 257"),
    "no-head-dim": ({"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
    "dtype": ({"dtype": np.int16}, TypeError, "dtype must be one of float16, .* got int16"),
    "dtype-word": ({"dtype": "half4"}, TypeError, "dtype must be one of float16, .* got 'half4'"),
    "byte-order": (
        {"dtype": np.dtype(np.float32).newbyteorder()},
        TypeError,
        "dtype must be one of float16",
    ),
    "dtype-none": ({"dtype": None}, TypeError, "dtype must be one of float16, .* got None"),
    "no-device": ({"device_id": -1}, ValueError, "device_id must be at least 0, got -1"),
    "device-id": ({"device_id": "a"}, TypeError, "device_id must be an integer, got 'a'"),
    "device-array": ({"device": np.ones(2)}, ValueError, "device must be 'cpu' or 'cuda'"),
    "dtype-array": ({"dtype": np.ones(2)}, TypeError, "dtype must be one of float16"),
    "device": ({"device": "gpu"}, ValueError, "device must be 'cpu' or 'cuda', got 'gpu'"),
}


@pytest.mark.parametrize(("changed", "error", "match"), NEW.values(), ids=NEW)
def test_a_cache_refuses(changed, error, match):
    with pytest.raises(error, match=match):
        KVCache(**{"pages": 4, "page_size": 4, "heads_kv": 2, "head_dim": 3} | changed)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_names_that_numpy_does_not_know_yet(name):
    code = f"""
import sys
from nbflash import KVCache
assert "ml_dtypes" not in sys.modules
print(KVCache(2, 4, 1, 8, {name!r}).dtype.name)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == (f"{name}\n", "")


def test_what_a_cache_is_unless_told_otherwise():
    cache = KVCache(5, 4, 2, 256)
    assert cache.k.shape == cache.v.shape == (5, 4, 2, 256)
    assert cache.k.dtype == cache.v.dtype == cache.dtype == np.float16
    assert repr(cache) == ("KVCache(5 pages of 4 tokens, 5 free, 0 sequences, float16, cpu)")
    assert (cache.allocate(), cache.allocate(2), cache.free_pages) == ([0], [1, 2], 5)
    assert cache.block_table([]).shape == (0, 0)
    assert cache.lengths([]).shape == (0,)


def test_the_number_of_a_device_is_of_cuda_devices():
    cache = KVCache(5, 4, HEADS, D, np.float32, device_id=3)
    cache.append(cache.allocate(), *tokens(1, 3))
    assert cache.lengths([0]).tolist() == [3]


def test_an_append_without_room_says_how_much_is_missing():
    cache, (a, b) = filled()
    c = cache.fork(a)
    cache.append([b], *tokens(1, 11, first=90))
    message = (
        "append of 3 tokens to 3 sequences needs 3 pages of 4 tokens, 1 of 8 are free; nothing was "
        "changed: free sequences first, or make a cache of more pages"
    )
    with pytest.raises(MemoryError, match=f"^{message}$"):
        cache.append([a, b, c], *tokens(3, 3))
