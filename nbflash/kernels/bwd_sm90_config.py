"""Frozen configurations of the Hopper backward kernel and the table they are chosen from."""

from dataclasses import dataclass
from itertools import accumulate

from nbflash.kernels.sm90_config import Panels
from nbflash.tile.wgmma_gemm import ALIGNMENT
from nbflash.tile.wgmma_gradient import PART

RECORD_WORDS = 4  # kind (negative at a column's first tile), key tile, head, query tile
BAD_WORDS = 4  # a bit for each of 128 keys
END = 0  # kind of the record that closes a stream
K_STAGES = 2  # the next column's K is there before this one's is done


@dataclass(frozen=True)
class Sm90BackwardConfig(Panels):
    """Geometry of ``bwd_sm90``.

    Attributes
    ----------
    dtype : {"float16", "bfloat16"}
    head_dim : int
        A multiple of 8 up to 128.
    consumers : int
        Warpgroups that compute, 64 keys each; one more loads. Each computes one 64 × 64 part of a
        tile of dQ, so there are as many parts as warpgroups.
    tile_m : int
        Queries of a tile.
    stages : int
        Tiles of Q, and of dO, in flight: a power of two.
    registers : tuple of int
        Of a thread that loads and of one that computes; () leaves them as launched.
    """

    dtype: str
    head_dim: int
    consumers: int
    tile_m: int
    stages: int = 2
    registers: tuple = (24, 240)
    min_blocks: int = 1

    @property
    def early_dv(self):
        """Whether registers suffice to issue dV before dS is computed."""
        return self.tile_m == 64

    @property
    def tile_n(self):
        return 64 * self.consumers

    @property
    def stat_bytes(self):
        """shift and δ of a query tile."""
        return 2 * 4 * self.tile_m

    @property
    def bit_bytes(self):
        """A bit tile."""
        return self.tile_m * -(-self.tile_n // 32) * 4

    @property
    def mask_bytes(self):
        """Room for the bounds of a query tile or for a bit tile."""
        return max(self.stat_bytes, self.bit_bytes)

    @property
    def offsets(self):
        """Shared memory in bytes; Q is at 0.

        K, V, dO, dS, dQ, statistics, masks, records, bad keys, tile numbers of dQ, barriers.
        """
        sizes = (
            self.stages * self.q_bytes,
            K_STAGES * self.kv_bytes,
            self.kv_bytes,
            self.stages * self.q_bytes,
            self.tile_m * self.tile_n * 2,
            self.consumers * PART * 4,
            self.stages * self.stat_bytes,
            self.stages * self.mask_bytes,
            self.stages * RECORD_WORDS * 4,
            K_STAGES * BAD_WORDS * 4,
            4 * 4,
        )
        return tuple(accumulate(sizes))

    @property
    def barriers(self):
        """Where the barriers start: full and empty of Q, dO, K and V, raw of Q and dO, and of K."""
        counts = (*(self.stages,) * 4, *(K_STAGES,) * 2, 1, 1, self.stages, K_STAGES)
        return tuple(self.offsets[-1] + 8 * sum(counts[:i]) for i in range(len(counts)))

    @property
    def smem_bytes(self):
        """Dynamic shared memory of a block, with room to align it."""
        return self.barriers[-1] + 8 * K_STAGES + ALIGNMENT


# head_dim up to; consumers, tile_m.
_TABLE = ((64, 2, 128), (128, 2, 64))
MOST_HEAD_DIM = _TABLE[-1][0]


def backward_config(dtype, head_dim):
    """The row of the table for a problem."""
    row = next(row for row in _TABLE if head_dim <= row[0])
    return Sm90BackwardConfig(dtype, head_dim, *row[1:])
