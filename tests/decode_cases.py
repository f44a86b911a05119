"""Caches with known contents for the tests of `decode`, and what it must return for them."""

import ml_dtypes
import numpy as np

from nbflash import reference
from nbflash.testing import assert_within_reference, low_precision, make_qkv

PAGE = 16
LENGTHS = np.array([0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE + 3], np.int32)
CAPACITY = 6 * PAGE
VALUES = 64  # whose largest error says what is to be expected
DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}


def contiguous(nq, heads=(4, 2), head_dim=8, dtype=np.float32, lengths=LENGTHS, capacity=CAPACITY):
    """q and caches (batch, capacity, heads_kv, head_dim), NaN behind ``lengths``."""
    q, k, v, _ = make_qkv(len(lengths), nq, capacity, *heads, head_dim, dtype)
    for b, length in enumerate(lengths):
        k[b, length:], v[b, length:] = np.nan, np.nan
    return q, k, v


def paged(*caches, lengths=LENGTHS, page_size=PAGE, spare=3, seed=0):
    """The same caches in shuffled pages, and their block table.

    Pages that no token is in are NaN, and their entries of the table are out of range.
    """
    batch, width = caches[0].shape[0], -(-caches[0].shape[1] // page_size)
    used = np.arange(width) < -(-lengths // page_size)[:, None]
    pages = np.random.default_rng(seed).permutation(int(used.sum()) + spare)
    table = np.full((batch, width), 10**6, np.int32)
    table[used] = pages[: used.sum()]
    found = []
    for cache in caches:
        pool = np.full((len(pages), page_size, *cache.shape[2:]), _poison(cache), cache.dtype)
        for b, i in zip(*np.nonzero(used), strict=True):
            rows = cache[b, i * page_size : (i + 1) * page_size]
            pool[table[b, i], : len(rows)] = rows
        found.append(pool)
    return *found, table


def same_bits(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def of_both_caches(run, lengths=LENGTHS):
    """``run_both(q, k, v, lengths, page_size, **options)``: results of ``run``.

    Over contiguous caches; paged ones, with their ``block_table``, must give the same bits.
    """

    def run_both(q, k, v, lengths=lengths, page_size=PAGE, **options):
        got = run(q, k, v, lengths, **options)
        k_pages, v_pages, table = paged(k, v, lengths=lengths, page_size=page_size)
        assert same_bits(got, run(q, k_pages, v_pages, lengths, block_table=table, **options))
        return got

    return run_both


def _poison(cache):
    return 77 if cache.dtype == np.int8 else np.nan


def expected(q, k, v, lengths, b, keep=None, scale=None):
    """The float64 reference and the plain computation, (out, lse) each, of one sequence.

    The error of a few rows is large or almost nothing as it happens: there are as many plain
    computations as make `VALUES` rows, and of every element it is the one furthest away.
    """
    one, length = slice(b, b + 1), lengths[b]
    if keep is None:
        keep = np.tri(q.shape[1], length, length - q.shape[1], dtype=bool)
    arrays = q[one], k[one, :length], v[one, :length], keep
    ref, rng = reference.attention(*arrays, scale), np.random.default_rng(0)
    lows = [low_precision(*arrays, scale)]
    lows += [low_precision(*_dispersed(rng, *arrays), scale) for _ in range(VALUES // ref[1].size)]
    return ref, tuple(map(_furthest, ref, zip(*lows, strict=True)))


def _dispersed(rng, q, k, v, keep):
    """The same keys in another order, among as many that nothing attends: other roundings."""
    order = rng.permutation(2 * k.shape[1])
    wide = [
        np.concatenate([x, np.zeros_like(x)], axis).take(order, axis)
        for x, axis in ((k, 1), (v, 1), (keep, -1))
    ]
    return q, *wide


def _furthest(ref, draws):
    draws = np.stack(draws)
    with np.errstate(invalid="ignore"):  # of infinities that are equal
        error = np.nan_to_num(abs(draws.astype(np.float64) - ref))
    return np.take_along_axis(draws, error.argmax(axis=0)[None], axis=0)[0]


def check(got, q, k, v, lengths, keep=None, scale=None):
    """Hold ``(out, lse)`` to the budgets, every sequence to its own.

    Parameters
    ----------
    keep : callable, optional
        ``keep(b)`` gives the bool array (broadcastable to heads, q_len, lengths[b]) of a sequence.
    """
    for b in range(len(lengths)):
        own = None if keep is None else keep(b)
        ref, low = expected(q, k, v, lengths, b, own, scale)
        for name, x, *results in zip(("out", "lse"), got, ref, low, strict=True):
            assert_within_reference(x[b : b + 1], *results, name=f"{name}[{b}]")


def check_tokens(got, q, k, v, lengths, dense):
    """:func:`check` token by token: what one attends is no excuse for another.

    ``dense`` (sequences, q_len, capacity) says what is attended.
    """
    for i in range(q.shape[1]):
        out, lse = got[0][:, i : i + 1], got[1][:, :, i : i + 1]
        keep = lambda b, i=i: dense[b, i : i + 1, : lengths[b]]
        check((out, lse), q[:, i : i + 1], k, v, lengths, keep=keep)


def keep_of(lengths, nq, window=None, mask=None):
    """``keep(b)``: what a mask, or without one the causal rule, and a window leave to attend."""
    left, right = window or (None, None)
    right = min(right or 0, 0) if mask is None else right

    def keep(b):
        n = int(lengths[b])
        own, keys = np.arange(n - nq, n)[:, None], np.arange(n)
        near = np.ones((nq, n), bool)
        if left is not None:
            near &= keys >= own - left
        if right is not None:
            near &= keys <= own + right
        if mask is None:
            return near
        dense = mask.dense()
        return (dense if dense.ndim < 4 else dense[b % len(dense)])[..., :n] & near

    return keep


def hide(k, v, lengths, keep):
    """Copies of caches with NaN in the keys that no query of a sequence attends."""
    k, v = k.copy(), v.copy()
    for b, n in enumerate(lengths):
        seen = keep(b)
        unseen = ~seen.any(axis=tuple(range(seen.ndim - 1)))
        k[b, :n][unseen], v[b, :n][unseen] = np.nan, np.nan
    return k, v


def check_scored(got, q, k, v, lengths, score_of, keep=None, scale=None):
    """:func:`check` with scores of positions: ``score_of(n)`` is that of a sequence of n keys.

    The queries are the last rows of a whole sequence; those before its first key attend nothing.
    """
    nq, keep = q.shape[1], keep or keep_of(lengths, q.shape[1])
    for b, n in enumerate(map(int, lengths)):
        before, lse = max(nq - n, 0), got[1][b].T
        assert not got[0][b, :before].any()
        assert np.isneginf(lse[:before]).all()
        if before == nq:
            continue
        wanted = [
            (out[b, n - nq + before :], sums[b].T[n - nq + before :])
            for out, sums in _of_positions(q, k, v, n, b, keep(b), scale, score_of(n))
        ]
        found = got[0][b, before:], lse[before:]
        for name, x, *want in zip(("out", "lse"), found, *wanted, strict=True):
            assert_within_reference(x, *want, name=f"{name}[{b}]")


def _of_positions(q, k, v, n, b, keep, scale, score):
    """The float64 reference and the plain computation of all rows of sequence b, of n keys."""
    batch, last = len(q), min(q.shape[1], n)
    whole = np.zeros((batch, n, *q.shape[2:]), q.dtype)
    dense = np.zeros((*keep.shape[:-2], n, n), bool)
    whole[b, n - last :], dense[..., n - last :, :] = q[b, -last:], keep[..., -last:, :]
    keys = [np.broadcast_to(np.nan_to_num(x[b, :n]), (batch, n, *x.shape[2:])) for x in (k, v)]
    return [f(whole, *keys, dense, scale, score) for f in (reference.attention, low_precision)]
