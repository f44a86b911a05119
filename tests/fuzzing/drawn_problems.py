"""Strategies of calls of attention: arrays of any layout, masks, and every other argument."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from axes import LAYOUTS, LEVELS
from fuzzing import drawn_masks, plain_masks
from fuzzing.drawn_masks import SEEDS
from fuzzing.drawn_scores import NONE, DrawnScore, drawn_scores
from fuzzing.examples import Brief
from hypothesis import strategies as st

import masks
import nbflash

DTYPES = np.float32, np.float32, np.float64, np.float16, ml_dtypes.bfloat16
HEAD_DIMS = st.one_of(st.integers(1, 9), st.sampled_from([16, 32, 33, 64, 100, 128, 256]))
SIDES = st.one_of(st.integers(0, 9), st.integers(1, 40), st.integers(60, 70))
# Of a block map. Those that CUDA kernels take divide tiles of a few rows, or are several of them.
BLOCKS, BLOCKS_OF_KERNELS = st.integers(1, 20), st.sampled_from([16, 32])
# Not below what the yardstick rounds to 0 in float32.
HUNDREDTHS = st.integers(-200, 200).map(lambda n: n / 100)
SCALES = st.sampled_from([scale for scale, _ in LEVELS]) | HUNDREDTHS
ORDERS = sorted({order for orders in LAYOUTS.values() for order in orders}, key=repr)


def _reversed(axis):
    def order(x):
        back = (slice(None),) * axis + (slice(None, None, -1),)
        return np.ascontiguousarray(x[back])[back]

    return order


def _repeated(axis):
    """Along the axis the first element alone, by strides of 0."""
    return lambda x: np.broadcast_to(x.take([0] if x.shape[axis] else [], axis), x.shape)


LAYOUT = st.sampled_from([*ORDERS, *map(_reversed, range(3)), *map(_repeated, range(3))])


@dataclass(frozen=True)
class Call(Brief):
    """Arguments of `nbflash.attention`, and what the plain definition takes in their place."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray | None
    mask: object
    keep: np.ndarray
    drawn: DrawnScore
    options: dict
    text: str

    def __repr__(self):
        dlse = None if self.dlse is None else self.dlse.shape
        arrays = {x: _form(getattr(self, x)) for x in ("q", "k", "v", "dout")}
        return f"Call({arrays}, dlse={dlse}, {self.text}, {self.drawn.text}, {self.options})"

    @property
    def arrays(self):
        return self.q, self.k, self.v


@st.composite
def shapes(draw, sides, head_dims, small):
    """batch, nq, nk, heads, heads_kv and head_dim."""
    most = 2 if small else 3
    nq, heads_kv = draw(sides), draw(st.integers(1, most))
    nk = draw(st.just(nq) | sides)
    heads = heads_kv * draw(st.integers(1, most))
    return draw(st.integers(1, most)), nq, nk, heads, heads_kv, draw(head_dims)


def normal(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


@st.composite
def block_maps(draw, batch, nq, nk, heads, heads_kv, blocks):
    """A `BlockMap` beside its dense definition; entries behind the counts are out of range."""
    rng = np.random.default_rng(draw(SEEDS))
    block = draw(blocks), draw(blocks)
    rows, columns = -(-nq // block[0]), -(-nk // block[1])
    own = draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads, heads_kv]))
    k = draw(st.integers(0, 5))
    indices = rng.integers(0, max(columns, 1), (*own, rows, k)).astype(np.int32)
    counts = rng.integers(0, k + 1, indices.shape[:3]).astype(np.int32)
    keep = np.zeros((batch, heads, nq, nk), bool)
    for b, h, i, j in np.ndindex(keep.shape):
        at = b % own[0], h // (heads // own[1]), i // block[0]
        keep[b, h, i, j] = j // block[1] in indices[at][: counts[at]]
    indices[np.arange(k) >= counts[..., None]] = draw(st.sampled_from([0, 10**6, -1]))
    counts, indices = (None, indices) if not k else (counts, indices)
    within = draw(st.none() | st.just(masks.causal(nq, nk)))
    keep &= plain_masks.causal(nq, nk) if within is not None else True
    how = {"shape": (nq, nk), "block": block, "within": within}
    text = f"BlockMap of {indices.shape}, shape={(nq, nk)}, block={block}, within={within}"
    return nbflash.BlockMap(indices, counts, **how), keep, text


