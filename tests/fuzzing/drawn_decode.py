"""Strategies of what `nbflash.decode` takes besides its arrays, and its plain definition."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from fuzzing import budgets, drawn_masks, drawn_scores, plain_attention
from fuzzing.drawn_masks import SEEDS
from fuzzing.drawn_problems import ORDERS, SCALES, normal
from fuzzing.examples import Brief
from hypothesis import strategies as st

from nbflash import testing

DTYPES = np.float32, np.float64, np.float16, ml_dtypes.bfloat16
HEAD_DIMS = st.sampled_from([1, 2, 5, 16, 64, 130])


@dataclass
class Plain(Brief):
    """Of one call: the scale, the score, and of each sequence b of n keys the pairs that are left.

    ``keep[b]`` is (heads, q_len, n).
    """

    scale: float | None
    keep: list
    drawn: drawn_scores.DrawnScore
    text: str

    def __repr__(self):
        return self.text


@st.composite
def drawn_options(draw, batch, q_len, heads, lengths, capacity, dtype, bare=False):
    """Options of the call and a `Plain` of it; ``bare``: without a window and a score."""
    options, scale, mask, text = {}, draw(SCALES), None, "causal"
    if scale is not None:
        options["scale"] = scale
    if draw(st.booleans()):
        n = draw(st.integers(max(int(lengths.max(initial=0)), 1), capacity))
        drawn = draw(drawn_masks.of_heads(q_len, n, batch, heads))
        options["mask"], text = drawn.mask, drawn.text
        mask = np.broadcast_to(drawn.cells, (batch, heads, q_len, n))
    windows = st.none() | st.tuples(*[st.none() | st.integers(0, 20)] * 2)
    window = None if bare else draw(windows)
    if window is not None:
        options["window"] = window
    keep = []
    for b, n in enumerate(lengths.tolist()):
        own, key = np.arange(n - q_len, n)[:, None], np.arange(n)
        pairs = key <= own if mask is None else mask[b, ..., :n]
        pairs = np.broadcast_to(pairs, (heads, q_len, n))
        left, right = window or (None, None)
        pairs = pairs & (left is None or key >= own - left) & (right is None or key <= own + right)
        keep.append(pairs)
    scores = scores_of_positions(batch, heads, capacity, dtype)
    drawn = drawn_scores.NONE if bare else draw(scores)
    if drawn.score is not None:  # tokens before the first key attend nothing
        options["score"] = drawn.score
        own = [np.arange(n - q_len, n) for n in lengths.tolist()]
        keep = [x & (i >= 0)[:, None] for x, i in zip(keep, own, strict=True)]
    return options, Plain(scale, keep, drawn, f"{text}, {options}")


@st.composite
def contiguous(draw, most=90, dtypes=DTYPES, head_dims=HEAD_DIMS, bare=False):
    """q and caches in any layout, lengths, options, and NaN wherever nobody looks."""
    rng, batch = np.random.default_rng(draw(SEEDS)), draw(st.integers(1, 3))
    q_len = draw(st.integers(1, 7))
    heads_kv, head_dim = draw(st.integers(1, 3)), draw(head_dims)
    heads, capacity = heads_kv * draw(st.integers(1, 3)), draw(st.integers(1, most))
    lengths = np.array([draw(st.integers(0, capacity)) for _ in range(batch)], np.int32)
    dtype = draw(st.sampled_from(dtypes))
    q = normal(rng, (batch, q_len, heads, head_dim), dtype)
    k, v = normal(rng, (2, batch, capacity, heads_kv, head_dim), dtype)
    sizes = batch, q_len, heads, lengths, capacity
    options, plain = draw(drawn_options(*sizes, dtype, bare))
    for b, n in enumerate(lengths):
        groups = plain.keep[b].reshape(heads_kv, heads // heads_kv * q_len, n)
        for x in (k, v):
            x[b, n:] = np.nan
            x[b, :n][~groups.any(axis=1).T] = rng.choice([np.nan, np.inf])
    q, k, v = (draw(st.sampled_from(ORDERS))(x) for x in (q, k, v))
    return q, k, v, lengths, options, plain


@st.composite
def scores_of_positions(draw, batch, heads, capacity, dtype):
    """A score of positions: query i of a sequence of n keys is at n − q_len + i."""
    kinds = [x for x in drawn_scores.chains(dtype) if x not in ("slope", "chain")]
    kind = draw(st.sampled_from(kinds))
    rng = np.random.default_rng(draw(SEEDS))
    cap, reach = draw(st.floats(0.5, 30)), draw(st.integers(0, 6))
    sizes = [n if draw(st.booleans()) else 1 for n in (batch, heads, capacity, capacity)]
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32).astype(float)
    return {
        "none": lambda: drawn_scores.NONE,
        "softcap": lambda: drawn_scores.softcap(cap),
        "alibi": lambda: drawn_scores.alibi(normal(heads), 0),
        "relative": lambda: drawn_scores.relative(normal(heads, 2 * reach + 1), 0),
        "bias": lambda: drawn_scores.bias(normal(*sizes)),
        "bent": lambda: drawn_scores.bent(float(normal(1)[0]), normal(heads)),
    }[kind]()


def _exact(q, k, v, plain, b):
    """``(out, lse)`` of one sequence in float64."""
    q_len, heads, head_dim = q.shape
    scale = head_dim**-0.5 if plain.scale is None else plain.scale
    out, lse = np.zeros(q.shape), np.full((heads, q_len), -np.inf)
    for h, i in np.ndindex(heads, q_len):
        keys, g = np.flatnonzero(plain.keep[b][h, i]), h // (heads // k.shape[1])
        s = scale * (k[keys, g].astype(np.float64) @ q[i, h].astype(np.float64))
        place = b, h, len(k) - q_len + i, keys
        p, lse[h, i], _ = plain_attention.softmax(s, plain.drawn.stages, *place)
        out[i, h] = p @ v[keys, g].astype(np.float64)
    return out, lse


def _low(q, k, v, plain, b, batch):
    """Plain runs in the precision of q, of which a score gets whole sequences."""
    rng, k, v = np.random.default_rng(0), k.astype(q.dtype), v.astype(q.dtype)
    for _ in range(budgets.runs_for(q[..., 0].size)):
        if plain.drawn.score is None:
            yield _low_of_keys(rng, q, k, v, plain, b)
        else:
            order = rng.permutation(q.shape[-1])
            yield _low_of_positions(q[..., order], k[..., order], v, plain, b, batch)


def _low_of_keys(rng, q, k, v, plain, b):
    """With the keys in another order, among as many that nobody attends."""
    order = rng.permutation(2 * len(k))
    wide = [np.concatenate([x, np.zeros_like(x)])[order][None] for x in (k, v)]
    keep = np.concatenate([plain.keep[b], np.zeros_like(plain.keep[b])], -1)[..., order]
    out, lse = testing.low_precision(q[None], *wide, keep, plain.scale)
    return out[0], lse[0]


def _low_of_positions(q, k, v, plain, b, batch):
    """All rows of the sequence, of which the last ones are q."""
    (q_len, heads, head_dim), n = q.shape, len(k)
    last = min(q_len, n)
    rows, keep = np.zeros((batch, n, heads, head_dim), q.dtype), np.zeros((heads, n, n), bool)
    rows[b, n - last :], keep[:, n - last :] = q[q_len - last :], plain.keep[b][:, q_len - last :]
    keys = [np.broadcast_to(x, (batch, *x.shape)) for x in (k, v)]
    found = testing.low_precision(rows, *keys, keep, plain.scale, plain.drawn.score)
    out, lse = np.zeros(q.shape, q.dtype), np.full((heads, q_len), -np.inf, found[1].dtype)
    out[q_len - last :], lse[:, q_len - last :] = (
        found[0][b, n - last :],
        found[1][b, :, n - last :],
    )
    return out, lse


def check(got, q, held, plain):
    """Hold ``(out, lse)`` of a call to budgets, every sequence to its own.

    Parameters
    ----------
    held : list of (k, v)
        Of each sequence the keys and values that it has, (n, heads_kv, head_dim).
    """
    for b, (k, v) in enumerate(held):
        exact = _exact(q[b], k, v, plain, b)
        runs = [
            next(_low(q[b].astype(real), k, v, plain, b, len(q))) for real in budgets.PRECISIONS
        ]
        for name, *values in zip(("out", "lse"), exact, *runs, strict=True):
            budgets.check_yardstick(f"{name}[{b}]", *values)
        draws = zip(*_low(q[b], k, v, plain, b, len(q)), strict=True)
        for name, x, want, low in zip(("out", "lse"), got, exact, draws, strict=True):
            budgets.check(f"{name}[{b}]", x[b], want, low)
