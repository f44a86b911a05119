"""decode of sequences whose keys are spread over ranks."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import masks
import nbflash
from nbflash import distributed, reference
from nbflash.distributed import run
from nbflash.testing import assert_within_reference, low_precision

HEADS, HEADS_KV, D = 4, 2, 16
LENGTHS = np.array([97, 5, 0], np.int32)


def caches(q_len, lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (len(lengths), q_len, HEADS, D), *((len(lengths), 100, HEADS_KV, D),) * 2
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def parts_of(ranks, newest, q_len, lengths=LENGTHS):
    """Which keys of each sequence each rank has: by chance, but the last ones on one rank."""
    rng, parts = np.random.default_rng(ranks), [[] for _ in range(ranks)]
    for n in lengths:
        owner = rng.integers(ranks, size=n)
        owner[max(0, n - q_len) :] = newest
        for rank in range(ranks):
            parts[rank].append(np.flatnonzero(owner == rank))
    return parts


def on_rank(comm, q, k, v, parts, options):
    """Its keys at the front of caches that hold NaN behind them."""
    own = [np.full_like(x, np.nan) for x in (k, v)]
    for b, keys in enumerate(parts[comm.rank]):
        for cache, x in zip(own, (k, v), strict=True):
            cache[b, : keys.size] = x[b, keys]
    lengths = np.array([keys.size for keys in parts[comm.rank]], np.int32)
    return distributed.decode(q, *own, lengths, comm, return_lse=True, **options)


@pytest.mark.parametrize(
    ("ranks", "q_len", "newest"), [(1, 3, None), (2, 1, None), (3, 4, 0), (4, 4, None), (7, 2, 5)]
)
def test_result_is_that_of_one_process_and_the_same_on_all_ranks(ranks, q_len, newest):
    q, k, v = caches(q_len)
    holder = ranks - 1 if newest is None else newest
    parts = parts_of(ranks, holder, q_len)
    results = run(on_rank, ranks, q, k, v, parts, {"newest": newest}, timeout=20)
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])
    for b, n in enumerate(LENGTHS):
        given = q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], masks.causal(q_len, int(n))
        pairs = zip(results[0], reference.attention(*given), low_precision(*given), strict=True)
        for got, ref, low in pairs:
            assert_within_reference(got[b : b + 1], ref, low)


def test_a_mask_of_the_own_keys():
    """A window: each rank restricts the mask of the whole sequence to its keys."""
    q, k, v = caches(1, np.array([97]))
    parts, whole = parts_of(3, 2, 1, [97]), masks.window(1, 97, left=50, right=0)

    def rank(comm):
        keys = parts[comm.rank][0]
        own = masks.restrict(whole, kv_idx=keys)
        lengths = np.array([keys.size])
        return distributed.decode(q, k[:, keys], v[:, keys], lengths, comm, mask=own)

    expected = nbflash.decode(q, k[:, :97], v[:, :97], [97], mask=whole)
    for out in run(rank, 3, timeout=20):
        np.testing.assert_allclose(out, expected, atol=4 * np.abs(expected).max() * 2**-23)


def test_pages():
    q, k, v = caches(2, np.array([97]))
    pages = [x.reshape(10, 10, HEADS_KV, D) for x in (k, v)]

    def rank(comm):
        table = np.array([[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]], np.int32)[comm.rank : comm.rank + 1]
        length = np.array([50, 47], np.int32)[comm.rank : comm.rank + 1]
        return distributed.decode(q, *pages, length, comm, block_table=table)

    expected = nbflash.decode(q, k, v, [97])
    for out in run(rank, 2, timeout=20):
        np.testing.assert_allclose(out, expected, atol=4 * np.abs(expected).max() * 2**-23)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"newest": 1}, ValueError, "newest must be a rank below 1, got 1"),
        ({"newest": "last"}, TypeError, "newest must be a rank, got 'last'"),
        ({"return_lse": 1}, TypeError, "return_lse must be True or False, got 1"),
        ({"scale": "x"}, TypeError, "scale must be a real number"),
        ({"window": (31, 0)}, TypeError, "got window: a rank does not know the positions"),
        ({"score": nbflash.scores.softcap(30.0)}, TypeError, "got score: a rank does not know"),
    ],
)
def test_what_is_refused(change, error, match):
    q, k, v = caches(1)
    with pytest.raises(error, match=match):
        run(lambda comm: distributed.decode(q, k, v, LENGTHS, comm, **change), 1)


def test_queries_of_another_shape_are_an_error_on_all_ranks():
    q, k, v = caches(2)

    def rank(comm):
        with pytest.raises(ValueError, match=r"q differs between ranks: rank 0: \[3, 2, 4, 16\]"):
            distributed.decode(q[:, comm.rank :], k, v, LENGTHS, comm)
        return "told"

    assert run(rank, 2, timeout=20) == ["told", "told"]


def test_numbers_of_any_library():
    """What ranks compare is JSON, which has no numbers of NumPy's."""
    q, k, v = caches(1)
    sharding = distributed.Sharding.of(masks.dense(8), 2, 4)
    x = np.arange(16.0).reshape(2, 8)

    def rank(comm):
        given = q, k, v, LENGTHS, comm
        own = [distributed.decode(*given, scale=scale, newest=np.int64(0)) for scale in scales]
        part = distributed.scatter(x, sharding, comm.rank, axis=np.int64(1))
        return own, distributed.gather(part, sharding, comm, axis=np.int64(1))

    scales = 0.5, np.float32(0.5), Fraction(1, 2)
    for (expected, *others), whole in run(rank, 2, timeout=20):
        for out in others:
            np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(whole, x)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_parts_of_half_precision_are_rounded_once_more(dtype):
    """However often they are merged."""
    q, k, v = (x.astype(dtype) for x in caches(1, np.array([97])))
    given = [(q, k[:, 24 * r : 24 * r + 24], v[:, 24 * r : 24 * r + 24], [24]) for r in range(4)]
    one, two, three, four = (
        (out.astype(np.float32), lse)
        for out, lse in (nbflash.decode(*own, return_lse=True) for own in given)
    )
    whole, _ = nbflash.merge(*nbflash.merge(*one, *two), *nbflash.merge(*three, *four))
    for out in run(lambda comm: distributed.decode(*given[comm.rank], comm), 4, timeout=20):
        np.testing.assert_array_equal(out, whole.astype(dtype))
