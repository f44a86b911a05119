"""dQ = dS K of a tile, while columns are walked: of dSᵀ in shared memory, a part a warp."""

from nbflash.backends.sm80.row_kernels import PIECE
from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.float_bits import signed
from nbflash.cuda.tile.mma.gemm import make_gemm_xtb
from nbflash.cuda.tile.simt.atomic import atomic_add, atomic_add4
from nbflash.cuda.tile.tracing import store, unrolled


def make_dq_part(cfg):
    """``share(smem, at, packed, thread)`` puts a warp's dSᵀ in its place, at word ``at``; when all
    have, ``add_part(dq, base, first, thread)`` adds the warp's part of dQ to global memory, from
    the tile's number ``base`` on.
    """
    TILE, DS_TILE, M_TILES = cfg.tile, cfg.ds_tile, cfg.m_tiles
    DS = cfg.smem.ds
    TILES, COLUMNS = cfg.dq_part
    PARTS, PIECES = TILE.width // COLUMNS, TILE.width // 8
    START = (types.float32(0),) * (TILES * COLUMNS // 2)
    gemm = make_gemm_xtb(cfg.dtype, TILES, cfg.kept, DS_TILE, TILE, COLUMNS)

    @unrolled
    def share(smem, at, packed, thread):
        lane = thread % 32
        row, word = thread // 32 * (16 * M_TILES) + lane // 4, lane % 4
        per_tile = cfg.length // 4
        for i, x in enumerate(packed):
            t, j, below = i // per_tile, i % per_tile // 2, i % 2
            place = DS_TILE.place(row + (16 * t + 8 * below), row * 0 + j) // 4
            store(smem, at + place + word, signed(x))

    @unrolled
    def places(first, thread):
        """The lane's addresses of dSᵀ and of K, and the first steps of both that count."""
        warp, lane = thread // 32, thread % 32
        x, b = first + DS + DS_TILE.by_columns(lane), first + TILE.by_rows(lane)
        return x, b, warp // PARTS * TILES, warp % PARTS * (COLUMNS // 16)

    @unrolled
    def scatter(dq, base, x_step, b_step, acc, thread):
        first = base + (x_step * PIECES + b_step * 2) * PIECE
        lane = thread % 32
        at = first + (lane * 4 if cfg.vector_red else lane)
        for i in range(0, len(acc), 4):
            t, j = divmod(i // 4, COLUMNS // 8)
            piece = (t * PIECES + j) * PIECE
            if cfg.vector_red:
                atomic_add4(dq, at + piece, acc[i : i + 4])
            else:
                for e in range(4):
                    atomic_add(dq, at + (piece + 32 * e), acc[i + e])

    @inlined
    def add_part(dq, base, first, thread):
        x, b, x_step, b_step = places(first, thread)
        scatter(dq, base, x_step, b_step, gemm(START, x, b, x_step, b_step), thread)

    return share, add_part
