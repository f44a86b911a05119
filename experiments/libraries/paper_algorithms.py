"""FlashAttention's algorithms written out in NumPy, on a memory that counts its accesses.

One head, ``Q, K, V`` of shape (n, head_dim), float32 or float64, the paper's names. Every load and
store of the paper goes through `HBM`; everything else happens "on chip" and is free. The numbers
in the right margin are the lines of the algorithm named in the docstring:

=====================  ================================================================
`standard_forward`     Algorithm 0: S and P are written to HBM and read back
`flash_forward`        Algorithm 2 (1 with scale and mask): K/V outer loop; l, m, O in HBM
`block_sparse_forward` Algorithm 5: the same, skipping the blocks that are not live
`query_outer_forward`  FlashAttention-2, Algorithm 1: Q outer loop; l, m, O on chip
`standard_backward`    Algorithm 3
`flash_backward`       Algorithm 4
=====================  ================================================================

Each has an exact closed form of its accesses (``*_accesses``) and the paper's order of growth
(``theta_*``, Theorems 2 and 5 and Proposition 4). Algorithms 2, 4 and 5 take dropout: the forward
pass stores the state R of the random numbers, seed and offset of nbflash's Philox, and the backward
pass loads it and makes the same Z_ij block by block; without dropout these lines are left out. Two
guards are added to the paper's lines: a row that attends nothing in a block would compute
exp(-inf − (-inf)), and one that never attends anything would divide by l = 0; here it ends with
O = 0, l = 0, m = -inf. Appendix B.1, B.2 and B.5: `experiments.libraries.memory_efficient` and
`experiments.libraries.rabe_staats`.

>>> hbm = HBM(Q=q, K=k, V=v)
>>> flash_forward(hbm, sram=4096)
>>> hbm["O"], hbm.accesses.total
"""

import numpy as np

from experiments.libraries.hbm import Accesses, invert, masked_scores, row_blocks, shift
from nbflash.definitions import philox


