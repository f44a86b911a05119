"""What the selections share: arguments checked, means and scores of blocks, choices among them."""

import functools
from typing import Any, NamedTuple

import numpy as np

import masks
from masks import _check
from nbflash.cuda import cublas
from nbflash.definitions.constants import ITEMSIZE
from nbflash.inputs.arrays import library, native
from nbflash.inputs.block_map import BlockMap
from nbflash.inputs.problem import check_flag, check_forward


class Blocks(NamedTuple):
    """q and k cut into blocks.

    Attributes
    ----------
    xp : module
        NumPy, or CuPy.
    q, k : array
        As given.
    problem : nbflash.inputs.problem.Problem
    block : (int, int)
        Queries and keys of a block.
    causal : bool
    """

    xp: Any
    q: Any
    k: Any
    problem: Any
    block: tuple[int, int]
    causal: bool

    @property
    def shape(self):
        """Queries and keys."""
        return self.problem.nq, self.problem.nk

    @property
    def grid(self):
        """Rows and columns of blocks."""
        return tuple(-(-n // size) for n, size in zip(self.shape, self.block, strict=True))

    @property
    def last_key(self):
        """The last key that a query of each row may see, causal or not: int64 (rows,)."""
        return _last_key(self.xp, self.shape, self.block[0], self.causal)

    @property
    def within(self):
        """The intervals of the map."""
        return _causal(*self.shape) if self.causal else None

    @property
    def admissible(self):
        """Whether any pair of a block may be attended: bool (rows, columns)."""
        return self.xp.arange(self.grid[1]) * self.block[1] <= self.last_key[:, None]

    def always(self, sinks, local):
        """The first ``sinks`` columns, and of each row the ``local`` last admissible ones."""
        column, last = self.xp.arange(self.grid[1]), self.last_key[:, None] // self.block[1]
        near = (column <= last) & (column > last - local)
        return ((column < sinks) | near) & self.admissible

    def map_of(self, indices, counts=None):
        """The block map of lists."""
        return BlockMap(indices, counts, shape=self.shape, block=self.block, within=self.within)

    def map_of_dense(self, keep):
        """The block map of booleans."""
        return BlockMap.from_dense(keep, shape=self.shape, block=self.block, within=self.within)


@functools.lru_cache(maxsize=64)
def _causal(nq, nk):
    """One mask for all maps of a shape: its hash, part of the key of a plan, is computed once."""
    return masks.causal(nq, nk)


def _last_key(xp, shape, size, causal):
    """See `Blocks.last_key`; rows have ``size`` queries."""
    (nq, nk), rows = shape, -(-shape[0] // size)
    if not causal:
        return xp.full(rows, nk - 1)
    return xp.minimum((xp.arange(rows) + 1) * size, nq) - 1 + (nk - nq)


@functools.lru_cache(maxsize=64)
def _last_column(shape, block, causal):
    """The last admissible column of each row, as the bytes of int32."""
    return (_last_key(np, shape, block[0], causal) // block[1]).astype(np.int32).tobytes()


def check_blocks(q, k, block, causal):
    """`Blocks` of arguments, and a context in which their device is current."""
    q, k = native(q=q, k=k)
    problem = check_forward(q, k, k)
    pair = block if isinstance(block, tuple) else (block, block)
    if len(pair) != 2:
        raise ValueError(f"block={block!r}: must be one integer or a pair")
    pair = tuple(_check.integer("block", size, 1) for size in pair)
    if problem.empty:
        raise ValueError(
            f"q and k must have elements to choose by, got shapes {q.shape}, {k.shape}"
        )
    xp, device = library(q)
    return Blocks(xp, q, k, problem, pair, check_flag("causal", causal)), device


def kernels(xp):
    """What computes on a CUDA device; None for NumPy, whose results are the specification."""
    if xp is np:
        return None
    from nbflash.backends.block_selection import host

    return host


def means(xp, x, size):
    """Means of so many tokens each, of what there is of the last: float32 (b, heads, blocks, d)."""
    if on_device := kernels(xp):
        return on_device.block_means(x, size)
    batch, n, heads, head_dim = x.shape
    count = -(-n // size)
    padded = xp.zeros((batch, count * size, heads, head_dim), np.float32)
    padded[:, :n] = x
    total = padded.reshape(batch, count, size, heads, head_dim).sum(axis=2)
    tokens = xp.minimum(size, n - xp.arange(count) * size).astype(np.float32)
    return (total / tokens[:, None, None]).transpose(0, 2, 1, 3)


def products(xp, q, k):
    """``q kᵀ``, (b, heads, m, d) and (b, heads_kv, n, d) to (b, heads, m, n)."""
    batch, heads, m, head_dim = q.shape
    heads_kv, n = k.shape[1:3]
    grouped = q.reshape(batch, heads_kv, heads // heads_kv * m, head_dim)
    return xp.matmul(grouped, k.swapaxes(2, 3)).reshape(batch, heads, m, n)


def token_products(xp, q, k):
    """``q kᵀ``, (b, m, heads, d) and (b, heads_kv, n, d) to float32 (b, heads, m, n)."""
    if xp is not np and ITEMSIZE[k.dtype.name] == 2:
        return cublas.products(q, k)
    q, k = (x.astype(np.float32, copy=False) for x in (q, k))
    return products(xp, q.transpose(0, 2, 1, 3), k)


def softmax(xp, scores, where):
    """Softmax over the last axis of what may be attended; rows of nothing are 0.

    The weight of NaN and of ∞ is NaN. Others of such a row are not divided by the sum.
    """
    scores = xp.where(where, scores, -np.inf)
    top = xp.where(xp.isnan(scores), -np.inf, scores).max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        weight = xp.exp(scores - xp.where(top == -np.inf, 0, top))
    total = weight.sum(axis=-1, keepdims=True)
    return weight / xp.where(total > 0, total, 1)


def descending(xp, scores):
    """Places of the last axis by falling score; equal ones in the order of their places."""
    return xp.argsort(-scores, axis=-1, kind="stable")


def ranked(blocks, scores, k, sinks, local):
    """The first ``k`` columns of each row by falling score, and how many of them are admissible.

    Those that always are chosen come first, those that are not admissible last. ``scores`` is (b,
    heads, rows, columns); int32 (b, heads, rows, k), and (b, heads, rows).
    """
    xp, on_device = blocks.xp, kernels(blocks.xp)
    if on_device and on_device.sorts(blocks.grid[1]):
        last = _last_column(blocks.shape, blocks.block, blocks.causal)
        scores = xp.ascontiguousarray(scores, np.float32)
        return on_device.best_blocks(scores, last, k, sinks, local)
    admissible = blocks.admissible
    scores = xp.where(blocks.always(sinks, local), np.inf, xp.where(admissible, scores, -np.inf))
    counts = xp.minimum(admissible.sum(axis=1), k).astype(np.int32)
    indices = descending(xp, scores)[..., :k].astype(np.int32)
    return indices, xp.broadcast_to(counts, scores.shape[:3])


def best(blocks, scores, topk, sinks, local):
    """The map of the ``topk`` admissible blocks of largest score, those that always are among them.

    ``scores`` is (b, heads, rows, columns).
    """
    return blocks.map_of(*ranked(blocks, scores, min(topk, blocks.grid[1]), sinks, local))


def enough(blocks, weights, threshold, most, sinks, local):
    """The map of the fewest blocks of a row whose weights reach a share of the row's, or ``most``.

    Those that always are chosen come first, and count.
    """
    xp, always, columns = blocks.xp, blocks.always(sinks, local), blocks.grid[1]
    weights = xp.where(blocks.admissible, weights, 0)
    order, _ = ranked(blocks, weights, columns, sinks, local)
    sorted_weights = xp.take_along_axis(weights, order, axis=-1)
    before = xp.cumsum(sorted_weights, axis=-1) - sorted_weights
    needed = (before < threshold * weights.sum(axis=-1, keepdims=True)) & (sorted_weights > 0)
    always = xp.take_along_axis(xp.broadcast_to(always, weights.shape), order, axis=-1)
    counts = (needed | always).sum(axis=-1)
    k = min(most, columns)
    return blocks.map_of(order[..., :k], xp.minimum(counts, k).astype(np.int32))


def check_count(name, value, least=0):
    """An integer of a selection."""
    return _check.integer(name, value, least)


def check_threshold(value):
    """A share, above 0."""
    value = _check.fraction("threshold", value)
    if value == 0:
        raise ValueError("threshold=0.0: must be above 0")
    return value
