"""What a warp of the portable decode kernel does with its keys of a tile: see :mod:`.kernel`."""

import math

from nbflash.backends.sm80.decode.config import KEYS, ROWS
from nbflash.backends.sm80.decode.score import make_scored
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.ptx.cp_async import cp_async16, cp_async_commit
from nbflash.cuda.tile.mma.fragment import Fragment
from nbflash.cuda.tile.mma.gemm import make_gemm_abt, make_gemm_pb
from nbflash.cuda.tile.mma.layout import CHUNK
from nbflash.cuda.tile.mma.poison import make_poison_rows
from nbflash.cuda.tile.mma.softmax import make_softmax
from nbflash.cuda.tile.ring import divmod_int32
from nbflash.cuda.tile.tracing import both, unrolled
from nbflash.cuda.tile.warp_math import lanes_of
from nbflash.cuda.tile.wgmma.softmax import make_apply_keep


def make_compute(cfg):
    """``load_q, start, step, finish`` of 16 bits.

    load_q(smem, first, word, q, q_stride, rows, thread)
        The block's rows of Q by a group of copies, to where shared memory begins, at address
        ``first`` and at word ``word``. It returns ``q_factors``: none.
    start
        m, l and O of no keys.
    step(smem, word, first, ring, hidden, keep, state, q_factors, scoring, lane)
        The same after the keys of a stage, which is at address ``ring``. ``keep`` has a bit for
        each key that the upper and the lower of the lane's rows see, where some are ``hidden``.
        ``scoring`` are the places of the lane's scores, the parameters of their functions, and the
        scale: :mod:`.score`.
    finish(state)
        O, m and l.
    """
    TILE, CHUNKS, USED, THREADS = cfg.tile, cfg.tile.chunks, cfg.head_dim // CHUNK, cfg.threads
    V, ZERO, scores = cfg.kv_bytes, types.float32(0), Fragment(1, KEYS)
    M_START = (types.float32(-math.inf),) * 2
    START = M_START, (ZERO,) * 2, (ZERO,) * Fragment(1, TILE.width).size
    S_START = (ZERO,) * scores.size

    scan, clean = cfg.copy.scan, cfg.copy.clean
    gemm_qk = make_gemm_abt(cfg.dtype, 1, KEYS, TILE, negate=cfg.negate)
    gemm_pv = make_gemm_pb(cfg.dtype, 1, KEYS, TILE)
    poison_rows = make_poison_rows(cfg.dtype, 1, KEYS, TILE)
    softmax, pack_p = make_softmax(1, KEYS), scores.make_pack(cfg.dtype)
    row_max, has_grown, rescale = softmax.row_max, softmax.has_grown, softmax.rescale
    probabilities, row_sums = softmax.probabilities, softmax.row_sums
    add_sums = softmax.add_sums
    scale_rows, apply_keep = Fragment(1, TILE.width).make_scale_rows(), make_apply_keep(KEYS, 0)
    scored = make_scored(cfg)

    @unrolled
    def send_chunk(to, q, at, row, chunk, valid):
        cp_async16(to + TILE.place(row, chunk), q, at, both(row < valid, chunk < USED))

    @inlined
    def load_q(smem, first, word, q, q_stride, rows, thread):
        """Rows behind the last, and columns behind head_dim, become zeros."""
        first_row, count, pack, start = rows
        for i in range(thread, ROWS * CHUNKS, THREADS):
            r, chunk = types.int32(i // CHUNKS), types.int32(i % CHUNKS)
            token, head = divmod_int32(types.int32(first_row + r), pack)
            at = start + token * q_stride[1] + head * q_stride[2] + chunk * CHUNK
            send_chunk(first, q, at, r, chunk, types.int32(count - first_row))
        cp_async_commit()
        return ()

    @unrolled
    def operands(first, ring, lane):
        """A lane's addresses in Q, K and V."""
        rows = TILE.by_rows(lane)
        return first + rows, ring + TILE.by_columns(lane), ring + V + rows

    @inlined
    def step(smem, word, first, ring, hidden, keep, state, q_factors, scoring, lane):
        m, l, acc = state
        q_at, k_at, v_at = operands(first, ring, lane)
        # S = Q Kᵀ
        s, unit = scored(gemm_qk(S_START, q_at, k_at), scoring)
        if hidden:
            s = apply_keep(s, keep)
        # P = 2^(S · unit − m)
        m_new = row_max(m, s, unit)
        p = probabilities(s, m_new, unit)
        alpha, sums, p = rescale(m, m_new), row_sums(p), pack_p(p)
        # O = α O + P V
        if has_grown(m, m_new):
            acc = scale_rows(acc, alpha)
        if hidden:
            v_word = types.int32(word + (ring - first + V) // 4)
            if lanes_of(scan(smem, v_word, lane) != 0) != 0:
                p = poison_rows(p, v_at)
                cuda.syncwarp()  # all have seen V
                clean(smem, v_word, lane)
                cuda.syncwarp()  # V is finite
        return m_new, add_sums(l, alpha, sums), gemm_pv(acc, p, v_at)

    @inlined
    def finish(state):
        m, l, acc = state
        return acc, m, l

    return load_q, START, step, finish
