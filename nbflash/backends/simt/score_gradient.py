"""Gradients of a score function's arrays, without tensor cores: dS' once more, row by row.

A block keeps Q and dO of a query tile and walks its key tiles. As in :mod:`.backward` the two
halves of the block do the same work on different operands; then every thread goes down a column of
the tile, four scores at a time, so that what their functions read is on its way together:

                         half 0                       half 1
    X = A Bᵀ             S  = Q Kᵀ                    dP = dO Vᵀ, ∘ Z with dropout
    shared               S, −∞ where it is masked     dP

                         thread by thread
    P  = 2^(S' − lse)    S' = score(S), from the same pass through its functions as ∂S'/∂array
    dS = P ∘ (dP − δ)    d array[index] += dS · ∂S'/∂array[index]

How they are added up is in :mod:`nbflash.cuda.tile.simt.score_sums`. The functions are those of
:mod:`nbflash.scores` as they stand; of a score that is masked, or whose probability is 0, nothing
is added, whatever they make of it.

    shared memory
    Kᵀ, Vᵀ  width × ld_n     Q, dO  tile_m × ld     S, dP  tile_m × ld_n     lse, δ  tile_m each
"""

from dataclasses import dataclass, field

from masks import FULL
from nbflash.backends.simt.configs import SimtBackwardConfig
from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import SCHEDULE, STRIDES, KernelSpec
from nbflash.cuda.kinds import STORAGE
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.tile.convert import TileCopy
from nbflash.cuda.tile.dropout import dropout_signatures, make_dropout
from nbflash.cuda.tile.guarded_max import NEG_INF
from nbflash.cuda.tile.score import score_signature
from nbflash.cuda.tile.simt.gemm import make_gemm_nn
from nbflash.cuda.tile.simt.gradient import make_fill_stats, make_store_x
from nbflash.cuda.tile.simt.mask import make_apply_mask
from nbflash.cuda.tile.simt.score_sums import make_sums
from nbflash.cuda.tile.smem_layout import smem_layout
from nbflash.cuda.tile.tracing import either, equal, exp2, select, unrolled
from nbflash.definitions.constants import LOG2_E
from nbflash.definitions.score_chain import chain


@dataclass(frozen=True)
class ScoreBackwardConfig(SimtBackwardConfig):
    """Geometry of ``dscore_simt``.

    Attributes
    ----------
    parts : tuple of tuple of callables
        Of every function of ``score``: see `nbflash.scores.Part`.
    counts : tuple of int
        How many they are. Which of equal functions has one is not in ``score``.
    axes : tuple of int
        How many the array of each part has.
    alone : tuple of bool
        Which of them have an element for every score.
    """

    parts: tuple = field(default=(), repr=False)  # ``score`` names their functions
    counts: tuple = field(init=False)
    axes: tuple = ()
    alone: tuple = ()

    def __post_init__(self):
        object.__setattr__(self, "counts", tuple(map(len, self.parts)))

    @property
    def smem(self):
        """Shared memory, in elements."""
        kt, q, s = self.width * self.ld_n, self.tile_m * self.ld, self.tile_m * self.ld_n
        return smem_layout(kt=kt, vt=kt, q=q, do=q, s=s, dp=s, statistics=2 * self.tile_m)


