"""Rabe and Staats, "Self-attention does not need O(n²) memory" (arXiv 2112.05682), as B.5 has it.

Queries go chunk by chunk. Each chunk of keys is summarised by a temporary output, a sum and a
maximum; when all are there, the summaries are combined into the output. The backward pass is
gradient checkpointing: it computes the summaries of a chunk of queries again, and the score matrix
of each pair of chunks once more, and differentiates both. The maxima get no gradient, as in their
code. Within a pair of chunks everything is a call of its own, as in Algorithm 0: S and P of the
pair lie in HBM between the calls.

One head, as in :mod:`experiments.libraries.paper_algorithms`.
"""

import math

import numpy as np

from experiments.libraries.hbm import Accesses, invert, masked_scores, row_blocks, shift

#: Queries of a chunk in their code.
QUERY_CHUNK = 1024


def chunk_sizes(n, query_chunk=QUERY_CHUNK):
    """Queries and keys of a chunk, of keys √n as their section 3 has it."""
    return min(query_chunk, n), math.isqrt(n - 1) + 1


def rabe_staats_forward(hbm, scale=None, keep=None, query_chunk=QUERY_CHUNK):
    """From Q, K, V in ``hbm``, leave O there.

    Parameters
    ----------
    hbm : HBM
    scale : float, optional
        Default ``head_dim**-0.5``.
    keep : bool array (n, n), optional
        MASK of the paper; it is applied on chip.
    query_chunk : int
        Queries of a chunk.
    """
    queries, keys, scale, keep = _setup(hbm, scale, keep, query_chunk)
    hbm.allocate("O", hbm["Q"].shape)
    for r in queries:
        _summarise(hbm, r, keys, scale, keep)
        out, _, _ = _combine(hbm)
        hbm.store("O", out, r)
        hbm.free("outputs", "sums", "maxima")


def rabe_staats_backward(hbm, scale=None, keep=None, query_chunk=QUERY_CHUNK):
    """From Q, K, V and dO in ``hbm``, leave dQ, dK and dV there: no result of the forward pass."""
    queries, keys, scale, keep = _setup(hbm, scale, keep, query_chunk)
    for name in ("dQ", "dK", "dV"):
        hbm.allocate(name, hbm["Q"].shape, 0)
    for r in queries:
        _summarise(hbm, r, keys, scale, keep)
        hbm.recomputed["S"] += sum((r.stop - r.start) * (c.stop - c.start) for c in keys)
        hbm.recomputed["temporary O"] += hbm["outputs"].size
        _differentiate_combination(hbm, r)
        for j, c in enumerate(keys):
            _differentiate_summary(hbm, r, j, c, scale, keep[r, c])
        hbm.free("outputs", "sums", "maxima")


def _setup(hbm, scale, keep, query_chunk):
    n, head_dim = hbm["Q"].shape
    queries, keys = (row_blocks(n, size) for size in chunk_sizes(n, query_chunk))
    scale = head_dim**-0.5 if scale is None else scale
    return queries, keys, scale, np.ones((n, n), bool) if keep is None else keep


def _weights(hbm, r, c, scale, keep, m=None):
    """P of a pair of chunks, which it leaves in HBM after S, and its maxima."""
    hbm.store("S", masked_scores(hbm.load("Q", r), hbm.load("K", c), scale, keep))
    s = hbm.load("S")
    m = s.max(axis=1) if m is None else m
    p = np.exp(s - shift(m)[:, None])
    hbm.store("P", p)
    return p, m


def _summarise(hbm, r, keys, scale, keep):
    """The summaries of all chunks of keys for one of queries, ``outputs``, ``sums``, ``maxima``."""
    rows, head_dim = r.stop - r.start, hbm["Q"].shape[1]
    hbm.allocate("outputs", (len(keys), rows, head_dim))
    hbm.allocate("sums", (len(keys), rows))
    hbm.allocate("maxima", (len(keys), rows))
    for j, c in enumerate(keys):
        p, m = _weights(hbm, r, c, scale, keep[r, c])
        hbm.store("sums", p.sum(axis=1), j)
        hbm.store("maxima", m, j)
        hbm.store("outputs", hbm.load("P") @ hbm.load("V", c), j)
        hbm.free("S", "P")


def _combine(hbm):
    """O of a chunk of queries, the factor of each summary, and the sum of all."""
    maxima = hbm.load("maxima")
    factors = np.exp(maxima - shift(maxima.max(axis=0)))
    total = (factors * hbm.load("sums")).sum(axis=0)
    out = (factors[..., None] * hbm.load("outputs")).sum(axis=0)
    return invert(total) * out, factors, total


def _differentiate_combination(hbm, r):
    """The gradients of the summaries take the place of ``outputs`` and ``sums``."""
    out, factors, total = _combine(hbm)
    scaled = invert(total) * hbm.load("dO", r)
    hbm.store("outputs", factors[..., None] * scaled)
    hbm.store("sums", -factors * (scaled * out).sum(axis=1))


def _differentiate_summary(hbm, r, j, c, scale, keep):
    """Through P V, the sum of P and exp of one pair of chunks, of which P is computed again."""
    p, _ = _weights(hbm, r, c, scale, keep, hbm.load("maxima", j))
    hbm.recomputed["S"] += p.size
    d_out, v = hbm.load("outputs", j), hbm.load("V", c)
    hbm.store("dV", hbm.load("dV", c) + hbm.load("P").T @ d_out, c)
    hbm.store("dP", d_out @ v.T + hbm.load("sums", j)[:, None])
    hbm.store("dS", hbm.load("P") * hbm.load("dP"))
    hbm.store("dQ", hbm.load("dQ", r) + scale * (hbm.load("dS") @ hbm.load("K", c)), r)
    hbm.store("dK", hbm.load("dK", c) + scale * (hbm.load("dS").T @ hbm.load("Q", r)), c)
    hbm.free("S", "P", "dP", "dS")


def rabe_staats_forward_accesses(n, head_dim, query_chunk=QUERY_CHUNK):
    """Exact accesses of `rabe_staats_forward`."""
    nd, (n_row, n_col), summaries = n * head_dim, _chunks(n, query_chunk), _summaries(n, head_dim)
    reads = n_col * nd + 2 * n_row * nd + 2 * n * n + summaries
    return Accesses(reads, 2 * n * n + summaries + nd)


def rabe_staats_backward_accesses(n, head_dim, query_chunk=QUERY_CHUNK):
    """Exact accesses of `rabe_staats_backward`."""
    nd, (n_row, n_col) = n * head_dim, _chunks(n, query_chunk)
    sums = n_col * n
    again = rabe_staats_forward_accesses(n, head_dim, query_chunk)
    reads = again.reads + nd  # and dO, for the gradients of the summaries
    reads += 2 * sums + n_col * nd  # maxima, and the gradients of the summaries
    reads += n_col * 3 * nd + n_row * 5 * nd + 6 * n * n  # Q, Q, dQ; K, V, dV, K, dK; S, P, P, ...
    writes = again.writes - nd + 3 * nd + n_col * nd + sums
    return Accesses(reads, writes + 2 * n_row * nd + n_col * nd + 4 * n * n)


def _chunks(n, query_chunk=QUERY_CHUNK):
    return [-(-n // size) for size in chunk_sizes(n, query_chunk)]


def _summaries(n, head_dim):
    """Elements of all temporary outputs, sums and maxima."""
    return _chunks(n)[1] * n * (head_dim + 2)


def theta_rabe_staats(n, head_dim):
    """Order of growth: that of Algorithm 0, and a temporary output for each of √n chunks."""
    return n * n + math.sqrt(n) * n * head_dim