def block_sizes(sram, head_dim):
    """Rows of the resident and of the streamed blocks for an SRAM of ``sram`` elements.

    Returns
    -------
    (int, int)
        ``ceil(M / 4d)`` and ``min(ceil(M / 4d), d)``: B_c and B_r of Algorithms 1 to 5, whose K/V
        blocks stay; for the query-outer order, where Q stays, they change places.
    """
    resident = -(-sram // (4 * head_dim))
    return resident, min(resident, head_dim)


def _setup(hbm, sram, scale, keep, live, query_outer=False):
    """Row blocks, column blocks, scale, MASK as an array and the live blocks."""
    n, head_dim = hbm["Q"].shape
    b_c, b_r = block_sizes(sram, head_dim)
    if query_outer:
        b_c, b_r = b_r, b_c
    rows, cols = row_blocks(n, b_r), row_blocks(n, b_c)
    scale = head_dim**-0.5 if scale is None else scale
    keep = np.ones((n, n), bool) if keep is None else keep
    live = np.ones((len(rows), len(cols)), bool) if live is None else np.asarray(live, bool)
    if live.shape != (len(rows), len(cols)):
        raise ValueError(f"live has shape {live.shape}, the blocks are {(len(rows), len(cols))}")
    return rows, cols, scale, keep, live


def _dropout(p_drop, state):
    """``draw(r, c)``: Z_ij of a block, 1 / (1 − p_drop) where a score is kept and 0 elsewhere."""
    if not p_drop:
        return lambda r, c: 1.0

    def draw(r, c):
        rows, cols = np.arange(r.start, r.stop)[:, None], np.arange(c.start, c.stop)
        return philox.kept_at(0, 0, rows, cols, p_drop, state) * philox.factor(p_drop)

    return draw


def _save_state(hbm, p_drop, state):
    """R, which is all that dropout leaves in HBM."""
    if p_drop:
        hbm.store("R", np.array(state, np.uint64))


def standard_forward(hbm, scale=None, keep=None):
    """Algorithm 0. From Q, K, V in ``hbm``, leave S, P and O there.

    Parameters
    ----------
    hbm : HBM
    scale : float, optional
        τ of the paper; default ``head_dim**-0.5``.
    keep : bool array (n, n), optional
        MASK of the paper; it is applied on chip.
    """
    _, _, scale, keep, _ = _setup(hbm, 1, scale, keep, None)
    hbm.store("S", masked_scores(hbm.load("Q"), hbm.load("K"), scale, keep))  # 1
    s = hbm.load("S")  # 2
    p = np.exp(s - shift(s.max(axis=1))[:, None])
    hbm.store("P", p * invert(p.sum(axis=1)))
    hbm.store("O", hbm.load("P") @ hbm.load("V"))  # 3


def flash_forward(hbm, sram, scale=None, keep=None, p_drop=0.0, state=(0, 0)):
    """Algorithm 2: exact attention, K/V outer loop. From Q, K, V, leave O, l and m in ``hbm``.

    Parameters
    ----------
    hbm, scale, keep
        As in `standard_forward`.
    sram : int
        The paper's M, in elements.
    p_drop : float
        Probability of dropout; unless it is 0, R is left in ``hbm`` too.
    state : (int, int)
        R: seed and offset.
    """
    n, head_dim = hbm["Q"].shape
    _save_state(hbm, p_drop, state)  # 1
    draw = _dropout(p_drop, state)
    rows, cols, scale, keep, _ = _setup(hbm, sram, scale, keep, None)  # 2, 4, 5
    hbm.allocate("O", (n, head_dim), 0)  # 3
    hbm.allocate("l", n, 0)
    hbm.allocate("m", n, -np.inf)
    for c in cols:  # 6
        k_j, v_j = hbm.load("K", c), hbm.load("V", c)  # 7
        for r in rows:  # 8
            _update_block(hbm, r, k_j, v_j, scale, keep[r, c], draw(r, c))  # 9 to 16


def block_sparse_forward(hbm, sram, live, scale=None, keep=None, p_drop=0.0, state=(0, 0)):
    """Algorithm 5: `flash_forward` over the live blocks alone.

    Parameters
    ----------
    live : bool array (ceil(n / B_r), ceil(n / B_c))
        The block mask M_ij; blocks outside it are never loaded. ``keep`` masks within them.
    """
    n, head_dim = hbm["Q"].shape
    _save_state(hbm, p_drop, state)  # 1
    draw = _dropout(p_drop, state)
    rows, cols, scale, keep, live = _setup(hbm, sram, scale, keep, live)  # 3, 4
    hbm.allocate("O", (n, head_dim), 0)  # 2
    hbm.allocate("l", n, 0)
    hbm.allocate("m", n, -np.inf)
    for j, c in enumerate(cols):  # 5
        k_j, v_j = hbm.load("K", c), hbm.load("V", c)  # 6
        for i, r in enumerate(rows):  # 7
            if live[i, j]:  # 8
                _update_block(hbm, r, k_j, v_j, scale, keep[r, c], draw(r, c))  # 9 to 16


def _update_block(hbm, r, k_j, v_j, scale, keep, z):
    """The inner loop's body, lines 9 to 16 of Algorithm 2 and of Algorithm 5."""
    q_i, o_i, l_i, m_i = (hbm.load(name, r) for name in ("Q", "O", "l", "m"))  # 9
    s = masked_scores(q_i, k_j, scale, keep)  # 10, 11
    m_block = s.max(axis=1)  # 12
    p = np.exp(s - shift(m_block)[:, None])
    l_block = p.sum(axis=1)
    m_new = np.maximum(m_i, m_block)  # 13
    old, new = np.exp(m_i - shift(m_new)), np.exp(m_block - shift(m_new))
    l_new = old * l_i + new * l_block
    dropped = (p * z).astype(p.dtype)  # 14
    o_new = invert(l_new) * ((l_i * old)[:, None] * o_i + new[:, None] * (dropped @ v_j))
    hbm.store("O", o_new, r)  # 15
    hbm.store("l", l_new, r)  # 16
    hbm.store("m", m_new, r)


def query_outer_forward(hbm, sram, live=None, scale=None, keep=None):
    """FlashAttention-2, Algorithm 1: Q outer loop. From Q, K, V, leave O and L in ``hbm``.

    The accumulators never leave the chip, O is normalised once, and L = m + log l is all that
    the backward pass needs. Blocks that are not ``live`` are skipped, as in Algorithm 5; here a
    row block has ``ceil(M / 4d)`` rows, a column block ``min(ceil(M / 4d), d)``.
    """
    n, head_dim = hbm["Q"].shape
    rows, cols, scale, keep, live = _setup(hbm, sram, scale, keep, live, query_outer=True)  # 1, 2
    hbm.allocate("O", (n, head_dim))
    hbm.allocate("L", n)
    for i, r in enumerate(rows):  # 3
        q_i = hbm.load("Q", r)  # 4
        o_i, l_i = np.zeros_like(q_i), np.zeros_like(q_i[:, 0])  # 5
        m_i = np.full_like(l_i, -np.inf)
        for j, c in enumerate(cols):  # 6
            if not live[i, j]:
                continue
            k_j, v_j = hbm.load("K", c), hbm.load("V", c)  # 7
            s = masked_scores(q_i, k_j, scale, keep[r, c])  # 8
            m_new = np.maximum(m_i, s.max(axis=1))  # 9
            p, old = np.exp(s - shift(m_new)[:, None]), np.exp(m_i - shift(m_new))
            l_i = old * l_i + p.sum(axis=1)
            o_i = old[:, None] * o_i + p @ v_j  # 10
            m_i = m_new
        hbm.store("O", invert(l_i) * o_i, r)  # 12, 14
        with np.errstate(divide="ignore"):
            hbm.store("L", m_i + np.log(l_i), r)  # 13, 15


def standard_backward(hbm, scale=None):
    """Algorithm 3. From Q, K, V, dO and P in ``hbm``, leave dP, dS, dQ, dK and dV there."""
    scale = hbm["Q"].shape[1] ** -0.5 if scale is None else scale
    hbm.store("dV", hbm.load("P").T @ hbm.load("dO"))  # 1
    hbm.store("dP", hbm.load("dO") @ hbm.load("V").T)  # 2
    p, dp = hbm.load("P"), hbm.load("dP")  # 3
    hbm.store("dS", p * (dp - (p * dp).sum(axis=1, keepdims=True)))
    hbm.store("dQ", scale * (hbm.load("dS") @ hbm.load("K")))  # 4
    hbm.store("dK", scale * (hbm.load("dS").T @ hbm.load("Q")))  # 5


def flash_backward(hbm, sram, live=None, scale=None, keep=None, p_drop=0.0):
    """Algorithm 4. From Q, K, V, O, dO, l and m in ``hbm``, leave dQ, dK and dV there.

    Blocks that are not ``live`` are skipped, as Algorithm 5 does in the forward pass. With dropout
    R is in ``hbm`` too.
    """
    draw = _dropout(p_drop, hbm.load("R") if p_drop else None)  # 1
    n, head_dim = hbm["Q"].shape
    rows, cols, scale, keep, live = _setup(hbm, sram, scale, keep, live)  # 2, 3, 4
    for name in ("dQ", "dK", "dV"):
        hbm.allocate(name, (n, head_dim), 0)  # 5
    for j, c in enumerate(cols):  # 6
        k_j, v_j = hbm.load("K", c), hbm.load("V", c)  # 7
        dk_j, dv_j = np.zeros_like(k_j), np.zeros_like(v_j)  # 8
        for i, r in enumerate(rows):  # 9
            if not live[i, j]:
                continue
            q_i, o_i, do_i, dq_i, l_i, m_i = (
                hbm.load(name, r) for name in ("Q", "O", "dO", "dQ", "l", "m")
            )  # 10
            s = masked_scores(q_i, k_j, scale, keep[r, c])  # 11, 12
            p = invert(l_i) * np.exp(s - shift(m_i)[:, None])  # 13
            hbm.recomputed["S"] += p.size
            z = draw(r, c)  # 14
            dv_j += (p * z).astype(p.dtype).T @ do_i  # 15, 16
            dp = ((do_i @ v_j.T) * z).astype(p.dtype)  # 17, 18
            d_i = (do_i * o_i).sum(axis=1, keepdims=True)  # 19
            ds = p * (dp - d_i)  # 20
            hbm.store("dQ", dq_i + scale * (ds @ k_j), r)  # 21
            dk_j += scale * (ds.T @ q_i)  # 22
        hbm.store("dK", dk_j, c)  # 24
        hbm.store("dV", dv_j, c)


def standard_forward_accesses(n, head_dim):
    """Exact accesses of `standard_forward`."""
    nd = n * head_dim
    return Accesses(3 * nd + 2 * n * n, nd + 2 * n * n)


def standard_backward_accesses(n, head_dim):
    """Exact accesses of `standard_backward`."""
    nd = n * head_dim
    return Accesses(5 * nd + 5 * n * n, 3 * nd + 2 * n * n)


def flash_forward_accesses(n, head_dim, sram, live=None):
    """Exact accesses of `flash_forward`, or with ``live`` of `block_sparse_forward`."""
    row_visits, _ = visits(n, *reversed(block_sizes(sram, head_dim)), live)
    return Accesses(
        2 * n * head_dim + row_visits * (2 * head_dim + 2),
        n * (head_dim + 2) + row_visits * (head_dim + 2),
    )


def query_outer_forward_accesses(n, head_dim, sram, live=None):
    """Exact accesses of `query_outer_forward`."""
    _, col_visits = visits(n, *block_sizes(sram, head_dim), live)
    return Accesses(n * head_dim + col_visits * 2 * head_dim, n * (head_dim + 1))


def flash_backward_accesses(n, head_dim, sram, live=None):
    """Exact accesses of `flash_backward`."""
    row_visits, _ = visits(n, *reversed(block_sizes(sram, head_dim)), live)
    return Accesses(
        2 * n * head_dim + row_visits * (4 * head_dim + 2),
        5 * n * head_dim + row_visits * head_dim,
    )


def visits(n, b_r, b_c, live):
    """Rows, and columns, of the live blocks, each counted once per block."""
    n_row, n_col = -(-n // b_r), -(-n // b_c)
    if live is None:
        return n * n_col, n * n_row
    live = np.asarray(live, bool)
    row_sizes = np.minimum(b_r, n - b_r * np.arange(n_row))
    col_sizes = np.minimum(b_c, n - b_c * np.arange(n_col))
    return int(row_sizes @ live.sum(axis=1)), int(col_sizes @ live.sum(axis=0))


def theta_standard(n, head_dim):
    """Order of growth of Algorithms 0 and 3: N d + N² (Theorems 2 and 5)."""
    return n * head_dim + n * n


def theta_flash(n, head_dim, sram):
    """Order of growth of Algorithms 1, 2 and 4: N² d² / M for d <= M <= N d (Theorems 2 and 5)."""
    return n**2 * head_dim**2 / sram


def theta_block_sparse(n, head_dim, sram, density):
    """Order of growth of Algorithm 5: N d + s N² d² / M, s the share of live blocks (Prop. 4)."""
    return n * head_dim + density * n**2 * head_dim**2 / sram
