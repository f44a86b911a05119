"""decode against the float64 reference: lengths around a page, masks, storage and hazards."""

import functools
import textwrap
import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from decode_cases import (
    CAPACITY,
    DTYPES,
    LENGTHS,
    PAGE,
    check,
    contiguous,
    of_both_caches,
    paged,
    same_bits,
)

import masks
import nbflash
from nbflash import reference, scores
from nbflash.backends.cpu import decode as cpu
from nbflash.backends.split_kv.splits import heads_together
from nbflash.definitions.quantised import dequantise, quantise
from nbflash.testing import assert_within_reference, low_precision

decode = functools.partial(nbflash.decode, return_lse=True)
STORAGE = {"int8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn}


decode_both = of_both_caches(decode)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=lambda h: f"{h[0]}:{h[1]}")
@pytest.mark.parametrize("nq", [1, 2, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_around_a_page(dtype, nq, heads):
    """Sequences of no token, of fewer than q_len, of a page and beside it, in one call."""
    q, k, v = contiguous(nq, heads, 40, DTYPES[dtype])
    out, lse = decode_both(q, k, v)
    check((out, lse), q, k, v, LENGTHS)
    assert out.dtype == DTYPES[dtype]
    assert lse.dtype == (np.float64 if dtype == "f64" else np.float32)
    assert not out[0].any()
    assert np.isneginf(lse[0]).all()


@pytest.mark.parametrize("page_size", [1, 7, 32, 256])
def test_page_sizes(page_size):
    q, k, v = contiguous(3)
    check(decode_both(q, k, v, page_size=page_size), q, k, v, LENGTHS)


@pytest.mark.parametrize("head_dim", [1, 3, 128, 256])
def test_head_dims(head_dim):
    q, k, v = contiguous(2, head_dim=head_dim)
    check(decode_both(q, k, v), q, k, v, LENGTHS)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_scale(scale):
    q, k, v = contiguous(2)
    check(decode_both(q, k, v, scale=scale), q, k, v, LENGTHS, scale=scale)


def test_out_alone():
    q, k, v = contiguous(2)
    assert same_bits([nbflash.decode(q, k, v, LENGTHS)], decode(q, k, v, LENGTHS)[:1])


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int64, np.uint64, ">i4", list])
def test_lengths_and_pages_of_any_integers(kind):
    q, k, v = contiguous(2)
    k_pages, v_pages, table = paged(k, v)
    want = decode(q, k_pages, v_pages, LENGTHS, block_table=table)
    lengths, table = (x.tolist() if kind is list else x.astype(kind) for x in (LENGTHS, table))
    assert same_bits(want, decode(q, k_pages, v_pages, lengths, block_table=table))


def test_no_sequence():
    q, k, v = contiguous(2, lengths=LENGTHS[:0])
    for lengths in (LENGTHS[:0], []):
        out, lse = decode(q, k, v, lengths)
        assert (out.shape, lse.shape) == ((0, 2, 4, 8), (0, 4, 2))


PARENTS = [-1, 0, 0, 1, 1, 2, 4]


def test_a_tree_of_drafts_behind_equal_prefixes():
    """The mask has as many columns as there are keys, fewer than the capacity."""
    prefix, nq = 37, len(PARENTS)
    lengths = np.full(3, prefix + nq, np.int32)
    q, k, v = contiguous(nq, lengths=lengths)
    mask = masks.tree(PARENTS, prefix=prefix)
    got = decode_both(q, k, v, lengths, mask=mask)
    check(got, q, k, v, lengths, keep=lambda b: mask.dense())


def test_trees_of_drafts_behind_prefixes_of_their_own():
    lengths = np.array([len(PARENTS), PAGE, PAGE + 1, 70], np.int32)
    q, k, v = contiguous(len(PARENTS), lengths=lengths)
    prefixes = lengths - len(PARENTS)
    mask = masks.per_batch([masks.tree(PARENTS, prefix, nk=CAPACITY) for prefix in prefixes])
    got = decode_both(q, k, v, lengths, mask=mask)
    check(got, q, k, v, lengths, keep=lambda b: mask.dense()[b, 0, :, : lengths[b]])


