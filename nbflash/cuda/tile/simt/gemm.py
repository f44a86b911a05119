"""Matrix products of one thread block on shared-memory tiles, register-blocked.

Threads form a ``TY × TX`` grid (``ty = tid // TX``, ``tx = tid % TX``). A thread owns an
``m × n`` fragment of the product, a tuple of ``m·n`` scalars, row by row:

    row    i of the fragment is tile row      ty + i·TY        (or 4·ty + 4·TY·(i//4) + i%4)
    column j of the fragment is tile column   tx + j·TX        (or 4·tx + 4·TX·(j//4) + j%4)

The second form ("vectors") serves operands that are contiguous along that axis; the
first keeps the lanes of a warp on neighbouring rows, which with a leading dimension of
``4 mod 32`` words touch different banks. All loads are four elements wide.

    product   C        A (k runs along …)        B
    nt        A Bᵀ     rows of A, contiguous     rows of B, contiguous
    nn        A B      rows of A, contiguous     columns of B, vectors
    tn        Aᵀ B     columns of A, vectors     columns of B, vectors
"""

from nbflash.cuda.ptx._asm import inlined
from nbflash.cuda.tile.tracing import equal, fma, load4, opaque_value, select, unrolled


def _steps(depth, quad, most):
    """Steps of ``quad`` along k that one loop iteration takes."""
    return next(u for u in range(most, 0, -1) if depth % (quad * u) == 0)


def _vectors(smem, at, count, step):
    return [x for i in range(count) for x in load4(smem, at + i * step)]


def _rank_one(acc, a, b, n, skip_zeros):
    """``acc += a bᵀ`` in place; ``0 · NaN`` adds nothing with ``skip_zeros``.

    Rows are swept to and fro: neighbouring products share an operand, which the register
    reuse cache serves. Three fresh operands cannot be read in one cycle.
    """
    for i, x in enumerate(a):
        for j in range(n) if i % 2 == 0 else reversed(range(n)):
            new = fma(x, b[j], acc[i * n + j])
            acc[i * n + j] = select(equal(x, 0.0), acc[i * n + j], new) if skip_zeros else new


def make_gemm_nn(m, n, rows, a_row, b_row, b_step, depth, *, unroll, skip_zeros=False):
    """``acc += A B``: A rows at ``a + rows[i]·a_row``, B vectors at ``b + k·b_row + c·b_step``.

    ``skip_zeros`` leaves out products whose A element is zero, so that ``0 · NaN`` of a
    masked position adds nothing.
    """
    unroll = 1 if skip_zeros else _steps(depth, 4, unroll)

    @unrolled
    def step(acc, smem, a, b):
        acc = list(acc)
        for u in range(unroll):
            quads = [load4(smem, a + (rows[i] * a_row + 4 * u)) for i in range(m)]
            for k in range(4):
                columns = _vectors(smem, b + (4 * u + k) * b_row, n // 4, b_step)
                _rank_one(acc, [quad[k] for quad in quads], columns, n, skip_zeros)
        return tuple(acc)

    @inlined
    def gemm_nn(acc, smem, a, b):
        for k in range(0, depth, 4 * unroll):
            acc = step(acc, smem, a + k, b + k * b_row)
        return acc

    return gemm_nn


def make_gemm_tn(m, n, a_row, a_step, b_row, b_step, depth, *, unroll, skew=0, skip_zeros=False):
    """``acc += Aᵀ B``: vectors of A at ``a + k·a_row + i·a_step``, of B at ``b + k·b_row + …``.

    With ``skew`` (4) every fourth row of A starts that much later than ``a_row`` says.

    The operands of step k + 1 are loaded before the products of step k, across iterations
    too: a warp never waits for shared memory at the top of the loop.
    """
    unroll = 1 if skip_zeros else unroll
    unroll = 4 * _steps(depth, 4, unroll) if skew else _steps(depth, 1, 4 * unroll)
    a_mean = a_row + skew // 4

    def operands(smem, a, b, u):
        rows = _vectors(smem, a + (u * a_row + u // 4 * skew), m // 4, a_step)
        return rows + _vectors(smem, b + u * b_row, n // 4, b_step)

    @unrolled
    def start(acc, smem, a, b):
        # Opaque: libNVVM 13.4 merges these loads with those of the loop, and gets the
        # address wrong from the third iteration on.
        return (*acc, *(opaque_value(x) for x in operands(smem, a, b, 0)))

    @unrolled
    def advance(state, smem, a, b):
        acc, held = list(state[: m * n]), state[m * n :]
        for u in range(unroll):
            ahead = operands(smem, a, b, u + 1)
            _rank_one(acc, held[:m], held[m:], n, skip_zeros)
            held = ahead
        return (*acc, *held)

    @unrolled
    def finish(state, smem, a, b):
        acc, held = list(state[: m * n]), state[m * n :]
        for u in range(unroll):
            ahead = operands(smem, a, b, u + 1) if u + 1 < unroll else None
            _rank_one(acc, held[:m], held[m:], n, skip_zeros)
            held = ahead
        return tuple(acc)

    @inlined
    def gemm_tn(acc, smem, a, b):
        state = start(acc, smem, a, b)
        for k in range(0, depth - unroll, unroll):
            state = advance(state, smem, a + k * a_mean, b + k * b_row)
        return finish(state, smem, a + (depth - unroll) * a_mean, b + (depth - unroll) * b_row)

    return gemm_tn
