"""Frozen configurations of the Hopper kernels and the tables they are chosen from."""

from dataclasses import dataclass

from nbflash.tile.wgmma_gemm import ALIGNMENT, PANEL

RECORD_WORDS = 4  # kind, first key, row, head
BAD_WORDS = 4  # a bit for each of 128 keys
END = 0  # kind of the record that closes a stream
FIRST = 1 << 30  # added to the kind of a row's first tile


def _cdiv(a, b):
    return -(-a // b)


@dataclass(frozen=True)
class Sm90Config:
    """Geometry of ``fwd_sm90``.

    Attributes
    ----------
    dtype : {"float16", "bfloat16"}
    head_dim : int
        A multiple of 8 up to 256.
    consumers : int
        Warpgroups that compute, 64 query rows each; one more loads.
    tile_n : int
        Keys of a tile.
    k_stages, v_stages : int
        Tiles of K and of V in flight. S of a tile is asked for half a tile ahead.
    q_stages : int
        Query tiles: with two, the next row's arrives while this row is computed.
    registers : tuple of int
        Of a thread that loads and of one that computes; () leaves them as launched.
    min_blocks : int
        Blocks a multiprocessor should hold.
    ping_pong : bool
        Warpgroups take turns: one multiplies while another exponentiates.
    negate : bool
        For scales below zero: S = −Q Kᵀ.
    """

    dtype: str
    head_dim: int
    consumers: int
    tile_n: int
    k_stages: int = 3
    v_stages: int = 2
    q_stages: int = 2
    registers: tuple = (24, 240)
    min_blocks: int = 1
    ping_pong: bool = True
    negate: bool = False

    @property
    def tile_m(self):
        return 64 * self.consumers

    @property
    def threads(self):
        return 128 * (self.consumers + 1)

    @property
    def panels(self):
        return _cdiv(self.head_dim, PANEL)

    @property
    def q_bytes(self):
        return self.panels * self.tile_m * 2 * PANEL

    @property
    def kv_bytes(self):
        return self.panels * self.tile_n * 2 * PANEL

    @property
    def offsets(self):
        """Shared memory in bytes: K, V, records, bad keys, barriers (Q is at 0)."""
        k = self.q_stages * self.q_bytes
        v = k + self.k_stages * self.kv_bytes
        records = v + self.v_stages * self.kv_bytes
        bad = records + 4 * RECORD_WORDS * self.k_stages
        return k, v, records, bad, bad + 4 * BAD_WORDS * self.v_stages

    @property
    def barriers(self):
        """Where the barriers start: full and empty of Q, K and V, and raw of V."""
        counts = (self.q_stages,) * 2 + (self.k_stages,) * 2 + (self.v_stages,) * 3
        return tuple(self.offsets[-1] + 8 * sum(counts[:i]) for i in range(len(counts)))

    @property
    def smem_bytes(self):
        """Dynamic shared memory of a block, with room to align it."""
        return self.barriers[-1] + 8 * self.v_stages + ALIGNMENT


# head_dim up to; consumers, tile_n, k_stages, v_stages, q_stages, registers, min_blocks, ping_pong.
_WIDE = (
    (64, 2, 128, 3, 3, 2, (56, 224), 1, True),
    (128, 2, 128, 3, 2, 2, (56, 224), 1, True),
    (192, 2, 64, 3, 2, 1, (56, 224), 1, True),
    (256, 2, 64, 3, 2, 1, (56, 224), 1, True),
)
# One warpgroup on 64 × 64 tiles, two blocks on a multiprocessor: for masks of small blocks.
_SMALL = (
    (64, 1, 64, 3, 3, 2, (56, 200), 2, False),
    (128, 1, 64, 3, 2, 1, (56, 200), 2, False),
)
# How much faster a score is in the wide tiles.
_ADVANTAGE = 1.7


def forward_configs(dtype, head_dim, negate=False):
    """The candidates for a problem: wide tiles, and small ones if there are any."""
    found = []
    for table in (_WIDE, _SMALL):
        rows = (row for row in table if head_dim <= row[0])
        found += [Sm90Config(dtype, head_dim, *row[1:], negate) for row in list(rows)[:1]]
    return found


def choose(configs, schedules):
    """The pair of configuration and schedule with the least work.

    Parameters
    ----------
    configs : list of Sm90Config
    schedules : callable
        ``schedules(config)`` is the mask's `TileSchedule` for its tiles.
    """
    wide = configs[0], schedules(configs[0])
    if len(configs) == 1 or wide[1].density == 1:
        return wide
    small = configs[1], schedules(configs[1])
    return small if _scores(small[1]) * _ADVANTAGE < _scores(wide[1]) else wide


def _scores(schedule):
    return schedule.col_idx.size * schedule.tile_m * schedule.tile_n
