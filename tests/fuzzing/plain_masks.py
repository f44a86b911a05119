"""The generators of `masks` as dense boolean arrays, written anew from their docstrings.

A function has the name and the arguments of the generator that it defines. Nothing of `masks` is
used here but in `random` and `bigbird`, whose cells are drawn: they check what is promised of them.
"""

import numpy as np

import masks


def _cells(nq, nk=None):
    """Column of queries, row of keys, and column of the queries' positions among the keys."""
    nk = nq if nk is None else nk
    i, j = np.arange(nq)[:, None], np.arange(nk)[None, :]
    return i, j, i + nk - nq


def _blocks(n, block):
    """Block row and block column of each cell."""
    i, j, _ = _cells(n)
    return i // block, j // block


def _and_causal(keep, is_causal):
    i, j, _ = _cells(len(keep))
    return keep & (j <= i) if is_causal else keep


def _of_all(nq, nk, condition):
    return np.array(np.broadcast_to(condition, (nq, nq if nk is None else nk)))


def dense(nq, nk=None):
    return _of_all(nq, nk, True)


def causal(nq, nk=None):
    _, j, p = _cells(nq, nk)
    return j <= p


def window(nq, nk=None, *, left=None, right=None):
    _, j, p = _cells(nq, nk)
    keep = _of_all(nq, nk, True)
    if left is not None:
        keep &= p - left <= j
    if right is not None:
        keep &= j <= p + right
    return keep


def prefix(n, prefix_len, *, nk=None):
    _, j, p = _cells(n, nk)
    return (j <= p) | (j < prefix_len)


def documents(lengths, lengths_k=None, *, causal=False):
    lengths_k = lengths if lengths_k is None else lengths_k
    keep = np.zeros((sum(lengths), sum(lengths_k)), bool)
    i = j = 0
    for nq, nk in zip(lengths, lengths_k, strict=True):
        keep[i : i + nq, j : j + nk] = window(nq, nk, right=0 if causal else None)
        i, j = i + nq, j + nk
    return keep


def documents_from_cu_seqlens(cu_seqlens, cu_seqlens_k=None, *, causal=False):
    lengths_k = None if cu_seqlens_k is None else np.diff(cu_seqlens_k).tolist()
    return documents(np.diff(cu_seqlens).tolist(), lengths_k, causal=causal)


def padding(lengths, nq, nk=None, *, causal=False):
    i, j, _ = _cells(nq, nk)
    entries = []
    for length in lengths:
        own = i if nk is None or nq == nk else length - nq + i
        keep = _of_all(nq, nk, j < length)
        entries.append(keep & (j <= own) if causal else keep)
    return per_batch(entries)


def chunked(n, chunk, *, causal=True, nk=None):
    _, j, p = _cells(n, nk)
    keep = p // chunk == j // chunk
    return keep & (j <= p) if causal else keep


def block_diagonal(n, block):
    row, col = _blocks(n, block)
    return row == col


def butterfly(n, block, *, stages=None, radix=2, causal=False):
    row, col = _blocks(n, block)
    differ = np.zeros((n, n), int)
    for digit in range(64):
        may_differ = stages is None or digit < stages
        differ += (row % radix != col % radix) * (1 if may_differ else 2)
        row, col = row // radix, col // radix
    return _and_causal(differ <= 1, causal)


def local(n, block, width=1, *, causal=False):
    row, col = _blocks(n, block)
    return _and_causal(abs(row - col) <= width, causal)


def strided(n, block, stride, width=1, *, causal=False):
    row, col = _blocks(n, block)
    return _and_causal((abs(row - col) <= width) | ((row - col) % stride == 0), causal)


def toeplitz(n, offsets, block=1, *, causal=False):
    row, col = _blocks(n, block)
    return _and_causal(np.isin(abs(row - col), offsets), causal)


def dilated(n, width, dilation, *, causal=False):
    i, j, _ = _cells(n)
    near = (abs(i - j) <= width * dilation) & ((i - j) % dilation == 0)
    return _and_causal(near, causal)


