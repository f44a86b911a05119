"""Frozen configurations of ``decode_simt``, by what its registers hold."""

from dataclasses import dataclass

from nbflash.cuda.kinds import ACCUMULATOR
from nbflash.cuda.tile.score import ScoreCode
from nbflash.cuda.tile.smem_layout import smem_layout
from nbflash.definitions.constants import WARP

LANE_COLUMNS = 8  # of a row of Q, K, V and O, in a lane's registers


@dataclass(frozen=True)
class DecodeSimtConfig:
    """Geometry of ``decode_simt``.

    ``lanes`` neighbouring lanes share a key; there are ``slots`` such groups in a block, and each
    holds ``keys`` keys of a tile at once. Every lane holds its columns of all ``rows``.

    Attributes
    ----------
    dtype, cache_dtype : str
        Of q, and of the cache.
    head_dim : int
    pack : int
        Query heads of a KV group that a block takes together.
    queries : int
        Query tokens of a block.
    keys : int
    masked : bool
        A schedule says what is attended; else token i attends the keys up to its own position.
    vectors : bool
        Rows of q and of the cache may be read four elements at a time.
    warps : int
    min_blocks : int
    score : nbflash.cuda.tile.score.ScoreCode, optional
        Functions of the scores.
    """

    dtype: str
    cache_dtype: str
    head_dim: int
    pack: int
    queries: int
    keys: int
    masked: bool
    vectors: bool
    warps: int = 4
    min_blocks: int = 2
    score: ScoreCode | None = None

    @property
    def threads(self):
        return WARP * self.warps

    @property
    def rows(self):
        """Row r is head ``r % pack`` of query token ``r // pack``."""
        return self.queries * self.pack

    @property
    def lanes(self):
        """A power of two."""
        needed = min(WARP, -(-self.head_dim // LANE_COLUMNS))
        return 1 << (needed - 1).bit_length()

    @property
    def width(self):
        """Columns of a row in the registers of its lanes: whole quads of every lane."""
        return -(-self.head_dim // (4 * self.lanes)) * 4 * self.lanes

    @property
    def slots(self):
        return self.threads // self.lanes

    @property
    def tile_n(self):
        return self.slots * self.keys

    @property
    def quantised(self):
        return self.cache_dtype != self.dtype

    @property
    def accumulator(self):
        return ACCUMULATOR[self.dtype]

    @property
    def smem(self):
        """Shared memory, in elements: O, m and l of every warp."""
        rows = self.warps * self.rows
        return smem_layout(o=rows * self.width, m=rows, l=rows)

    @property
    def smem_bytes(self):
        return self.smem.end * self.accumulator.bitwidth // 8


def packed_heads(group, most):
    """The most heads of a KV group that divide it and fit ``most`` rows."""
    return max(p for p in range(1, min(group, most) + 1) if group % p == 0)


def decode_config(dtype, cache_dtype, head_dim, *, nq, group, masked, vectors):
    """The geometry for ``nq`` query tokens and ``group`` query heads that share keys and a mask."""
    wide = dtype == "float64"
    most = 2 if wide else 8
    pack = packed_heads(group, most)
    blocks = -(-nq // (most // pack))
    queries = -(-nq // blocks)
    rows = queries * pack
    return DecodeSimtConfig(
        dtype,
        cache_dtype,
        head_dim,
        pack,
        queries,
        keys=(2 if wide else 4) // (1 if rows <= most // 4 or rows == 1 else 2),
        masked=masked,
        vectors=vectors,
    )
