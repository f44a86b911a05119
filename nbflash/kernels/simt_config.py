"""Frozen configurations of the SIMT kernels: thread grid, tiles and shared-memory layout."""

from dataclasses import dataclass

from nbflash.tile.copy import ACCUMULATOR, PAD


def _round_up(x, multiple):
    return -(-x // multiple) * multiple


@dataclass(frozen=True)
class SimtConfig:
    """Geometry of ``fwd_simt`` and ``bwd_simt``.

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
        Score rows and columns of a thread; multiples of 4 in the backward pass.
    min_blocks : int
        Blocks a multiprocessor should hold: bounds the registers.
    vectors : bool
        Global rows may be read 16 bytes at a time.
    p_over_k : bool
        The forward pass keeps P where K was: less shared memory, one barrier more.
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
    unroll: int = 2
    prefetch: str = ""
    chunks: int = 1

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
