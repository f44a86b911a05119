"""Frozen configurations of the portable tensor-core kernels and the tables they come from."""

from dataclasses import dataclass

from nbflash.cuda.ptx._asm import types
from nbflash.cuda.tile.mma.copy import ChunkCopy
from nbflash.cuda.tile.mma.layout import ALIGNMENT, SharedTile
from nbflash.cuda.tile.score import ScoreCode
from nbflash.definitions.constants import WARP


def _padded(head_dim, rows, threads):
    """The least width, a multiple of 16, whose chunks of all these rows divide among threads."""
    width = -(-head_dim // 16) * 16
    while any(n * width // 8 % threads for n in rows):
        width += 16
    return width


@dataclass(frozen=True)
class Sm80Config:
    """Geometry of ``fwd_sm80``.

    Attributes
    ----------
    dtype : {"float16", "bfloat16"}
    head_dim : int
        A multiple of 8.
    warps : int
    m_tiles : int
        Tiles of 16 query rows that a warp owns: with 2 an operand that is loaded serves twice.
    tile_n : int
        A multiple of 16.
    stages : int
        Tiles of K and V, in turn, that shared memory holds: at least 2.
    min_blocks : int
        Blocks a multiprocessor should hold: bounds the registers.
    negate : bool
        The scale is negative.
    full_tiles : bool
        No tile of the schedule is masked.
    score : ScoreCode, optional
    dropout : bool
        Only where ``tile_n`` is a multiple of 32.
    """

    dtype: str
    head_dim: int
    warps: int
    m_tiles: int
    tile_n: int
    stages: int = 2
    min_blocks: int = 1
    negate: bool = False
    full_tiles: bool = False
    score: ScoreCode | None = None
    dropout: bool = False

    def __post_init__(self):
        if self.head_dim % 8 or self.tile_n % (32 if self.dropout else 16) or self.stages < 2:
            raise ValueError(f"no such kernel: {self}")

    accumulator = types.float32

    @property
    def threads(self):
        return WARP * self.warps

    @property
    def tile_m(self):
        return 16 * self.m_tiles * self.warps

    @property
    def tile(self):
        """How rows of all operands lie in shared memory."""
        return SharedTile(_padded(self.head_dim, (self.tile_m, self.tile_n), self.threads))

    def copy(self, rows):
        """Copies of tiles of so many rows by the whole block."""
        return ChunkCopy(self.tile, rows, self.threads, self.head_dim, self.dtype)

    @property
    def stage_bytes(self):
        return self.tile_n * self.tile.row_bytes

    @property
    def offsets(self):
        """Bytes from the first aligned one: where the stages start (Q is at 0), and the end."""
        stages = self.tile_m * self.tile.row_bytes
        return stages, stages + self.stages * self.stage_bytes

    @property
    def smem_bytes(self):
        """Dynamic shared memory of a block."""
        return ALIGNMENT + self.offsets[-1]


# Rows (head_dim up to, warps, m_tiles, tile_n, stages, min_blocks), best first among those that fit.
_FORWARD = (
    (64, 4, 2, 64, 2, 2),
    (128, 4, 2, 64, 2, 2),
    (256, 8, 1, 64, 2, 1),
    (256, 4, 1, 32, 2, 1),
)


def forward_config(dtype, head_dim, *, smem_limit):
    """The first row of the table that fits the shared memory of a block, or None."""
    for reach, *geometry in _FORWARD:
        if head_dim <= reach:
            config = Sm80Config(dtype, head_dim, *geometry)
            if config.smem_bytes <= smem_limit:
                return config
    return None
