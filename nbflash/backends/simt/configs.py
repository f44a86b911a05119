"""Frozen configurations of the SIMT kernels and the tables they are chosen from."""

from dataclasses import dataclass, replace

from nbflash.cuda.kinds import ACCUMULATOR
from nbflash.cuda.tile.convert import PAD
from nbflash.cuda.tile.dropout import KEPT_BITS
from nbflash.cuda.tile.score import ScoreCode
from nbflash.cuda.tile.smem_layout import smem_layout

SCALAR_CHUNKS = 4  # single elements need an address each: fewer at a time
SKEW = 4  # words by which every fourth row of Pᵀ starts later: its columns meet no bank twice


def _round_up(x, multiple):
    return -(-x // multiple) * multiple


@dataclass(frozen=True)
class SimtConfig:
    """Geometry of ``fwd_simt``.

    A block is ``ty × tx`` threads; a thread owns ``rm × rn`` scores and, of a tile row of
    ``width`` columns, ``width / tx`` of them.

    Attributes
    ----------
    dtype : str
        Storage type of the tensors.
    head_dim : int
    tx, ty : int
        Thread grid. ``tx`` divides 32, so that a score row stays inside a warp.
    rm, rn : int
        Score rows and columns of a thread, multiples of 4.
    min_blocks : int
        Blocks a multiprocessor should hold: bounds the registers.
    vectors : bool
        Global rows may be read four elements at a time.
    p_over_k : bool
        P takes the place of K: less shared memory, one barrier more.
    unroll : int
        Steps of four along the contraction in one loop iteration.
    chunks : int
        Passes in which a tile is copied; more need fewer registers.
    send_v : bool
        V travels by ``cp.async`` while S is computed (float32 vectors, sm_80 on, head_dim a
        multiple of ``4 tx``).
    score : ScoreCode, optional
        Functions of the scores; Q then carries the scale alone.
    dropout : bool or "placed"
        Only with ``rm * rn`` of at most 64: one bit each.
    """

    dtype: str
    head_dim: int
    tx: int
    ty: int
    rm: int
    rn: int
    min_blocks: int = 1
    vectors: bool = False
    p_over_k: bool = False
    unroll: int = 4
    chunks: int = 1
    send_v: bool = False
    score: ScoreCode | None = None
    dropout: bool | str = False

    def __post_init__(self):
        if self.dropout and self.rm * self.rn > KEPT_BITS:
            raise ValueError(f"dropout needs rm * rn of at most {KEPT_BITS}, got {self}")

    @property
    def threads(self):
        return self.tx * self.ty

    @property
    def tile_m(self):
        return self.ty * self.rm

    @property
    def tile_n(self):
        return self.tx * self.rn

    @property
    def width(self):
        """Columns of a Q, K, V or dO tile in shared memory."""
        return _round_up(self.head_dim, 4 * self.tx)

    @property
    def ld(self):
        return self.width + PAD

    @property
    def ld_m(self):
        return self.tile_m + PAD

    @property
    def ld_n(self):
        return self.tile_n + PAD

    @property
    def accumulator(self):
        return ACCUMULATOR[self.dtype]

    @property
    def itemsize(self):
        return self.accumulator.bitwidth // 8

    @property
    def smem(self):
        """Shared memory, in elements."""
        p = self.tile_n * self.ld_m + self.tile_n // 4 * SKEW
        return smem_layout(
            q=max(self.width * self.ld_m, self.tile_m * self.ld),  # O leaves through Q's place
            k=max(self.width * self.ld_n, p * self.p_over_k),
            v=self.tile_n * self.ld,
            p=p * (not self.p_over_k),
        )

    @property
    def p_at(self):
        """Where P is: in K's place, or its own."""
        return self.smem.k if self.p_over_k else self.smem.p

    @property
    def smem_bytes(self):
        """Dynamic shared memory of a block."""
        return self.smem.end * self.itemsize


@dataclass(frozen=True)
class SimtBackwardConfig(SimtConfig):
    """Geometry of ``bwd_simt``: ``ty × tx`` threads are one half of a block.

    Attributes
    ----------
    walk : {"columns", "rows"}
    atomic_dq : bool
        Add dQ to global memory while walking columns.
    vector_red : bool
        Add four neighbours at once (compute capability 9.0, head_dim a multiple of 4).
    """

    walk: str = "columns"
    atomic_dq: bool = False
    vector_red: bool = False

    @property
    def threads(self):
        return 2 * self.tx * self.ty

    @property
    def width(self):
        return _round_up(self.head_dim, 8 * self.tx)  # each half owns half of dQ's columns

    @property
    def smem(self):
        """Shared memory, in elements."""
        k, kt = self.tile_n * self.ld, self.width * self.ld_n
        q, p = self.tile_m * self.ld, self.tile_m * self.ld_n
        return smem_layout(k=k, kt=kt, vt=kt, q=q, do=q, p=p, ds=p, statistics=2 * self.tile_m)


# Rows (head_dim up to, tx, ty, rm, rn, min_blocks, p_over_k, chunks), best first among those
# that fit the shared memory of a block. The first row of each head_dim is the one measured on
# an H100 (notes/simt.md); the others serve devices with 163, 99, 64 or 48 KB.
_FORWARD = (
    (64, 16, 16, 8, 8, 1, False, 1),
    (64, 16, 8, 8, 4, 2, False, 1),
    (64, 8, 8, 4, 4, 1, False, 1),
    (128, 16, 16, 8, 8, 1, True, 2),
    (128, 16, 8, 8, 4, 1, True, 1),
    (128, 8, 8, 4, 4, 1, False, 1),
    (128, 8, 4, 4, 4, 1, True, 2),
    (192, 16, 8, 8, 4, 1, True, 2),
    (192, 8, 8, 4, 4, 1, True, 2),
    (192, 8, 4, 4, 4, 1, True, 4),
    (256, 16, 16, 4, 4, 1, True, 2),
    (256, 8, 8, 4, 4, 1, True, 2),
    (256, 8, 4, 4, 4, 1, True, 4),
    (256, 4, 4, 4, 4, 1, True, 8),
)
_BACKWARD = (
    (64, 8, 16, 8, 8, 1, False, 1),
    (64, 8, 8, 8, 4, 1, False, 1),
    (64, 8, 4, 4, 4, 1, False, 1),
    (128, 16, 8, 8, 4, 1, False, 1),
    (128, 8, 8, 4, 4, 1, False, 1),
    (128, 8, 4, 4, 4, 1, False, 2),
    (128, 4, 4, 4, 4, 1, False, 2),
    (256, 8, 8, 4, 4, 1, False, 2),
    (256, 4, 4, 4, 4, 1, False, 8),
)
# float64 has half the shared memory and half the registers in elements.
_FORWARD_64 = (
    (64, 16, 8, 4, 4, 1, False, 1),
    (64, 8, 4, 4, 4, 1, True, 2),
    (128, 16, 8, 4, 4, 1, True, 2),
    (128, 8, 4, 4, 4, 1, True, 4),
    (256, 8, 8, 4, 4, 1, True, 4),
    (256, 4, 4, 4, 4, 1, True, 8),
)
_BACKWARD_64 = (
    (64, 8, 8, 4, 4, 1, False, 1),
    (64, 4, 4, 4, 4, 1, False, 2),
    (128, 8, 8, 4, 4, 1, False, 2),
    (128, 4, 4, 4, 4, 1, False, 4),
    (256, 4, 4, 4, 4, 1, False, 8),
    (256, 4, 2, 4, 4, 1, False, 8),
)


def _candidates(cls, table, dtype, head_dim, vectors):
    """The configurations of a table's rows that reach ``head_dim``, best first."""
    for reach, tx, ty, rm, rn, min_blocks, p_over_k, chunks in table:
        if head_dim <= reach:
            yield cls(
                dtype,
                head_dim,
                tx,
                ty,
                rm,
                rn,
                min_blocks,
                vectors,
                p_over_k,
                chunks=chunks if vectors else SCALAR_CHUNKS * chunks,
            )


def forward_config(dtype, head_dim, *, vectors, smem_limit, cp_async=False):
    """The first row of the table that fits, or None.

    Parameters
    ----------
    dtype : str
    head_dim : int
    vectors : bool
        Rows of q, k and v may be read four elements at a time.
    smem_limit : int
        Bytes of shared memory that a block may have.
    cp_async : bool
        The device has ``cp.async`` (compute capability 8.0).
    """
    table = _FORWARD_64 if dtype == "float64" else _FORWARD
    for config in _candidates(SimtConfig, table, dtype, head_dim, vectors):
        if cp_async and vectors and dtype == "float32" and head_dim == config.width:
            config = replace(config, send_v=True)
        if config.smem_bytes <= smem_limit:
            return config
    return None


def backward_configs(dtype, head_dim, *, vectors, smem_limit, deterministic, vector_red):
    """The passes of a backward: one with atomics or two without; empty if none fits."""
    table = _BACKWARD_64 if dtype == "float64" else _BACKWARD
    for base in _candidates(SimtBackwardConfig, table, dtype, head_dim, vectors):
        if base.smem_bytes > smem_limit:
            continue
        if deterministic:
            return replace(base, walk="rows"), base
        vector_red = vector_red and dtype != "float64" and head_dim % 4 == 0
        return (replace(base, atomic_dq=True, vector_red=vector_red),)
    return ()
