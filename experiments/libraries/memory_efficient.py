"""Appendix B.1 and B.2: attention with O(n) extra memory, and with a quadratic number of accesses.

The normalisers of all rows come first, then each sum on its own: a row of the result is on chip,
with O(head_dim) elements, while all rows that it sums over are read anew. Equations (1) to (6) are
named in the right margin. One thing is added: the seeds leave out the maximum "for simplicity";
here L_i is kept as its logarithm, which is one number a row too.

One head, as in :mod:`experiments.libraries.paper_algorithms`.
"""

import numpy as np

from experiments.libraries.hbm import Accesses, shift


def memory_efficient_forward(hbm, scale=None, keep=None):
    """B.1. From Q, K, V in ``hbm``, leave O and L = log Σ exp there.

    Parameters
    ----------
    hbm : HBM
    scale : float, optional
        Default ``head_dim**-0.5``.
    keep : bool array (n, n), optional
        MASK of the paper; it is applied on chip.
    """
    n, scale, keep = _setup(hbm, scale, keep)
    hbm.allocate("L", n)
    for i in range(n):
        s = _scores(hbm.load("K"), hbm.load("Q", i), scale, keep[i])
        m = shift(s.max())
        with np.errstate(divide="ignore"):
            hbm.store("L", m + np.log(np.exp(s - m).sum()), i)  # (1)
    hbm.allocate("O", hbm["Q"].shape)
    for i in range(n):
        s = _scores(hbm.load("K"), hbm.load("Q", i), scale, keep[i])
        hbm.store("O", _weights(s, hbm.load("L", i)) @ hbm.load("V"), i)  # (2)


def memory_efficient_backward(hbm, scale=None, keep=None):
    """B.2. From Q, K, V, O, dO and L in ``hbm``, leave dQ, dK and dV there, and D."""
    n, scale, keep = _setup(hbm, scale, keep)
    for name in ("dQ", "dK", "dV"):
        hbm.allocate(name, hbm["Q"].shape)
    hbm.allocate("D", n)
    for j in range(n):
        s = _scores(hbm.load("Q"), hbm.load("K", j), scale, keep[:, j])
        hbm.store("dV", _weights(s, hbm.load("L")) @ hbm.load("dO"), j)  # (3)
    for i in range(n):
        hbm.store("D", hbm.load("dO", i) @ hbm.load("O", i), i)  # (4)
    for i in range(n):
        k = hbm.load("K")
        p = _weights(_scores(k, hbm.load("Q", i), scale, keep[i]), hbm.load("L", i))
        ds = p * (hbm.load("V") @ hbm.load("dO", i) - hbm.load("D", i))
        hbm.store("dQ", scale * (ds @ k), i)  # (5)
    for j in range(n):
        q = hbm.load("Q")
        p = _weights(_scores(q, hbm.load("K", j), scale, keep[:, j]), hbm.load("L"))
        ds = p * (hbm.load("dO") @ hbm.load("V", j) - hbm.load("D"))
        hbm.store("dK", scale * (ds @ q), j)  # (6)
    hbm.recomputed["S"] += 3 * n * n


def memory_efficient_forward_accesses(n, head_dim):
    """Exact accesses of `memory_efficient_forward`."""
    nd, streamed = n * head_dim, n * n * head_dim
    return Accesses(2 * nd + n + 3 * streamed, nd + n)


def memory_efficient_backward_accesses(n, head_dim):
    """Exact accesses of `memory_efficient_backward`."""
    nd, streamed = n * head_dim, n * n * head_dim
    return Accesses(7 * nd + 2 * n + 6 * streamed + 3 * n * n, 3 * nd + n)


def theta_memory_efficient(n, head_dim):
    """Order of growth of B.1 and B.2: every row of the result reads all rows again, N² d."""
    return n * n * head_dim


def _setup(hbm, scale, keep):
    n, head_dim = hbm["Q"].shape
    scale = head_dim**-0.5 if scale is None else scale
    return n, scale, np.ones((n, n), bool) if keep is None else keep


def _scores(rows, row, scale, keep):
    return np.where(keep, scale * (rows @ row), -np.inf)


def _weights(s, lse):
    return np.exp(s - shift(lse))
