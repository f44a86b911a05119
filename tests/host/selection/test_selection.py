"""Selections against their definitions, written out token by token and block by block."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import masks
import nbflash
from nbflash import selection
from nbflash.selection.blocks import check_blocks, enough
from nbflash.testing import make_qkv

# nq, nk, heads, heads_kv, block: ragged, more keys than queries, blocks that are not square.
SHAPES = [(96, 96, 2, 2, 16), (53, 90, 4, 2, (8, 16)), (90, 53, 2, 1, (16, 8))]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])


def inputs(shape, seed=0):
    nq, nk, heads, heads_kv, block = shape
    q, k, _, _ = make_qkv(2, nq, nk, heads, heads_kv, 8, np.float64, seed=seed)
    return 2 * q, 2 * k, (block if isinstance(block, tuple) else (block, block))


def slices(n, size):
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def may_attend(nq, nk, causal):
    return masks.causal(nq, nk).dense() if causal else np.ones((nq, nk), bool)


def softmax(scores, where):
    weights = np.where(where, np.exp(scores - scores.max()), 0)
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)


def admissible(shape, block, causal):
    keep = may_attend(*shape, causal)
    rows, columns = (slices(n, size) for n, size in zip(shape, block, strict=True))
    return np.array([[keep[r, c].any() for c in columns] for r in rows])


def forced(allowed, sinks, local):
    """The first columns, and the last admissible ones of each row."""
    out = np.zeros_like(allowed)
    for r, row in enumerate(allowed):
        columns = np.flatnonzero(row)
        out[r, columns[columns < sinks]] = True
        out[r, columns[len(columns) - min(local, len(columns)) :]] = True
    return out


def best(scores, allowed, must, topk):
    """Block by block the largest of a row; those that must be first."""
    keep = np.zeros(scores.shape, bool)
    for place in np.ndindex(scores.shape[:-1]):
        r = place[-1]
        order = sorted(
            np.flatnonzero(allowed[r]), key=lambda c: (not must[r, c], -scores[*place, c])
        )
        keep[place][order[:topk]] = True
    return keep


def pooled(q, k, block):
    """Products of means, (batch, heads, rows, columns)."""
    group = q.shape[2] // k.shape[2]
    rows, columns = slices(q.shape[1], block[0]), slices(k.shape[1], block[1])
    out = np.zeros((q.shape[0], q.shape[2], len(rows), len(columns)))
    for b, h, r, c in np.ndindex(out.shape):
        out[b, h, r, c] = q[b, rows[r], h].mean(0) @ k[b, columns[c], h // group].mean(0)
    return out


@shapes
@causal_or_not
def test_mean_pooled(shape, causal):
    q, k, block = inputs(shape)
    allowed = admissible((shape[0], shape[1]), block, causal)
    for topk, sinks, local in ((3, 0, 0), (3, 1, 1), (99, 0, 0)):
        options = {"topk": topk, "sinks": sinks, "local": local, "causal": causal}
        chosen = selection.mean_pooled(q, k, block=block, **options)
        expected = best(pooled(q, k, block), allowed, forced(allowed, sinks, local), topk)
        assert np.array_equal(chosen.dense(), expected)
        assert chosen.width == min(topk, allowed.shape[1])
        assert (chosen.within is not None) == causal


@shapes
@causal_or_not
def test_cumulative(shape, causal):
    q, k, block = inputs(shape)
    allowed = admissible((shape[0], shape[1]), block, causal)
    weights = softmax(pooled(q, k, block) * 8**-0.5, allowed)
    chosen = selection.cumulative(q, k, block=block, threshold=0.7, causal=causal).dense()
    must = forced(allowed, 1, 1)
    for b, h in np.ndindex(weights.shape[:2]):
        flat = weights[b, h].ravel()
        order = np.argsort(-flat, kind="stable")
        needed = np.searchsorted(np.cumsum(flat[order]), 0.7 * flat.sum()) + 1
        keep = np.zeros(flat.size, bool)
        keep[order[:needed]] = True
        assert np.array_equal(chosen[b, h], keep.reshape(must.shape) | must)


@shapes
@causal_or_not
def test_compressed(shape, causal, monkeypatch):
    monkeypatch.setattr("nbflash.selection.compressed_keys._SCORES", 1 << 12)  # in several steps
    q, k, block = inputs(shape)
    nq, nk, heads, heads_kv, _ = shape
    length, group = 4, heads // heads_kv
    pieces, columns = slices(nk, length), slices(nk, block[1])
    means = np.stack([k[:, piece].mean(1) for piece in pieces], 1)
    past = np.array([[piece.stop - 1 <= i + nk - nq for piece in pieces] for i in range(nq)])
    scores = np.zeros((2, heads_kv, len(slices(nq, block[0])), len(columns)))
    for b, h in itertools.product(range(2), range(heads)):
        products = q[b, :, h] @ means[b, :, h // group].T * 8**-0.5
        weights = softmax(products, past if causal else np.ones_like(past))
        for (r, rows), (c, keys) in itertools.product(
            enumerate(slices(nq, block[0])), enumerate(columns)
        ):
            own = [p for p, piece in enumerate(pieces) if keys.start <= piece.start < keys.stop]
            scores[b, h // group, r, c] += weights[rows][:, own].sum()
    allowed = admissible((nq, nk), block, causal)
    chosen = selection.compressed(q, k, block=block, topk=4, length=length, causal=causal)
    must = forced(allowed, 1, 2)
    # Where no query sees a mean that is past, blocks are equal; weights here are of float32.
    a, b = (
        np.where(keep, scores, 0).sum(-1)
        for keep in (chosen.dense(), best(scores, allowed, must, 4))
    )
    assert (abs(a - b) <= np.finfo(np.float32).eps * nq * scores.max()).all()
    assert (chosen.dense() >= must).all()
    assert np.array_equal(chosen.dense().sum(-1)[0, 0], np.minimum(allowed.sum(1), 4))
    assert chosen.heads == (heads_kv if heads_kv > 1 else None)


def test_means_of_compressed_keys_are_of_their_dtype():
    """Two blocks whose means differ by less than float16 tells apart are equal: the first wins."""
    k = np.ones((1, 8, 1, 1), np.float16)
    k[:, 7] += np.finfo(np.float16).eps
    q = np.full((1, 4, 1, 1), 1e4, np.float16)
    for dtype, chosen in ((np.float16, 0), (np.float32, 1)):
        options = {"block": 4, "length": 4, "topk": 1, "sinks": 0, "local": 0}
        made = selection.compressed(q.astype(dtype), k.astype(dtype), **options)
        assert made.indices.item() == chosen


@causal_or_not
def test_a_mean_of_fewer_keys_is_seen(causal):
    """The last one, by the last query."""
    k = np.zeros((1, 18, 1, 1))
    k[:, 16:] = 9
    options = {"block": 8, "length": 4, "topk": 1, "sinks": 0, "local": 0, "causal": causal}
    assert selection.compressed(np.ones((1, 1, 1, 1)), k, **options).indices.item() == 2


@shapes
@causal_or_not
def test_antidiagonal(shape, causal):
    q, k, block = inputs(shape)
    nq, nk, heads, heads_kv, _ = shape
    stride, (rows, columns) = 4, (slices(nq, block[0]), slices(nk, block[1]))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k.repeat(heads // heads_kv, axis=2))
    groups_q, groups_k = slices(nq, stride), slices(nk, stride)
    sums = np.zeros((2, heads, len(groups_q), len(groups_k)))
    for i, j in itertools.product(range(nq), range(nk)):
        if i % stride + j % stride == stride - 1:
            sums[:, :, i // stride, j // stride] += scores[:, :, i, j]
    keep = may_attend(nq, nk, causal)
    seen = np.array([[keep[r, c].any() for c in groups_k] for r in groups_q])
    weights = softmax(sums * 8**-0.5 / stride, seen)
    chosen = selection.antidiagonal(q, k, block=block, stride=stride, threshold=0.8, causal=causal)
    dense = chosen.dense()
    for b, h, r in np.ndindex(dense.shape[:3]):
        own = weights[b, h, rows[r].start // stride : -(-rows[r].stop // stride)]
        of_block = np.array(
            [own[:, c.start // stride : -(-c.stop // stride)].sum() for c in columns]
        )
        order = np.argsort(-of_block, kind="stable")
        needed = np.searchsorted(np.cumsum(of_block[order]), 0.8 * of_block.sum()) + 1
        expected = order[: needed if of_block.any() else 0]
        assert sorted(expected) == np.flatnonzero(dense[b, h, r]).tolist()
    fewer = selection.antidiagonal(
        q, k, block=block, stride=stride, threshold=0.8, causal=causal, most=2
    )
    assert fewer.width == 2
    assert np.array_equal(fewer.dense().sum(-1), np.minimum(dense.sum(-1), 2))
    assert (fewer.dense() <= dense).all()


@shapes
def test_vertical_slash(shape):
    q, k, block = inputs(shape)
    nq, nk, heads, heads_kv, _ = shape
    keep, last = may_attend(nq, nk, True), 16
    chosen = selection.vertical_slash(q, k, block=block, vertical=2, slash=3, last=last).dense()
    rows, columns = slices(nq, block[0]), slices(nk, block[1])
    distance = np.arange(nq)[:, None] + nk - nq - np.arange(nk)
    for b, h in np.ndindex(2, heads):
        scores = q[b, :, h] @ k[b, :, h // (heads // heads_kv)].T * 8**-0.5
        weights = softmax(scores[-last:], keep[-last:])
        by_key = np.argsort(-weights.sum(0), kind="stable")[:2]
        of_distance = [weights[distance[-last:] == d].sum() for d in range(nk)]
        by_distance = np.argsort(-np.array(of_distance), kind="stable")[:3]
        tokens = keep & (np.isin(np.arange(nk), by_key) | np.isin(distance, by_distance))
        expected = [[tokens[r, c].any() for c in columns] for r in rows]
        assert np.array_equal(chosen[b, h], expected)


def test_queries_before_all_keys_choose_nothing():
    """Of the last 64 the first 33 are before the first of 32 keys."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, 1, 8)).astype(np.float32) for n in (96, 32))
    chosen = selection.vertical_slash(q, k, block=16, vertical=2, slash=2).to_mask(1)
    assert not chosen.dense()[:64].any()
    assert chosen.dense()[64:].any()


