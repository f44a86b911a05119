"""Forward and backward on NumPy arrays: Numba over the same `TileSchedule` as the GPU kernels."""

import math

import numpy as np

from nbflash.backends.cpu import blas, dropout, kernels
from nbflash.backends.cpu.compiling import COUNTER
from nbflash.backends.cpu.dropout import Drop
from nbflash.backends.cpu.score import prepare
from nbflash.backends.cpu.score_gradient import backward_scores, grouped, prepare_gradient
from nbflash.backends.cpu.sizes import tile_sizes
from nbflash.backends.cpu.threads import run_in_threads
from nbflash.backends.cpu.tile_function import ABSENT
from nbflash.backends.cpu.walk import DK, DOUT, DQ, DV, OUT, K, Operands, Q, V, Walk
from nbflash.definitions.constants import LOG2_E

__all__ = [
    "CHUNK",
    "backward",
    "forward",
    "prepare",
    "prepare_gradient",
    "score_backward",
    "tile_sizes",
]

#: Scores of a row that are handled at once: with 128 rows of float32, a quarter of a megabyte.
CHUNK = 512

#: Nothing is dropped, whatever the state.
NO_DROPOUT = Drop(0.0)

#: Elements; BLAS takes 32-bit integers.
MAX_ROW_STRIDE = 2**31 - 1


def forward(q, k, v, out, lse, schedule, scale, score=ABSENT, drop=NO_DROPOUT):
    """Attention over the live tiles of ``schedule``.

    Algorithm 5 of FlashAttention with the online softmax in base 2 and FlashAttention-2's loop
    order. Bitwise reproducible.

    Parameters
    ----------
    q : (batch, nq, heads, head_dim)
    k, v : (batch, nk, heads_kv, head_dim)
        float16, bfloat16 (computed in float32), float32 or float64. Any strides.
    out : like q
        Written.
    lse : (batch, heads, nq)
        Natural logarithm of the softmax denominators, written; -inf where a row attends nothing.
    schedule : TileSchedule
    scale : float
        Factor of the scores.
    score : Bound
        What becomes of them then: what `prepare` returned.
    drop : Drop
        Probability that a weight is dropped, seed and offset of the random numbers, and positions.
    """
    real = _working_dtype(q)
    (q, k, v), target = _operands(real, q, k, v), _result(real, out)
    batch, nq, heads, _ = q.shape
    sums = np.empty((batch * heads, nq), real)
    operands = _tensors(schedule, scale, sums, sums, {Q: q, K: k, V: v, OUT: target})
    work = schedule.work(batch, heads)
    _run(kernels.forward, schedule, operands, work, schedule.tile_n, score, drop)
    lse[...] = sums.reshape(lse.shape)
    if target is not out:
        out[...] = target


def backward(
    dout, q, k, v, out, lse, dlse, dq, dk, dv, schedule, scale, score=ABSENT, drop=NO_DROPOUT
):
    """Gradients of `forward`; deterministic: two passes (dQ by rows, dK and dV by columns).

    Parameters
    ----------
    dout, out : like q
    lse : (batch, heads, nq)
        As `forward` wrote it. The scores are recomputed against it, so its precision bounds that
        of the gradients: keep it in float64 for float64 inputs.
    dlse : like lse
        Gradient of ``lse``: dS = P ∘ (dP − δ) with δ = rowsum(dO ∘ O) − dlse.
    dq, dk, dv : like q, k, v
        Written.
    schedule : TileSchedule
        The schedule of the forward; its transpose gives the second pass.
    scale : float
    score : Bound
        As in `forward`, with gradients.
    drop : Drop
        As in `forward`.
    """
    real = _working_dtype(q)
    q, k, v, dout, out = _operands(real, q, k, v, dout, out)
    results = [(x, _result(real, x)) for x in (dq, dk, dv)]
    batch, _, heads, _ = q.shape
    lse, delta = _statistics(real, dout, out, lse, dlse)
    tensors = {Q: q, K: k, V: v, DOUT: dout}
    tensors.update(zip((DQ, DK, DV), (target for _, target in results), strict=True))
    operands = _tensors(schedule, scale, lse, delta, tensors)
    rows, columns, group = schedule, schedule.T, heads // k.shape[2]
    work = rows.work(batch, heads)
    _run(kernels.backward_dq, rows, operands, work, rows.tile_n, score, drop)
    work = columns.work(batch, heads, group)
    _run(kernels.backward_dkdv, columns, operands, work, rows.tile_m, score, drop)
    for result, target in results:
        if target is not result:
            result[...] = target


