"""Frozen configurations of the portable tensor-core kernels and the tables they come from."""

from dataclasses import dataclass, field, replace

from nbflash.cuda.kinds import float32
from nbflash.cuda.tile.mma.copy import ChunkCopy
from nbflash.cuda.tile.mma.layout import ALIGNMENT, SharedTile
from nbflash.cuda.tile.score import ScoreCode
from nbflash.cuda.tile.smem_layout import smem_layout
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
    dropout : bool or "placed"
        Only where ``tile_n`` is a multiple of 32.
    speed : float
        Measured scores a second, over those of the table of large tiles.
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
    dropout: bool | str = False
    speed: float = field(default=1.0, repr=False, compare=False)

    def __post_init__(self):
        if self.head_dim % 8 or self.tile_n % (32 if self.dropout else 16) or self.stages < 2:
            raise ValueError(f"no such kernel: {self}")

    accumulator = float32

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
    def smem(self):
        """Shared memory, in bytes from the first aligned one."""
        q, ring = self.tile_m * self.tile.row_bytes, self.stages * self.stage_bytes
        return smem_layout(q=q, ring=ring)

    @property
    def smem_bytes(self):
        """Dynamic shared memory of a block."""
        return ALIGNMENT + self.smem.end


@dataclass(frozen=True)
class Sm80BackwardConfig:
    """Geometry of ``bwd_sm80``: a block keeps the rows of one tile and walks those of others.

    Attributes
    ----------
    dtype, head_dim, warps, m_tiles, min_blocks, negate, full_tiles, score, dropout, speed
        As in :class:`Sm80Config`; the rows that a warp owns are those that are kept.
    length : int
        Rows of a tile that is walked, a multiple of 16.
    stages : int
        Such tiles that shared memory holds.
    walk : {"columns", "rows"}
        Keys are kept and queries walked, or the other way round.
    sums : {"both", "dv", "dk"}
        What is summed over a column.
    atomic_dq : bool
        Add dQ to global memory while walking columns.
    vector_red : bool
        Four numbers at once (compute capability 9.0).
    """

    dtype: str
    head_dim: int
    warps: int
    m_tiles: int
    length: int
    stages: int = 2
    min_blocks: int = 1
    walk: str = "columns"
    sums: str = "both"
    atomic_dq: bool = False
    vector_red: bool = False
    negate: bool = False
    full_tiles: bool = False
    score: ScoreCode | None = None
    dropout: bool | str = False
    speed: float = field(default=1.0, repr=False, compare=False)

    def __post_init__(self):
        if self.head_dim % 8 or self.length % (32 if self.dropout else 16) or self.stages < 1:
            raise ValueError(f"no such kernel: {self}")
        if self.walk == "columns" and self.length > 2 * self.threads:
            raise ValueError(f"a thread copies the numbers of two rows at most: {self}")

    accumulator = float32

    @property
    def threads(self):
        return WARP * self.warps

    @property
    def kept(self):
        """Rows of the tile that a block keeps."""
        return 16 * self.m_tiles * self.warps

    @property
    def tile_m(self):
        return self.length if self.walk == "columns" else self.kept

    @property
    def tile_n(self):
        return self.kept if self.walk == "columns" else self.length

    @property
    def tile(self):
        """How rows of all operands lie in shared memory."""
        return SharedTile(_padded(self.head_dim, (self.kept, self.length), self.threads))

    def _dq_parts(self, width):
        """(16-row tiles, columns) of dQ for a warp, the least operands to load first.

        Never empty: length · width / 8 is a multiple of the threads, so that some number of parts
        divides.
        """
        steps, tiles = width // 16, self.length // 16
        return sorted(
            (16 * tiles * parts // self.warps + width // parts, tiles * parts // self.warps, parts)
            for parts in range(1, self.warps + 1)
            if self.warps % parts == 0 and steps % parts == 0 and tiles * parts % self.warps == 0
        )

    @property
    def dq_part(self):
        """16-row tiles and columns of dQ that a warp computes of a tile."""
        _, tiles, parts = self._dq_parts(self.tile.width)[0]
        return tiles, self.tile.width // parts

    @property
    def ds_tile(self):
        """How dSᵀ lies in shared memory."""
        return SharedTile(self.length)

    def copy(self, rows):
        """Copies of tiles of so many rows by the whole block."""
        return ChunkCopy(self.tile, rows, self.threads, self.head_dim, self.dtype)

    @property
    def smem(self):
        """Shared memory, in bytes from the first aligned one: the two tiles that are kept, those
        that are walked, dSᵀ, and shift and δ of queries that are walked.
        """
        row_bytes = self.tile.row_bytes
        return smem_layout(
            first=self.kept * row_bytes,
            second=self.kept * row_bytes,
            ring=2 * self.stages * self.length * row_bytes,
            ds=self.kept * self.ds_tile.row_bytes * self.atomic_dq,
            numbers=8 * self.stages * self.length * (self.walk == "columns"),
        )

    @property
    def smem_bytes(self):
        return ALIGNMENT + self.smem.end


# Rows (head_dim up to, warps, m_tiles, tile_n or length, stages, min_blocks, speed), best first
# among those of which a multiprocessor holds as many blocks as they say. Measured on an H100; what
# serves devices with 99 KB follows flash-attn-2's choices. The second table of a direction is for
# masks of small blocks: tiles have 64 keys and 64 or 32 queries (H200, notes/sm80.md; of the rows
# below the first of a head_dim only `stages=1` and `length=32` were timed). Speeds are over those
# of the first table.
_FORWARD = (
    (64, 4, 2, 64, 3, 3, 1.0),
    (64, 4, 2, 64, 2, 2, 1.0),
    (128, 4, 2, 64, 3, 2, 1.0),
    (128, 4, 2, 32, 2, 2, 1.0),
    (256, 4, 1, 64, 2, 2, 1.0),
    (256, 8, 1, 64, 2, 1, 1.0),
    (256, 4, 1, 64, 2, 1, 1.0),
)
_FORWARD_OF_64 = (
    (64, 2, 2, 64, 3, 6, 0.93),
    (64, 2, 2, 64, 2, 4, 0.93),
    (64, 2, 2, 64, 2, 3, 0.93),
    (128, 2, 2, 64, 2, 4, 0.95),
    (128, 2, 2, 64, 2, 2, 0.95),
)
_BACKWARD = (
    (64, 4, 2, 32, 2, 2, 1.0),
    (64, 4, 2, 32, 1, 2, 1.0),
    (128, 8, 1, 64, 2, 1, 1.0),
    (128, 8, 1, 32, 1, 1, 1.0),
    (256, 8, 1, 64, 1, 1, 1.0),
    (256, 8, 1, 32, 2, 1, 1.0),
    (256, 4, 1, 32, 2, 1, 1.0),
    (256, 4, 1, 16, 2, 1, 1.0),
    (256, 2, 1, 32, 2, 1, 1.0),  # for dropout, which takes rows by 32
)
_BACKWARD_OF_64 = (
    (64, 2, 2, 32, 2, 3, 0.98),
    (64, 4, 1, 32, 2, 2, 0.74),
    (128, 4, 1, 64, 2, 2, 0.93),
    (128, 4, 1, 64, 1, 2, 0.9),
    (128, 4, 1, 64, 1, 1, 0.9),
)
_BOTH_SUMS = 128  # the largest head_dim of which the registers hold dK and dV
_RESERVED = 1024  # bytes of shared memory that every block has besides


def fits(config, smem_limit):
    """Whether a multiprocessor holds ``min_blocks``: it has 1 KB more than a block may have."""
    return config.min_blocks * (config.smem_bytes + _RESERVED) <= smem_limit + _RESERVED


def forward_configs(dtype, head_dim, *, smem_limit):
    """Of either table the first row that fits the shared memory of a device; none at worst."""
    found = []
    for table in (_FORWARD, _FORWARD_OF_64):
        rows = _rows(table, head_dim, "tile_n")
        configs = (Sm80Config(dtype, head_dim, **row) for row in rows)
        found += [config for config in configs if fits(config, smem_limit)][:1]
    return found


def backward_configs(dtype, head_dim, *, smem_limit, deterministic, vector_red, dropout=False):
    """The same of a backward: the passes of each, of which the last one walks columns.

    They are one or two with atomics, and one more without.
    """
    how, found = {"deterministic": deterministic, "vector_red": vector_red}, []
    for table in (_BACKWARD, _BACKWARD_OF_64):
        rows = _rows(table, head_dim, "length")
        bases = (Sm80BackwardConfig(dtype, head_dim, **row) for row in rows)
        passes = (passes_of(b, **how) for b in bases if not (dropout and b.length % 32))
        found += [each for each in passes if all(fits(c, smem_limit) for c in each)][:1]
    return found


def _rows(table, head_dim, walked):
    """The rows of a table for a head_dim, by the names of attributes."""
    names = "warps", "m_tiles", walked, "stages", "min_blocks", "speed"
    return [dict(zip(names, row[1:], strict=True)) for row in table if head_dim <= row[0]]


def passes_of(base, *, deterministic, vector_red):
    """The passes of a backward with the geometry of ``base``."""
    sums = ("both",) if base.head_dim <= _BOTH_SUMS else ("dv", "dk")
    columns = [replace(base, sums=which) for which in sums]
    if deterministic:
        return (replace(base, walk="rows"), *columns)
    return (*columns[:-1], replace(columns[-1], atomic_dq=True, vector_red=vector_red))