def fixed(n, block, stride, summary=1, *, causal=False):
    row, col = _blocks(n, block)
    keep = (row // stride == col // stride) | (col % stride >= stride - summary)
    return _and_causal(keep, causal)


def global_local(n, block, n_global=1, width=1, *, causal=False):
    row, col = _blocks(n, block)
    keep = (row < n_global) | (col < n_global) | (abs(row - col) <= width)
    return _and_causal(keep, causal)


def _whole_blocks(mask, n, block, causal):
    """The blocks that a mask of whole blocks has, and its cells."""
    keep, (row, col) = mask.dense(), _blocks(n, block)
    blocks = keep[::block, ::block]
    assert (keep == _and_causal(blocks[row, col], causal)).all(), "not of whole blocks"
    return blocks, keep


def random(n, block, density, seed=0, *, causal=False):
    mask = masks.random(n, block, density, seed, causal=causal)
    blocks, keep = _whole_blocks(mask, n, block, causal)
    total = np.tri(len(blocks)).sum() if causal else blocks.size
    assert blocks.diagonal().all(), "not all of the diagonal"
    assert blocks.sum() == max(round(density * total), len(blocks)), "another number of blocks"
    return keep


def bigbird(n, block, *, n_random=3, width=1, seed=0, causal=False):
    mask = masks.bigbird(n, block, n_random=n_random, width=width, seed=seed, causal=causal)
    blocks, keep = _whole_blocks(mask, n, block, causal)
    row, col = np.indices(blocks.shape)
    last = len(blocks) - 1
    always = (row % max(last, 1) == 0) | (col % max(last, 1) == 0) | (abs(row - col) <= width)
    possible = np.tri(len(blocks), dtype=bool) if causal else np.ones(blocks.shape, bool)
    assert blocks[always & possible].all(), "not all of the rim and the band"
    free = possible & ~always
    drawn = np.minimum(free.sum(axis=1), n_random)
    assert ((blocks & free).sum(axis=1) == drawn).all(), "another number of random blocks"
    assert not (blocks & ~possible).any(), "a later block"
    return keep


def sinks(n, sink, window, *, nk=None):
    _, j, p = _cells(n, nk)
    return (j <= p) & ((j < sink) | (p - j < window))


def vertical_slash(n, verticals, slashes):
    i, j, _ = _cells(n)
    return (j <= i) & (np.isin(j, verticals) | np.isin(i - j, slashes))


def axial(height, width, *, causal=False):
    i, j, _ = _cells(height * width)
    keep = (i // width == j // width) | (i % width == j % width)
    return _and_causal(keep, causal)


def neighborhood(shape, kernel, stride=1, dilation=1):
    given = kernel, stride, dilation
    given = [x if isinstance(x, tuple) else [x] * len(shape) for x in given]
    keep = np.ones((1, 1), bool)
    for n, k, s, d in zip(shape, *given, strict=True):
        keep = np.kron(keep, _neighborhood_of_a_line(n, k, s, d))
    return keep


def _neighborhood_of_a_line(n, kernel, stride, dilation):
    """A query's window is that of the middle of its group, moved to where the line has keys."""
    keep = np.zeros((n, n), bool)
    for q in range(n):
        line = range(q % dilation, n, dilation)
        own = line.index(q)
        middle = min(own // stride * stride + stride // 2, len(line) - 1)
        first = min(max(middle - kernel // 2, 0), len(line) - kernel)
        keep[q, line[first : first + kernel]] = True
    return keep


def tree(parents, prefix=0, nk=None):
    keep = np.zeros((len(parents), prefix + len(parents) if nk is None else nk), bool)
    for node, parent in enumerate(parents):
        keep[node, :prefix] = True
        keep[node] |= keep[parent] if parent >= 0 else False
        keep[node, prefix + node] = True
    return keep


def from_dense(array):
    return np.array(array)


def from_function(fn, nq, nk=None):
    nk = nq if nk is None else nk
    keep = np.zeros((nq, nk), bool)
    for i in range(nq):
        for j in range(nk):
            keep[i, j] = fn(np.int64(i), np.int64(j))
    return keep


def from_scipy(matrix, block=None, *, shape=None):
    blocks = matrix.toarray() != 0
    if matrix.format == "bsr":
        return blocks if shape is None else blocks[: shape[0], : shape[1]]
    i, j, _ = _cells(*shape)
    return blocks[i // block[0], j // block[1]]


def per_head(entries):
    """Of one batch entry: (1, heads, nq, nk)."""
    planes = [x[None, None] if x.ndim == 2 else x for x in entries]
    return _joined(planes, axis=1)


def per_batch(entries):
    planes = [x[None, None] if x.ndim == 2 else x for x in entries]
    return _joined(planes, axis=0)


def _joined(planes, axis):
    """Entries of one head, or one batch entry, serve all; a single entry stays what it was."""
    if len(planes) == 1:
        return planes[0][0, 0] if planes[0].shape[:2] == (1, 1) else planes[0]
    most = [max(x.shape[i] for x in planes) for i in (0, 1)]
    most[axis] = 1
    return np.concatenate([np.broadcast_to(x, (*most, *x.shape[2:])) for x in planes], axis)


def restrict(keep, q_idx=None, kv_idx=None):
    keep = keep if q_idx is None else keep[..., q_idx, :]
    return keep if kv_idx is None else keep[..., kv_idx]