@st.composite
def attended(draw, batch, nq, nk, heads, heads_kv, blocks):
    """``mask``, ``causal`` and ``window``; the pairs that are left, and a text."""
    keep, options, text = np.ones((batch, heads, nq, nk), bool), {}, "no mask"
    kinds = ["none", "mask", "mask", "mask", "map"] if nq and nk else ["none"]
    kind = draw(st.sampled_from(kinds))
    mask = None
    if kind == "mask":
        drawn = draw(drawn_masks.of_heads(nq, nk, batch, heads))
        mask, text, keep = drawn.mask, drawn.text, keep & drawn.cells
    if kind == "map":
        mask, keep, text = draw(block_maps(batch, nq, nk, heads, heads_kv, blocks))
    if draw(st.integers(0, 3)) == 3:
        options["causal"] = True
        keep = keep & plain_masks.causal(nq, nk)
    if draw(st.integers(0, 3)) == 3:
        left, right = options["window"] = tuple(draw(st.none() | st.integers(0, 9)) for _ in "lr")
        keep = keep & plain_masks.window(nq, nk, left=left, right=right)
    return mask, keep, options, text


def poisoned(rng, arrays, keep, heads_kv):
    """NaN or an infinity in the keys and values that nobody attends, and in idle rows."""
    q, k, v, dout = (x.copy() for x in arrays)
    batch, heads, _, nk = keep.shape
    used = keep.any(axis=2).reshape(batch, heads_kv, heads // heads_kv, nk).any(axis=2)
    idle = ~keep.any(axis=3).swapaxes(1, 2)
    for x, where in ((k, ~used.swapaxes(1, 2)), (v, ~used.swapaxes(1, 2)), (q, idle)):
        x[where] = rng.choice([np.nan, np.inf, -np.inf])
    return q, k, v, dout


def kept(batch, heads, nq, nk, dropout, seed):
    """Which scores dropout keeps, told by attention itself: equal weights, a value for each key."""
    q, v = np.zeros((batch, nq, heads, max(nk, 1))), np.eye(nk, max(nk, 1))[None, :, None]
    v = np.broadcast_to(v, (batch, nk, heads, max(nk, 1)))
    out = nbflash.attention(q, np.zeros(v.shape), v, dropout=dropout, seed=seed)
    return out.swapaxes(1, 2)[..., :nk] > 0


def factors_of(call):
    """Of dropout, or None."""
    if not call.options.get("dropout"):
        return None
    probability = np.round(call.options["dropout"] * 2**15) / 2**15
    how = call.options["dropout"], call.options["seed"]
    return kept(*call.keep.shape, *how) / (1 - min(probability, 1 - 2.0**-15))


SEED_FORMS = (
    lambda seed, offset: (seed, offset),
    lambda seed, offset: np.array([seed, offset], np.uint64),
    lambda seed, offset: np.array([seed % 2**63, offset % 2**63], np.int64),
    lambda seed, offset: seed,
)


@st.composite
def calls(draw, sides=SIDES, dtypes=DTYPES, head_dims=HEAD_DIMS, scored=True, small=False):
    """``scored``: with any score and any dropout; ``small``: such as the simulator takes."""
    batch, nq, nk, heads, heads_kv, head_dim = draw(shapes(sides, head_dims, small))
    rng, dtype = np.random.default_rng(draw(SEEDS)), draw(st.sampled_from(dtypes))
    sizes = batch, nq, nk, heads, heads_kv
    mask, keep, options, text = draw(attended(*sizes, BLOCKS_OF_KERNELS if small else BLOCKS))
    of_q, of_k = (batch, nq, heads, head_dim), (batch, nk, heads_kv, head_dim)
    arrays = [normal(rng, shape, dtype) for shape in (of_q, of_k, of_k, of_q)]
    if draw(st.booleans()):
        arrays = poisoned(rng, arrays, keep, heads_kv)
    orders = [draw(st.sampled_from(ORDERS) if small else LAYOUT) for _ in arrays]
    arrays = [_laid_out(x, order) for x, order in zip(arrays, orders, strict=True)]
    wide = np.float64 if dtype == np.float64 else np.float32
    dlse = normal(rng, (batch, heads, nq), wide) if draw(st.booleans()) else None
    if (scale := draw(SCALES)) is not None or draw(st.booleans()):
        options["scale"] = scale
    of_scores = drawn_scores(batch, heads, nq, nk, dtype)
    drawn = draw(of_scores) if scored and nq and nk else NONE
    options |= {"score": drawn.score} if drawn.score is not None else {}
    if scored and draw(st.integers(0, 3)) == 3:
        options["dropout"] = draw(st.sampled_from([0.5, 0.1, 1 / 3, 0.875, 0.9999]))
        words = draw(st.tuples(*[st.integers(0, 2**64 - 1)] * 2))
        options["seed"] = draw(st.sampled_from(SEED_FORMS))(*words)
    return Call(*arrays, dlse, mask, keep, drawn, options, f"{text}, {np.dtype(dtype)}")


def _laid_out(x, order):
    """An array of no element has no layout; NaN is not spread over what is attended."""
    if not x.size or (getattr(order, "__qualname__", "").startswith("_repeated") and _any_nan(x)):
        return x
    return order(x)


def _form(x):
    return x.shape, x.dtype.name, x.strides


def _any_nan(x):
    return not np.isfinite(x.astype(np.float64)).all()
