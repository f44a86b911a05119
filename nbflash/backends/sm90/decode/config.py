"""Frozen configurations of ``decode_sm90`` and the table they are chosen from."""

import math
from dataclasses import dataclass

from nbflash.backends.sm90.shared.config import BAD_WORDS, DESCRIPTOR_WORDS, Panels
from nbflash.backends.split_kv.combine_in_block import Room
from nbflash.cuda.tile.smem_layout import barrier_layout, smem_layout
from nbflash.cuda.tile.wgmma.gemm import ALIGNMENT, PANEL

# Of a row tile: query tokens × heads that share a key head; and for 8-bit quantised caches.
ROWS, ROWS_8BIT = 64, 16
WARPS = 4  # that compute
RAGGED = 1 << 30  # added to the kind of a tile that some row does not see to its end
SWIZZLED_ROWS = 8  # a box of keys starts where the swizzle does


@dataclass(frozen=True)
class DecodeSm90Config(Panels):
    """Geometry of ``decode_sm90``.

    Attributes
    ----------
    dtype : {"float16", "bfloat16"}
    head_dim : int
        A multiple of 8 up to 256.
    tile_n : int
        Keys of a tile, a multiple of 32 up to 128.
    box : int
        Keys that follow each other in memory: of a page, or of a tile.
    stored : str
        ``"int8"`` or ``"float8_e4m3fn"`` for 8-bit quantised caches; else nothing.
    masked : bool
        Whether a schedule says which tiles there are; if not, the causal rule.
    stages : int
        Tiles of K and V in flight.
    min_blocks : int
        Blocks a multiprocessor should hold.
    negate : bool
        For scales below zero: S = −Q Kᵀ.
    registers : tuple
        Always (): as launched.
    """

    dtype: str
    head_dim: int
    tile_n: int = 64
    box: int = 64
    stored: str = ""
    masked: bool = False
    stages: int = 3
    min_blocks: int = 2
    negate: bool = False
    registers: tuple = ()

    @property
    def tile_m(self):
        """Rows that a block computes."""
        return ROWS_8BIT if self.quantised else ROWS

    @property
    def threads(self):
        """A warpgroup that computes and a warp that loads."""
        return 160

    @property
    def quantised(self):
        """Whether K and V are quantised to 8 bits, with scales."""
        return bool(self.stored)

    @property
    def stored_panels(self):
        """Panels of 128 bytes of a tile as it is stored."""
        return -(-self.head_dim // (2 * PANEL)) if self.quantised else self.panels

    @property
    def smem_keys(self):
        """Keys of a tile in shared memory."""
        return self.tile_n

    @property
    def warp_keys(self):
        """Those of them that one warp has, where they are quantised."""
        return self.tile_n // WARPS

    @property
    def width(self):
        """Columns of a row that take part, those past head_dim with zeros."""
        if self.quantised and self.head_dim > PANEL:
            return 2 * PANEL * self.stored_panels
        return PANEL * self.panels

    @property
    def q_bytes(self):
        return 2 * self.width * self.tile_m

    @property
    def stored_bytes(self):
        """Of a tile as it is stored."""
        return self.stored_panels * self.tile_n * 2 * PANEL

    @property
    def scale_words(self):
        """Of a stage: the scales of K, those of V, and the unit of V's."""
        return 2 * self.tile_n + 4

    def why_not(self):
        """Reasons why there is no such kernel; empty where there is."""
        reasons = super().why_not() + self.too_few(stages=2)
        if self.tile_n % 32 or self.tile_n > 32 * BAD_WORDS:
            reasons.append(f"tile_n is 32, 64, 96 or 128, got {self.tile_n}")
        if self.quantised and self.tile_n != 64:
            reasons.append(f"tile_n is 64 for 8-bit quantised caches, got {self.tile_n}")
        columns = 16 if self.quantised else 8
        if self.head_dim % columns:
            reasons.append(f"head_dim is a multiple of {columns}, got {self.head_dim}")
        if self.box % SWIZZLED_ROWS or self.tile_n % self.box:
            reasons.append(
                f"keys come by multiples of {SWIZZLED_ROWS} that divide {self.tile_n}, got "
                f"{self.box}"
            )
        return reasons

    @property
    def smem(self):
        """Shared memory, in bytes."""
        return smem_layout(
            q=self.q_bytes,
            k=self.stages * self.stored_bytes,
            v=self.stages * self.stored_bytes,
            scales=self.stages * 4 * self.scale_words * self.quantised,
            descriptors=self.stages * 4 * DESCRIPTOR_WORDS,
            bad_keys=self.stages * 4 * BAD_WORDS,
        )

    @property
    def join_room(self):
        """For the last block's join: the warps that compute, all stages of K and V."""
        return Room(WARPS, self.smem.k, 2 * self.stages * self.stored_bytes)

    @property
    def barriers(self):
        """Behind it; K and V of a stage are released together."""
        n = self.stages
        return barrier_layout(self.smem.end, full_k=n, full_v=n, empty=n)

    @property
    def smem_bytes(self):
        """Dynamic shared memory of a block, with room to align it."""
        return self.barriers.end + ALIGNMENT


# Head_dims up to a number: tile_n, stages, blocks of a multiprocessor; then for 8-bit quantised
# caches, and for these with a mask.
_TABLE = (
    (PANEL, 64, 6, 2),
    (2 * PANEL, 64, 6, 1),
    (3 * PANEL, 64, 4, 1),
    (4 * PANEL, 32, 6, 1),
)
_STORED = (
    (PANEL, 64, 3, 4),
    (2 * PANEL, 64, 3, 3),
    (4 * PANEL, 64, 5, 1),
)
_STORED_MASKED = (
    (PANEL, 64, 3, 3),
    (2 * PANEL, 64, 3, 2),
    (4 * PANEL, 64, 5, 1),
)


def decode_config(dtype, head_dim, page_size, stored="", *, masked=False, negate=False):
    """The configuration for a problem; ``page_size`` is None for a contiguous cache."""
    table = (_STORED_MASKED if masked else _STORED) if stored else _TABLE
    tile_n, stages, blocks = next(row[1:] for row in table if head_dim <= row[0])
    box = tile_n if page_size is None else math.gcd(page_size, tile_n)
    return DecodeSm90Config(dtype, head_dim, tile_n, box, stored, masked, stages, blocks, negate)