def score_backward(dout, q, k, v, out, lse, dlse, sums, schedule, scale, gradient, drop=NO_DROPOUT):
    """Gradients of a score's arrays; deterministic.

    Parameters
    ----------
    dout, q, k, v, out, lse, dlse, schedule, scale, drop
        As in `backward`.
    sums : tuple of arrays
        Written.
    gradient : ScoreGradient
        What `prepare_gradient` returned.

    Raises
    ------
    IndexError
        If a part's function returns an index outside its array.
    """
    real = _working_dtype(q)
    q, k, v, dout, out = _operands(real, q, k, v, dout, out)
    lse, delta = _statistics(real, dout, out, lse, dlse)
    operands = _tensors(schedule, scale, lse, delta, {Q: q, K: k, V: v, DOUT: dout})
    batch, _, heads, _ = q.shape
    work = schedule.work(batch, heads)
    work = grouped(work, heads, gradient.parts, gradient.problem)
    totals = gradient.zeros()
    bound = gradient.bind(operands, totals), dropout.prepare(drop, (schedule.nq, schedule.nk), real)
    try:
        _in_threads(backward_scores, schedule, operands, work, schedule.tile_n, bound)
    except IndexError as error:
        raise IndexError(gradient.wrong_index()) from error
    for target, total in zip(sums, totals, strict=True):
        target[...] = total


def _statistics(real, dout, out, lse, dlse):
    """lse in base 2, +inf where a row attends nothing, and δ − dLSE, by planes."""
    batch, nq, heads, _ = dout.shape
    with np.errstate(invalid="ignore", over="ignore"):
        delta = np.einsum("bnhd,bnhd->bhn", dout, out) - dlse
    lse = np.asarray(lse, np.float64).reshape(batch * heads, nq) * LOG2_E
    lse = np.where(np.isneginf(lse), math.inf, lse).astype(real)
    # Not in the order of the outputs: Numba compiles anew for it.
    return lse, np.ascontiguousarray(delta.reshape(lse.shape))


def _run(kernel, schedule, operands, work, tile, score, drop):
    shape = schedule.nq, schedule.nk
    bound = score, dropout.prepare(drop, shape, operands.lse.dtype.type)
    _in_threads(kernel, schedule, operands, (work.astype(np.int64),), tile, bound)


def _in_threads(kernel, schedule, operands, work, tile, bound):
    """Run ``kernel`` in every thread; they share the work list through a counter."""
    chunk = tile * max(1, CHUNK // tile)
    counter = np.zeros(1, COUNTER)
    functions = (function for function, _ in bound)
    shared = _walk(schedule), operands, *work, counter, chunk, *functions
    with blas.one_thread():
        run_in_threads(kernel, shared, counter, len(work[-1]))


def _working_dtype(x):
    return np.float64 if x.dtype == np.float64 else np.float32


def _operands(real, *arrays):
    """The arrays in the working dtype, copied where BLAS cannot address their rows."""
    return [x if _addressable(real, x) else np.array(x, real, order="C") for x in arrays]


def _result(real, x):
    return x if _addressable(real, x) else np.empty(x.shape, real)


def _addressable(real, x):
    """Whether a tile of ``x`` is a BLAS matrix: dtype, alignment (of strides too), row stride."""
    _, n, _, head_dim = x.shape
    return (
        x.dtype == real
        and x.flags.aligned
        and (x.strides[3] == x.itemsize or head_dim == 1)
        and (head_dim <= x.strides[1] // x.itemsize <= MAX_ROW_STRIDE or n == 1)
    )


def _frozen(x):
    """A read-only view, so that Numba sees one type whatever the owner did."""
    view = x.view()
    view.flags.writeable = False
    return view


def _walk(schedule):
    s = schedule
    arrays = (s.row_ptr, s.col_idx, s.kind, s.lo, s.hi, s.bits)
    sizes = (s.tile_m, s.tile_n, s.nq, s.nk, s.n_row, s.transposed)
    return Walk(*sizes, *map(_frozen, arrays))


def _tensors(schedule, scale, lse, delta, tensors):
    q, k, real = tensors[Q], tensors[K], lse.dtype.type
    table = np.zeros((8, 4), np.int64)
    for index, x in tensors.items():
        batch, seq, head, _ = x.strides
        seq = seq if x.shape[1] > 1 else x.shape[3] * x.itemsize
        table[index] = x.ctypes.data, batch, seq, head
    batch, _, heads, head_dim = q.shape
    return Operands(
        table,
        heads,
        k.shape[2],
        head_dim,
        schedule.plane_of(batch, heads),
        real(scale),
        real(scale * LOG2_E),
        lse,
        delta,
        blas.address("gemm", real),
    )
