"""The products of attention by mma, of operands in shared memory and in registers.

    make_gemm_abt    C += A Bᵀ     A and B in rows along the contraction: S = Q Kᵀ, dP = dO Vᵀ
    make_gemm_pb     C += P B      P in registers: O += P V, dV += Pᵀ dO, dK += dSᵀ Q, dQ += dS K
    make_gemm_xtb    C = Xᵀ B      X and B in rows across it: dQ = dS K of a shared dSᵀ

C is a fragment (:mod:`.fragment`), A, B and X are addresses of lanes (:mod:`.layout`). Operands of
a product are loaded before the products of the one before it.
"""

from nbflash.cuda.ptx.ldmatrix import ldmatrix
from nbflash.cuda.ptx.mma import mma
from nbflash.cuda.tile.mma.layout import STEP
from nbflash.cuda.tile.tracing import unrolled

SIGNS = 0x80008000  # of two halves


def products(dtype, acc, m_tiles, steps, pairs, a_of, b_of):
    """``steps`` of the contraction, ``pairs`` of 8 columns each; b_of gives both of a pair."""
    acc, order = list(acc), [(k, j) for k in range(steps) for j in range(pairs)]
    a, a_next, b_next = None, a_of(0), b_of(0, 0)
    for place, (k, j) in enumerate(order):
        a, b = (a_next if j == 0 else a), b_next
        if place + 1 < len(order):
            b_next = b_of(*order[place + 1])
            if j == pairs - 1:
                a_next = a_of(k + 1)
        for t in range(m_tiles):
            for half in (0, 1):
                at = 4 * (2 * (pairs * t + j) + half)
                acc[at : at + 4] = mma(dtype, acc[at : at + 4], a[t], b[2 * half : 2 * half + 2])
    return tuple(acc)


def _rows_of_p(p, m_tiles, k):
    size = len(p) // m_tiles
    return [tuple(p[size * t + 4 * k : size * t + 4 * k + 4]) for t in range(m_tiles)]


def make_gemm_abt(dtype, m_tiles, n, tile, *, negate=False):
    """``gemm(acc, a, b)``: ``m_tiles`` 16-row tiles of A, ``n`` rows of B, of `SharedTile` s.

    ``a`` is a lane's address by rows, ``b`` one by columns; ``negate``: C −= A Bᵀ.
    """
    rows = 16 * tile.row_bytes

    def minus(word):
        return word ^ SIGNS if negate else word

    @unrolled
    def gemm(acc, a, b):
        def a_of(k):
            found = (ldmatrix(tile.step(a, k) + t * rows) for t in range(m_tiles))
            return [tuple(map(minus, words)) for words in found]

        def b_of(k, j):
            return ldmatrix(tile.step(b, k) + j * rows)

        return products(dtype, acc, m_tiles, tile.width // STEP, n // 16, a_of, b_of)

    return gemm


def make_gemm_pb(dtype, m_tiles, n, tile):
    """``gemm(acc, p, b)``: P of ``n`` columns, packed; ``b`` is a lane's address by rows."""
    rows = 16 * tile.row_bytes

    @unrolled
    def gemm(acc, p, b):
        def b_of(k, j):
            return ldmatrix(tile.step(b, j) + k * rows, transposed=True)

        def a_of(k):
            return _rows_of_p(p, m_tiles, k)

        return products(dtype, acc, m_tiles, n // STEP, tile.width // 16, a_of, b_of)

    return gemm


def make_gemm_xtb(dtype, m_tiles, n, x_tile, tile, columns):
    """``gemm(acc, x, b, x_step, b_step)``: ``n`` rows of X and of B, of which ``columns`` count.

    ``x`` is a lane's address by columns in X, ``b`` one by rows in B; the steps of 16 columns are
    those that count first.
    """
    x_rows, rows = 16 * x_tile.row_bytes, 16 * tile.row_bytes

    @unrolled
    def gemm(acc, x, b, x_step, b_step):
        x_places = [x_tile.step(x, x_step + t) for t in range(m_tiles)]
        b_places = [tile.step(b, b_step + j) for j in range(columns // 16)]

        def a_of(k):
            return [ldmatrix(at + k * x_rows, transposed=True) for at in x_places]

        def b_of(k, j):
            return ldmatrix(b_places[j] + k * rows, transposed=True)

        return products(dtype, acc, m_tiles, n // STEP, columns // 16, a_of, b_of)

    return gemm