def make_dscore_simt(cfg):
    """The kernel for a :class:`ScoreBackwardConfig`.

    Arguments of the kernel: q, k, v, dout, lse, delta; strides (batch, sequence, head) of q, k, v,
    dout, in elements; dropout's state; of every gradient its address and shape; nq, nk, heads,
    group = heads // heads_kv; tiles per plane; scale; the schedule; the score's parameters;
    dropout's threshold and factor. The gradients hold zeros.
    """
    TX, TY, RM, RN = cfg.tx, cfg.ty, cfg.rm, cfg.rn
    TILE_M, TILE_N, LD, LDN = cfg.tile_m, cfg.tile_n, cfg.ld, cfg.ld_n
    THREADS, ACC, DROPOUT = cfg.threads, cfg.accumulator.numba, bool(cfg.dropout)
    HALF, DEPTH = THREADS // 2, -(-cfg.head_dim // 4) * 4
    layout = cfg.smem
    KT, VT, Q = layout.kt, layout.vt, layout.q
    DO, S, DP = layout.do, layout.s, layout.dp
    STATS = layout.statistics
    ZERO, ONE, INT = ACC(0), ACC(1), types.int32
    X_START = (ZERO,) * (RM * RN)
    ROWS = [4 * TY * (i // 4) + i % 4 for i in range(RM)]
    COLUMNS = [4 * TX * (j // 4) + j % 4 for j in range(RN)]

    fill_kt = TileCopy(cfg, TILE_N, transposed=True, chunks=cfg.chunks).fill
    fill_q = TileCopy(cfg, TILE_M, chunks=cfg.chunks).fill
    fill_stats = make_fill_stats(cfg, STATS)
    gemm_x = make_gemm_nn(RM, RN, ROWS, LD, LDN, 4 * TX, DEPTH, unroll=cfg.unroll)
    store_x = unrolled(make_store_x(ROWS, COLUMNS, LDN))
    apply_mask = make_apply_mask(ROWS, COLUMNS, TILE_M, TILE_N)
    draws_of, kept, drop = make_dropout(cfg.dropout, RM, RN, 4 * TY, 4 * TX)
    triples = zip(cfg.score.functions, cfg.parts, strict=True)
    derive = chain([(*pair, parts) for pair, parts in triples], inlined, ACC)
    START, add, finish = make_sums(cfg.axes, cfg.alone, ACC)

    @unrolled
    def gradient(s, after, lse, dp, delta):
        """dS of one score, without a branch: the loads of its neighbours do not wait for it."""
        p = exp2(after * LOG2_E - lse)
        hidden = either(equal(s, NEG_INF), equal(p, 0.0))
        return select(hidden, 0.0, p * (dp - delta))

    @inlined
    def score_at(smem, e, place, params):
        """dS of element ``e`` of the tile, 0 if it is hidden, and what it is weighed with."""
        (b, h, m0, n0), (nq, nk), i, j = place, params[0], e // TILE_N, e % TILE_N
        q_idx, kv_idx = INT(min(m0 + i, nq - 1)), INT(min(n0 + j, nk - 1))
        s, dp = smem[S + i * LDN + j], smem[DP + i * LDN + j]
        after, _, pairs = derive(s, b, h, q_idx, kv_idx, params[1:])
        # P = 2^(S' − lse), dS = P ∘ (dP − δ)
        return gradient(s, after, smem[STATS + i], dp, smem[STATS + TILE_M + i]), pairs

    @inlined
    def add_one(held, found, sums):
        ds, pairs = found
        return add(held, pairs, sums, ds) if ds != ZERO else held

    def dscore_simt(
        q,
        k,
        v,
        dout,
        lse,
        delta,
        q_stride,
        k_stride,
        v_stride,
        do_stride,
        state,
        sums,
        nq,
        nk,
        heads,
        group,
        n_row,
        scale,
        work,
        plane_of,
        row_ptr,
        col_idx,
        kind,
        lo,
        hi,
        bits,
        params,
        dropping,
    ):
        smem = cuda.shared.array(0, ACC)
        tid = cuda.threadIdx.x
        half, ty, tx = tid // HALF, tid % HALF // TX, tid % TX
        tile, bh = work[2 * cuda.blockIdx.x], work[2 * cuda.blockIdx.x + 1]
        b, h, h_kv = bh // heads, bh % heads, bh % heads // group
        m0, plane = tile * TILE_M, plane_of[bh]
        if DROPOUT:
            draws, (threshold, factor) = draws_of(state), dropping
        at = b * q_stride[0] + h * q_stride[2] + m0 * q_stride[1]
        fill_q(smem, Q, q, at, q_stride[1], nq - m0, scale, tid)
        at = b * do_stride[0] + h * do_stride[2] + m0 * do_stride[1]
        fill_q(smem, DO, dout, at, do_stride[1], nq - m0, ONE, tid)
        fill_stats(smem, lse, delta, bh * nq + m0, nq - m0, tid)
        held = START
        for t in range(row_ptr[plane * n_row + tile], row_ptr[plane * n_row + tile + 1]):
            n0 = col_idx[t] * TILE_N
            at = b * k_stride[0] + h_kv * k_stride[2] + n0 * k_stride[1]
            fill_kt(smem, KT, k, at, k_stride[1], nk - n0, ONE, tid)
            at = b * v_stride[0] + h_kv * v_stride[2] + n0 * v_stride[1]
            fill_kt(smem, VT, v, at, v_stride[1], nk - n0, ONE, tid)
            cuda.syncthreads()  # all operands are in place, and the last scores are read
            # S = Q Kᵀ in half 0, dP = dO Vᵀ in half 1
            a_at, b_at = (Q, KT) if half == 0 else (DO, VT)
            x = gemm_x(X_START, smem, a_at + 4 * ty * LD, b_at + 4 * tx)
            if DROPOUT and half == 1:
                z = kept(draws, threshold, b, h, m0 + 4 * ty, n0 + 4 * tx)
                x = drop(x, z, factor)
            if kind[t] != FULL and half == 0:
                first, last = plane * nq, plane * nq + nq - 1
                x = apply_mask(x, kind[t], lo, hi, first, last, m0, n0, bits, 4 * ty, 4 * tx)
            x_at = S if half == 0 else DP
            store_x(smem, x_at + 4 * ty * LDN + 4 * tx, x)
            cuda.syncthreads()  # S and dP are in place, and K and V are free
            place = INT(b), INT(h), m0, n0
            for e in range(tid, TILE_M * TILE_N, 4 * THREADS):
                one = score_at(smem, e, place, params)
                two = score_at(smem, e + THREADS, place, params)
                three = score_at(smem, e + 2 * THREADS, place, params)
                four = score_at(smem, e + 3 * THREADS, place, params)
                held = add_one(held, one, sums)
                held = add_one(held, two, sums)
                held = add_one(held, three, sums)
                held = add_one(held, four, sums)
        finish(held, sums)

    return dscore_simt


def dscore_simt_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    tensor, wide = kinds.pointer(STORAGE[cfg.dtype]), kinds.pointer(cfg.accumulator)
    state, dropping = dropout_signatures(cfg.dropout, cfg.accumulator)
    gradients = (kinds.several((wide, kinds.several((kinds.int64,) * n))) for n in cfg.axes)
    tensors = (*(tensor,) * 4, wide, wide, *(STRIDES,) * 4, state, kinds.several(tuple(gradients)))
    numbers = (*(kinds.int32,) * 5, cfg.accumulator)
    signature = (*tensors, *numbers, *SCHEDULE, score_signature(cfg.score), dropping)
    return KernelSpec("nbflash_dscore_simt", make_dscore_simt, cfg, signature)
