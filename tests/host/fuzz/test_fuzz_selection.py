"""Blocks that are chosen from q and k against plain scores: the largest, and as many as promised.

Scores of float32 may order neighbours otherwise: by no more than twice what the plain ones in
float32 are off.
"""

import numpy as np
from fuzzing import plain_masks, plain_selection
from fuzzing.drawn_masks import SEEDS
from fuzzing.drawn_problems import normal
from fuzzing.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from nbflash import selection
from nbflash.testing import error_budget

COUNTS = st.integers(0, 3)


@st.composite
def queries_and_keys(draw, unit=1):
    """q, k, a block that is a multiple of ``unit``, and whether attention is causal."""
    rng, dtype = np.random.default_rng(draw(SEEDS)), draw(st.sampled_from([np.float32, np.float16]))
    nq = draw(st.integers(1, 60))
    nk = draw(st.just(nq) | st.integers(1, 60))
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    batch, head_dim = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 8]))
    q = normal(rng, (batch, nq, heads_kv * group, head_dim), dtype)
    k = normal(rng, (batch, nk, heads_kv, head_dim), dtype)
    block = tuple(unit * draw(st.integers(1, max(1, 20 // unit))) for _ in "qk")
    return q, k, block, draw(st.booleans())


def scored(function, *args):
    """Scores in float64, and how far those of float32 may be off."""
    exact, low = (function(*args, real) for real in (np.float64, np.float32))
    return exact, error_budget(exact, low)


def kept_blocks(chosen, q, k, block, causal):
    """bool (batch, heads of the map, rows, columns) of a map, whose cells must be those blocks."""
    nq, nk, heads = q.shape[1], k.shape[1], q.shape[2]
    assert (chosen.shape, chosen.block) == ((nq, nk), block)
    kept = np.zeros((*chosen.indices.shape[:3], -(-nk // block[1])), bool)
    for at in np.ndindex(*kept.shape[:3]):
        listed = chosen.indices[at][: chosen.counts[at]]
        kept[at][listed[(listed >= 0) & (listed < kept.shape[3])]] = True
    possible = plain_selection.admissible(nq, nk, block, causal)
    assert not (kept & ~possible).any() or causal
    i, j = np.indices((nq, nk))
    cells = kept[..., i // block[0], j // block[1]]
    cells = cells & plain_masks.causal(nq, nk) if causal else cells
    cells = cells.repeat(heads // cells.shape[1], axis=1)
    found = np.broadcast_to(chosen.to_mask(heads).dense(), cells.shape)
    np.testing.assert_array_equal(found, cells)
    return kept & possible


def check_largest(kept, scores, fixed, slack):
    """No block that is left out is above one that is not; ``fixed`` are kept whatever they have."""
    rest = np.where(kept & ~fixed, scores, np.inf).min(axis=-1)
    out = np.where(kept | fixed, -np.inf, scores).max(axis=-1)
    assert (out <= rest + slack).all()


def check_best(kept, scores, slack, how, topk):
    """Those that always are chosen, then the best, ``topk`` of a row where it has as many."""
    possible, fixed = plain_selection.admissible(*how[:4]), plain_selection.always(*how)
    few = fixed.sum(axis=1) <= topk
    assert (kept | ~fixed)[:, :, few].all()
    count = np.minimum(possible.sum(axis=1), topk)
    assert (kept.sum(axis=-1) == count).all()
    scores = np.where(possible, scores, -np.inf)
    check_largest(kept[:, :, few], scores[:, :, few], fixed[few], slack)


@examples(15)
@given(queries_and_keys(), st.integers(1, 6), COUNTS, COUNTS)
def test_mean_pooled(given, topk, sinks, local):
    q, k, block, causal = given
    how = {"block": block, "topk": topk, "causal": causal, "sinks": sinks, "local": local}
    kept = kept_blocks(selection.mean_pooled(q, k, **how), q, k, block, causal)
    of_map = q.shape[1], k.shape[1], block, causal, sinks, local
    check_best(kept, *scored(plain_selection.mean_pooled, q, k, block), of_map, topk)


@examples(15)
@given(
    st.sampled_from([1, 2, 3]).flatmap(lambda n: st.tuples(st.just(n), queries_and_keys(n))),
    st.integers(1, 6),
    COUNTS,
    COUNTS,
)
def test_compressed(given, topk, sinks, local):
    length, (q, k, block, causal) = given
    how = {"block": block, "topk": topk, "causal": causal, "sinks": sinks, "local": local}
    chosen = selection.compressed(q, k, length=length, **how)
    kept = kept_blocks(chosen, q, k, block, causal)
    of_map = q.shape[1], k.shape[1], block, causal, sinks, local
    scores = scored(plain_selection.compressed, q, k, block, causal, length)
    check_best(kept, *scores, of_map, topk)


def check_enough(kept, weights, fixed, slack, threshold, most=None):
    """The fewest of the largest that reach the share; ``fixed`` come first and count."""
    for at in np.ndindex(kept.shape[:-1]):
        own, weight, first = kept[at], weights[at], np.broadcast_to(fixed, kept.shape)[at]
        if most is not None and own.sum() >= most:
            assert own.sum() == most
            continue
        assert own[first].all()
        drawn = own & ~first
        margin = slack * (own.size + 1)
        assert weight[own].sum() >= threshold * weight.sum() - margin
        if drawn.any():
            least = weight[drawn].min()
            assert weight[own].sum() - least < threshold * weight.sum() + margin
            assert weight[~own].max(initial=0) <= least + slack


THRESHOLDS = st.sampled_from([0.05, 0.4, 0.9, 1.0])


@examples(15)
@given(queries_and_keys(), THRESHOLDS, COUNTS, COUNTS)
def test_cumulative(given, threshold, sinks, local):
    """Over all rows of a head; those that always are chosen are added."""
    q, k, block, causal = given
    how = {"block": block, "causal": causal, "sinks": sinks, "local": local}
    chosen = selection.cumulative(q, k, threshold=threshold, **how)
    kept = kept_blocks(chosen, q, k, block, causal)
    fixed = plain_selection.always(q.shape[1], k.shape[1], block, causal, sinks, local)
    weights, slack = scored(plain_selection.cumulative, q, k, block, causal)
    assert kept[:, :, fixed].all()
    flat, weights = (x.reshape(*x.shape[:2], -1) for x in (kept, weights))
    margin = slack * (flat.shape[2] + 1)
    for own, weight in zip(
        flat.reshape(-1, flat.shape[2]), weights.reshape(-1, flat.shape[2]), strict=True
    ):
        order = np.sort(weight)[::-1]
        before = np.cumsum(order) - order
        sure = before < threshold * weight.sum() - margin
        maybe = before < threshold * weight.sum() + margin
        drawn = own & ~fixed.ravel()
        assert own[weight > order[sure].min(initial=np.inf) + slack].all() or not sure.any()
        least = order[maybe].min(initial=np.inf)
        assert (weight[drawn] >= least - slack).all()


@examples(15)
@given(
    st.sampled_from([1, 2, 3]).flatmap(lambda n: st.tuples(st.just(n), queries_and_keys(n))),
    THRESHOLDS,
    st.none() | st.integers(1, 5),
    COUNTS,
    COUNTS,
)
def test_antidiagonal(given, threshold, most, sinks, local):
    stride, (q, k, block, causal) = given
    how = {"block": block, "causal": causal, "sinks": sinks, "local": local, "stride": stride}
    chosen = selection.antidiagonal(q, k, threshold=threshold, most=most, **how)
    kept = kept_blocks(chosen, q, k, block, causal)
    of_map = q.shape[1], k.shape[1], block, causal, sinks, local
    weights, slack = scored(plain_selection.antidiagonal, q, k, block, causal, stride)
    check_enough(kept, weights, plain_selection.always(*of_map), slack, threshold, most)


@examples(15)
@given(queries_and_keys(), st.integers(0, 6), st.integers(0, 6), st.integers(1, 70))
def test_vertical_slash(given, vertical, slash, last):
    """Every block with a token on one of the keys, or of the distances."""
    q, k, block, _ = given
    how = {"block": block, "vertical": vertical, "slash": slash, "last": last}
    chosen = selection.vertical_slash(q, k, **how)
    kept = kept_blocks(chosen, q, k, block, True)
    nq, nk = q.shape[1], k.shape[1]
    keys, distances = plain_selection.vertical_slash(q, k, last, np.float64)
    best = [
        np.argsort(-x, axis=-1, kind="stable")[..., :n]
        for x, n in ((keys, vertical), (distances, slash))
    ]
    i, j = np.indices((nq, nk))
    own = i + nk - nq
    want = np.zeros(kept.shape, bool)
    for b, h in np.ndindex(kept.shape[:2]):
        cells = (np.isin(j, best[0][b, h]) | np.isin(own - j, best[1][b, h])) & (j <= own)
        want[b, h, i[cells] // block[0], j[cells] // block[1]] = True
    np.testing.assert_array_equal(kept, want)