NQ = 5
HEADS = masks.per_head([masks.causal(NQ, CAPACITY), masks.sinks(NQ, 1, 9, nk=CAPACITY)] * 2)
MASKS = {
    "sinks": masks.sinks(NQ, 4, 20, nk=CAPACITY),
    "dense": masks.dense(NQ, CAPACITY),
    "empty": ~masks.dense(NQ, CAPACITY),
    "scattered": masks.from_function(lambda q, kv: (5 * q + 7 * kv) % 11 < 4, NQ, CAPACITY),
    "per-head": HEADS,
    "per-batch": masks.per_batch([masks.window(NQ, CAPACITY, left=9 * i) for i in range(6)]),
    "per-batch-per-head": masks.per_batch([HEADS, masks.dense(NQ, CAPACITY)] * 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    """Keys are counted from the first of a sequence; those behind its length do not exist."""
    q, k, v = contiguous(NQ)
    dense = np.broadcast_to(MASKS[name].dense(), (len(LENGTHS), 4, NQ, CAPACITY))
    got = decode_both(q, k, v, mask=MASKS[name])
    check(got, q, k, v, LENGTHS, keep=lambda b: dense[b, ..., : LENGTHS[b]])


def test_sinks_and_window_of_several_lengths():
    """The recipe of the docstring."""
    recipe = decode.func.__doc__.split("n keys wide::")[1].split("In a CUDA graph")[0]
    lengths = (NQ, 600, 1100)
    names = {"masks": masks, "q_len": NQ, "n": 1100, "lengths": lengths}
    exec(textwrap.dedent(recipe), names)
    for kept, length in zip(names["mask"].dense()[:, 0], lengths, strict=True):
        np.testing.assert_array_equal(kept[:, :length], masks.sinks(NQ, 4, 508, nk=length).dense())
        assert not kept[:, length:].any()


def test_masked_keys_may_hold_nan():
    q, k, v = contiguous(NQ)
    keep = MASKS["sinks"].dense()
    dead = ~keep.any(axis=0)
    k[:, dead], v[:, dead] = np.nan, np.nan
    got = decode_both(q, k, v, mask=MASKS["sinks"])
    clean = [np.nan_to_num(x) for x in (k, v)]
    check(got, q, *clean, LENGTHS, keep=lambda b: keep[:, : LENGTHS[b]])


def test_an_attended_nan_reaches_its_sequence_alone():
    q, k, v = contiguous(1)
    clean = decode(q, k, v, LENGTHS)
    v[3, PAGE - 1, 0] = np.nan
    out, lse = decode(q, k, v, LENGTHS)
    hit = np.isnan(out).any(axis=(1, 3))
    assert np.argwhere(hit).tolist() == [[3, 0], [3, 1]]
    assert same_bits([out[~np.isnan(out)], lse], [clean[0][~np.isnan(out)], clean[1]])


@pytest.mark.parametrize("kind", ["head", "token"])
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_caches(dtype, storage, kind):
    """A key is stored · scale, in the working precision; what is not read may be anything."""
    q, k, v = contiguous(2, (4, 2), 24, DTYPES[dtype])
    real = np.dtype(np.float64 if dtype == "f64" else np.float32)
    (k, k_scale), (v, v_scale) = (quantise(x, STORAGE[storage]) for x in (k, v))
    if kind == "head":
        k_scale, v_scale = (np.array(x, np.float32) for x in ([0.01, 0.5], [2.0, 0.003]))
        scales = k_pages_scale, v_pages_scale = k_scale, v_scale
    else:
        assert np.isnan(k_scale[0]).all()
        *scales, _ = paged(k_scale, v_scale)
        k_pages_scale, v_pages_scale = scales
    got = decode(q, k, v, LENGTHS, k_scale=k_scale, v_scale=v_scale)
    check(got, q, dequantise(k, k_scale, real), dequantise(v, v_scale, real), LENGTHS)
    k_pages, v_pages, table = paged(k, v)
    options = {"k_scale": k_pages_scale, "v_scale": v_pages_scale, "block_table": table}
    assert same_bits(got, decode(q, k_pages, v_pages, LENGTHS, **options))


LAYOUTS = {
    "heads-outside": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "padded-rows": lambda x: np.pad(x, ((0, 0), (0, 0), (0, 0), (3, 5)))[..., 3:-5],
    "backwards": lambda x: x[:, ::-1].copy()[:, ::-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_layouts(layout, dtype):
    inputs = contiguous(2, dtype=DTYPES[dtype])
    plain = decode_both(*inputs)
    moved = [LAYOUTS[layout](x) for x in inputs]
    assert same_bits(plain, decode(*moved, LENGTHS))
    *pages, table = paged(*inputs[1:])
    pages = map(LAYOUTS[layout], pages)
    assert same_bits(plain, decode(moved[0], *pages, LENGTHS, block_table=table))


def test_inputs_stay_as_they_are():
    q, k, v = contiguous(2)
    *pages, table = paged(k, v)
    inputs = [q, *pages, LENGTHS.copy(), table]
    before = [x.tobytes() for x in inputs]
    for x in inputs:
        x.setflags(write=False)
    decode(*inputs[:4], block_table=table)
    assert [x.tobytes() for x in inputs] == before


SCORES = {
    "softcap": scores.softcap(0.7),
    "alibi": scores.alibi([0.5, 0.1, 0.02, 0.3]),
    "bias": scores.bias(np.random.default_rng(2).standard_normal((1, 4, CAPACITY, CAPACITY))),
    "place": scores.custom(
        lambda s, b, h, q_idx, kv_idx: s + 0.01 * (b + q_idx * (kv_idx % 3)),
        grad=lambda s, b, h, q_idx, kv_idx: 1.0,
    ),
}
LONG = np.array([CAPACITY, 70, 41], np.int32)


@pytest.mark.parametrize("window", [None, (20, None), (0, 3)])
@pytest.mark.parametrize("score", [None, *SCORES])
def test_windows_and_scores(score, window):
    """Both count positions: those of the whole sequence, of which the queries are the last rows."""
    q, k, v = contiguous(NQ, lengths=LONG)
    k[1, :30], v[1, :30] = (k[1, :30], v[1, :30]) if window is None else (np.nan, np.nan)
    given = SCORES.get(score)
    got = decode_both(q, k, v, LONG, window=window, score=given)
    for b, n in enumerate(LONG):
        positions = np.arange(n - NQ, n)
        mask = (
            masks.causal(n) if window is None else masks.causal(n) & masks.window(n, left=window[0])
        )
        whole = np.zeros((len(LONG), n, *q.shape[2:]), np.float32)
        whole[b, positions] = q[b]
        keys = [
            np.broadcast_to(np.nan_to_num(x[b, :n]), (len(LONG), n, *x.shape[2:])) for x in (k, v)
        ]
        how = {"score": _of_length(given, score, n)}
        results = [f(whole, *keys, mask, **how) for f in (reference.attention, low_precision)]
        for i, name in enumerate(("out", "lse")):
            own = [x[i].swapaxes(1, 2)[b, positions] if i else x[i][b, positions] for x in results]
            found = got[i].swapaxes(1, 2)[b] if i else got[i][b]
            assert_within_reference(found, *own, name=f"{name}[{b}]")


def _of_length(given, name, n):
    """The score over n keys, whose arrays are as long as the capacity."""
    return scores.bias(given.stages(1, 1)[0][2][0][..., :n, :n]) if name == "bias" else given


def test_a_window_joins_a_mask():
    q, k, v = contiguous(NQ, lengths=LONG)
    mask = masks.sinks(NQ, 4, 60, nk=CAPACITY)
    got = decode_both(q, k, v, LONG, mask=mask, window=(9, 0))
    positions = np.arange(NQ) - NQ
    near = lambda n: abs(np.arange(n) - (n + positions[:, None]) + 4.5) < 5
    check(got, q, k, v, LONG, keep=lambda b: mask.dense()[:, : LONG[b]] & near(LONG[b]))


def test_tokens_before_the_first_key_have_no_score():
    q, k, v = contiguous(NQ)
    got = decode_both(q, k, v, mask=masks.dense(NQ, CAPACITY), score=SCORES["bias"])
    for out, lse, n in zip(*got, LENGTHS, strict=True):
        before = np.arange(NQ) < NQ - n
        assert not out[before].any()
        np.testing.assert_array_equal(np.isneginf(lse), np.broadcast_to(before, lse.shape))


def test_decode_is_level_with_a_loop():
    """In NumPy, over 16 sequences of 512 keys: no more than 1.2 times its processor time.

    A call takes some 70 µs before the first sequence. The two are called in turn, and the quickest
    of each count, because other processes slow some of the calls down.
    """
    q, k, v = contiguous(1, (1, 1), 64, lengths=np.full(16, 512), capacity=512)
    lengths = np.full(16, 512, np.int32)

    def loop():
        out = np.empty_like(q)
        for b in range(16):
            s = 64**-0.5 * q[b, :, 0] @ k[b, :, 0].T
            p = np.exp(s - s.max(1, keepdims=True))
            out[b, :, 0] = p @ v[b, :, 0] / p.sum(1, keepdims=True)
        return out

    times = {loop: [], lambda: nbflash.decode(q, k, v, lengths): []}
    for _ in range(60):
        for run, seconds in times.items():
            began = time.thread_time()
            run()
            seconds.append(time.thread_time() - began)
    by_loop, ours = map(min, times.values())
    assert ours <= 1.2 * by_loop


def test_many_tokens_are_attended_in_parts(monkeypatch):
    """Scores of a few rows at a time, by several threads: the same bits."""
    q, k, v = contiguous(7, (4, 2))
    want = decode(q, k, v, LENGTHS)
    monkeypatch.setattr(cpu, "ALONE", 0)
    assert same_bits(decode(q, k, v, LENGTHS), want)


def test_heads_go_together_where_every_sequence_lets_them():
    p = SimpleNamespace(batch=2, heads=2, heads_kv=1)
    causal, dense = masks.causal(3, 9), masks.dense(3, 9)
    by_head = masks.per_head([causal, dense])
    given = None, masks.per_batch([causal, dense]), masks.per_batch([causal, by_head]), by_head
    assert [heads_together(p, mask) for mask in given] == [2, 2, 1, 1]


@pytest.mark.parametrize("heads", [(4, 1), (4, 4)])
def test_nothing_is_printed_of_sequences_without_keys(heads, capfd):
    """BLAS prints a line for a product of no columns."""
    q, k, v = contiguous(2, heads, 8, np.float32, (0, 5), 9)
    for caches in ((k, v), (k[:, :0], v[:, :0])):
        out, lse = decode(q, *caches, [0, 5 * (caches[0].shape[1] > 0)])
        assert not out[0].any()
        assert np.isneginf(lse[0]).all()
    decode(q.astype(np.float16), k.astype(np.float16), v.astype(np.float16), [0, 5])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("order", [("f32", "f64"), ("f64", "f32")], ids="-".join)
def test_a_score_runs_in_the_precision_of_each_call(order):
    """It is compiled for each, and kept."""
    score, n = scores.softcap(2.5), 12
    for name in order:
        q, k, v = contiguous(2, (2, 1), 8, DTYPES[name], np.array([n]), n)
        got = decode(q, k, v, [n], score=score)
        keep = np.tri(2, n, n - 2, dtype=bool)
        given = q, k, v, masks.from_dense(keep)
        for x, exact, low in zip(
            got,
            reference.attention(*given, score=score),
            low_precision(*given, score=score),
            strict=True,
        ):
            assert x.dtype == (DTYPES[name] if x.ndim == 4 else np.dtype(DTYPES[name]))
            assert_within_reference(x, exact, low, name=name)


def test_tokens_that_are_taken_in_several_steps_have_their_own_rows_of_a_mask():
    """So many scores are not held at once."""
    nq, heads, n = 64, 4, 20000
    assert nq * heads * n > 2 * cpu.SCORES
    q, k, v = contiguous(nq, (heads, 1), 4, np.float32, np.array([n]), n)
    tokens = np.arange(nq)
    keep = np.zeros((nq, n), bool)
    keep[tokens, 300 * tokens] = True
    out, lse = decode(q, k, v, [n], mask=masks.from_dense(keep))
    np.testing.assert_array_equal(out, np.broadcast_to(v[:, 300 * tokens], out.shape))
    low, exact = (
        np.einsum("bihd,bid->bhi", q.astype(real), k[:, 300 * tokens, 0]) * real(4**-0.5)
        for real in (np.float32, np.float64)
    )
    assert_within_reference(lse, exact, low)
