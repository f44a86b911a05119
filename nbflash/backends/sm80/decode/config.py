"""Frozen configurations of ``decode_sm80`` and the table they are chosen from."""

from dataclasses import dataclass

from nbflash.backends.sm80.config import fits
from nbflash.backends.split_kv.combine_in_block import JOINING, Room
from nbflash.cuda.tile.mma.copy import ChunkCopy
from nbflash.cuda.tile.mma.layout import ALIGNMENT, SharedTile, StoredTile
from nbflash.cuda.tile.score import ScoreCode
from nbflash.cuda.tile.smem_layout import smem_layout
from nbflash.definitions.constants import WARP

ROWS = 16  # of a block: query tokens × heads that share a key head
KEYS = 16  # of a tile, that one warp has
_PAD = 8  # columns of O in shared memory: eight rows meet every bank once


@dataclass(frozen=True)
class DecodeSm80Config:
    """Geometry of ``decode_sm80``.

    Attributes
    ----------
    dtype : {"float16", "bfloat16"}
    head_dim : int
        A multiple of 8.
    warps : int
        Each has 16 keys of every tile; at most 8.
    stages : int
        Tiles of K and V that shared memory holds: at least 2.
    min_blocks : int
        Blocks a multiprocessor should hold: bounds the registers.
    stored : str
        ``"int8"`` or ``"float8_e4m3fn"`` for 8-bit quantised caches; else nothing.
    masked : bool
        A schedule says which tiles there are; if not, the causal rule.
    negate : bool
        The scale is negative.
    score : nbflash.cuda.tile.score.ScoreCode, optional
        Functions of the scores.
    """

    dtype: str
    head_dim: int
    warps: int = 4
    stages: int = 2
    min_blocks: int = 2
    stored: str = ""
    masked: bool = False
    negate: bool = False
    score: ScoreCode | None = None

    def __post_init__(self):
        columns = 16 if self.stored else 8
        if self.head_dim % columns or self.head_dim > 256 or self.warps > 8 or self.stages < 2:
            raise ValueError(f"no such kernel: {self}")

    @property
    def quantised(self):
        """Whether K and V are quantised to 8 bits, with scales."""
        return bool(self.stored)

    @property
    def threads(self):
        return WARP * self.warps

    @property
    def tile_m(self):
        """Rows of a block."""
        return ROWS

    @property
    def tile_n(self):
        return KEYS * self.warps

    @property
    def width(self):
        """Columns of a row that take part, those past head_dim with zeros."""
        step = 16 if not self.quantised else 64 if self.head_dim <= 64 else 128
        return -(-self.head_dim // step) * step

    @property
    def tile(self):
        """How a warp's keys lie in shared memory, and of 16 bits the rows of Q."""
        return StoredTile(self.width, KEYS) if self.quantised else SharedTile(self.width)

    @property
    def copy(self):
        """Copies of a warp's keys by that warp; a quantised cache has elements of two bytes."""
        columns = self.head_dim // 2 if self.quantised else self.head_dim
        return ChunkCopy(self.tile, KEYS, WARP, columns, self.dtype)

    @property
    def kv_bytes(self):
        """K, or V, of a stage of one warp."""
        return self.tile.bytes if self.quantised else KEYS * self.tile.row_bytes

    @property
    def stage_bytes(self):
        """Of one warp: K, V, and the scales of both."""
        return 2 * self.kv_bytes + 8 * KEYS * self.quantised

    @property
    def smem_keys(self):
        """Keys of a tile in shared memory."""
        return KEYS

    @property
    def warp_keys(self):
        """All of them are one warp's."""
        return KEYS

    @property
    def o_words(self):
        """From one row of O to the next."""
        return self.width if self.quantised else self.width + _PAD

    @property
    def smem(self):
        """Shared memory, in bytes from the first aligned one; at last O, m and l of every warp are
        where the stages have been.
        """
        results = 4 * ROWS * (self.o_words + 2)
        ring = -(-max(self.stages * self.stage_bytes, results) // ALIGNMENT) * ALIGNMENT
        q = max(2 * ROWS * self.width, JOINING * self.warps + ALIGNMENT)
        return smem_layout(q=q, rings=self.warps * ring)

    @property
    def join_room(self):
        """For the last block's join: all warps, all their stages."""
        return Room(self.warps, self.smem.rings, self.smem.end - self.smem.rings)

    @property
    def ring_bytes(self):
        """Of one warp."""
        return (self.smem.end - self.smem.rings) // self.warps

    @property
    def smem_bytes(self):
        """Dynamic shared memory of a block."""
        return ALIGNMENT + self.smem.end


# head_dim up to, warps, stages, blocks of a multiprocessor; best first among those that fit; then
# for 8-bit quantised caches. What the first rows of a head_dim are beside others on an H200:
# notes/sm80.md. The others, for less shared memory, have not been timed.
_TABLE = (
    (64, 4, 2, 4),
    (64, 4, 2, 2),
    (128, 4, 2, 2),
    (128, 4, 2, 1),
    (256, 4, 3, 1),
    (256, 4, 2, 1),
    (256, 2, 2, 1),
)


_STORED = (
    (64, 4, 2, 4),
    (64, 4, 2, 2),
    (128, 8, 3, 2),
    (128, 4, 3, 2),
    (128, 4, 3, 1),
    (256, 4, 3, 2),
    (256, 4, 2, 2),
    (256, 4, 2, 1),
)


_SCORED_WARPS = 4  # at most, with score functions: two blocks of eight warps would spill registers


def decode_config(
    dtype, head_dim, stored="", *, smem_limit, masked=False, negate=False, scored=False
):
    """The first row that fits the shared memory of a device; the last fits them all."""
    rows = (row[1:] for row in (_STORED if stored else _TABLE) if head_dim <= row[0])
    rows = (row for row in rows if not scored or row[0] <= _SCORED_WARPS)
    configs = (DecodeSm80Config(dtype, head_dim, *row, stored, masked, negate) for row in rows)
    return next(config for config in configs if fits(config, smem_limit))