def test_many_columns_and_diagonals_are_listed_once():
    q, k, _ = inputs(SHAPES[0])
    chosen = selection.vertical_slash(q, k, block=16, vertical=40, slash=40)
    assert chosen.width == 6
    assert np.array_equal(chosen.dense()[0, 0], np.tri(6, dtype=bool))


@pytest.mark.parametrize("block", [(16, 16), (8, 16), (16, 8), (24, 8), (17, 8), (9, 8), (4, 16)])
def test_diagonals_list_as_many_blocks_as_they_can_meet(block):
    """Of so many keys in a row, wherever they begin."""
    q, k, _ = inputs((96, 96, 2, 2, block))
    size_q, size_k = block
    most = max((first + size_q - 1) // size_k + 1 for first in range(size_k))
    chosen = selection.vertical_slash(q, k, block=block, vertical=1, slash=1)
    assert chosen.width == 1 + most


METHODS = {
    "mean_pooled": {"topk": 2},
    "compressed": {"topk": 4},
    "cumulative": {"threshold": 0.5},
    "antidiagonal": {"threshold": 0.5},
    "vertical_slash": {"vertical": 2, "slash": 2},
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_coverage_is_that_of_the_mask_and_attention_takes_the_map(name, dtype):
    q, k, v, _ = make_qkv(1, 128, 128, 2, 1, 8, dtype)
    options = METHODS[name] | ({} if name == "vertical_slash" else {"causal": True})
    chosen = getattr(selection, name)(q, k, block=16, **options)
    assert chosen.within == masks.causal(128)
    mask = chosen.to_mask(2)
    for how in ({"scale": 2.0, "queries": np.array([3, 90])}, {}):
        kept = selection.coverage(q, k, chosen, **how)
        assert np.array_equal(kept, masks.coverage(q, k, mask, within=masks.causal(128), **how))
    assert (kept > mask.count_nonzero() / (2 * masks.causal(128).count_nonzero()) - 0.2).all()
    assert np.array_equal(nbflash.attention(q, k, v, chosen), nbflash.attention(q, k, v, mask))


def call(name, **changes):
    q, k, _ = inputs(SHAPES[0])
    given = {"q": q, "k": k, "block": 16} | METHODS[name] | changes
    return getattr(selection, name)(given.pop("q"), given.pop("k"), **given)


WRONG = {
    "topk": ("mean_pooled", {"topk": 0}, "topk=0: must be at least 1"),
    "block": ("mean_pooled", {"block": (1, 2, 3)}, "block=.*: must be one integer or a pair"),
    "block of none": ("mean_pooled", {"block": 0}, "block=0: must be at least 1"),
    "length": ("compressed", {"length": 5}, "length=5: must divide the 16 keys of a block"),
    "stride": ("antidiagonal", {"stride": 5}, "stride=5: must divide the 16 queries of a block"),
    "threshold": ("antidiagonal", {"threshold": 0.0}, "threshold=0.0: must be above 0"),
    "no tokens": ("mean_pooled", {"q": np.zeros((2, 0, 2, 8))}, "must have elements to choose by"),
}


@pytest.mark.parametrize(("name", "changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(name, changes, message):
    with pytest.raises(ValueError, match=message):
        call(name, **changes)


def test_coverage_names_what_is_no_block_map():
    q, k, _ = inputs(SHAPES[0])
    with pytest.raises(TypeError, match="block_map must be a BlockMap, got Interval"):
        selection.coverage(q, k, masks.causal(q.shape[1], k.shape[1]))
    chosen = call("mean_pooled")
    with pytest.raises(ValueError, match=r"block_map must have shape \(.*\), got"):
        selection.coverage(q[:, 1:], k, chosen)
    with pytest.raises(ValueError, match=r"q must be \(batch, seqlen, heads, head_dim\), got"):
        selection.coverage(q[0], k, chosen)


def test_a_block_that_always_is_chosen_takes_no_place_of_one_that_is_needed():
    """Though its weight is 0, the two behind it have to reach the share."""
    x = np.zeros((1, 3, 1, 8), np.float32)
    blocks, _ = check_blocks(x[:, :1], x, 1, False)
    weights = np.array([0, 0.5, 0.5], np.float32).reshape(1, 1, 1, 3)
    found = enough(blocks, weights, 0.9, 3, 1, 0)
    assert found.counts.tolist() == [[[3]]]
    assert np.sort(found.indices[0, 0, 0]).tolist() == [0, 1, 2]


def test_the_weights_of_a_long_map_are_summed_in_float64():
    """Half of 90000 equal ones; in float32 each adds 0.4 % too much or too little."""
    q = k = np.zeros((1, 300, 1, 8), np.float32)
    chosen = selection.cumulative(q, k, block=1, threshold=0.5, sinks=0, local=0)
    assert abs(int(chosen.counts.sum()) - 45000) <= 1


def test_blocks_of_no_weight_are_never_enough():
    """A running sum of float32 stops short of the sum of many small weights beside a large one."""
    q, k = np.zeros((1, 4, 1, 1), np.float32), np.zeros((1, 120, 1, 1), np.float32)
    given, _ = check_blocks(q, k, 4, False)
    weights = np.zeros((1, 1, 1, 30), np.float32)
    weights[..., 0], weights[..., 1:25] = 1, 3e-8
    assert np.cumsum(weights)[-1] < weights.sum()
    made = enough(given, weights, 1.0, 30, 0, 0)
    assert made.counts.item() == 25
