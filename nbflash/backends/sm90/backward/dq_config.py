"""Frozen configurations of the pass over rows for dQ and the table they are chosen from."""

from dataclasses import dataclass, field, replace

from nbflash.backends.sm90.backward.config import rows_of
from nbflash.backends.sm90.shared.config import BAD_WORDS, DESCRIPTOR_WORDS, CleanedOperand, Panels
from nbflash.cuda.tile.score import ScoreCode
from nbflash.cuda.tile.smem_layout import barrier_layout, smem_layout
from nbflash.cuda.tile.wgmma.gemm import ALIGNMENT, ROW_BYTES

LAST = 1 << 30  # added to the kind of a row's last tile
ROWS = 64  # queries of a warpgroup


@dataclass(frozen=True)
class Sm90DqConfig(Panels):
    """Geometry of ``bwd_sm90_dq``.

    Attributes
    ----------
    dtype : {"float16", "bfloat16"}
    head_dim : int
        A multiple of 8 up to 256.
    consumers : int
        Warpgroups that compute, 64 query rows each; one more loads.
    tile_n : int
        Keys of a tile: 64 or 128.
    k_stages, v_stages : int
        Tiles of K and of V in flight. K serves two products, the second a tile later.
    q_stages, do_stages : int
        Parts of Q and of dO, of each warpgroup. dQ leaves through the place of one of them: see
        `leaves_by_q`.
    stats_m : int
        Query tile by which the statistics are laid out: 64 or 128.
    registers : tuple of int
        Of a thread that loads and of one that computes; () leaves them as launched.
    min_blocks : int
        Blocks a multiprocessor should hold.
    score : ScoreCode, optional
        Functions of the scores.
    dropout : bool or "placed"
    full_tiles : bool
        No tile of the schedule is masked. The kernel has no code for masked tiles.
    speed : float
        Scores a second, relative to the first row of the table.
    """

    dtype: str
    head_dim: int
    consumers: int
    tile_n: int
    k_stages: int = 2
    v_stages: int = 2
    q_stages: int = 1
    do_stages: int = 1
    stats_m: int = 64
    registers: tuple = (56, 224)
    min_blocks: int = 1
    score: ScoreCode | None = None
    dropout: bool | str = False
    full_tiles: bool = False
    speed: float = field(default=1.0, repr=False, compare=False)

    def why_not(self):
        """Reasons why there is no such kernel; empty where there is."""
        reasons = super().why_not()
        # K of a tile is awaited before that of the one before is released.
        reasons += self.too_few(k_stages=2, v_stages=1, q_stages=1, do_stages=1)
        if self.head_dim % 8:
            reasons.append(f"head_dim is a multiple of 8, got {self.head_dim}")
        for name in ("tile_n", "stats_m"):
            if getattr(self, name) not in (64, 128):
                reasons.append(f"{name} is 64 or 128, got {getattr(self, name)}")
        return reasons

    @property
    def tile_m(self):
        return ROWS * self.consumers

    @property
    def part_bytes(self):
        """Q or dO of one warpgroup."""
        return self.panels * ROWS * ROW_BYTES

    @property
    def leaves_by_q(self):
        """Whether dQ leaves through the place of its Q, which the next row has another one for.

        Otherwise it is that of its dO: the next row's Q is needed before this one's dQ has left.
        """
        return self.q_stages > 1

    @property
    def smem(self):
        """Shared memory, in bytes."""
        return smem_layout(
            q=self.consumers * self.q_stages * self.part_bytes,
            do=self.consumers * self.do_stages * self.part_bytes,
            k=self.k_stages * self.kv_bytes,
            v=self.v_stages * self.kv_bytes,
            descriptors=self.k_stages * DESCRIPTOR_WORDS * 4,
            bad_keys=self.k_stages * BAD_WORDS * 4,
        )

    @property
    def barriers(self):
        """Behind it; ``raw_k`` is completed by the copy, ``full_k`` once K is clean."""
        q, do = self.consumers * self.q_stages, self.consumers * self.do_stages
        k, v = self.k_stages, self.v_stages
        rows = {"full_q": q, "empty_q": q, "full_do": do, "empty_do": do}
        keys = {"full_k": k, "empty_k": k, "full_v": v, "empty_v": v}
        return barrier_layout(self.smem.end, **rows, **keys, raw_k=k)

    @property
    def cleaned(self):
        """The operand that 0 is multiplied with: K."""
        smem, barriers = self.smem, self.barriers
        return CleanedOperand(self.k_stages, smem.k, smem.bad_keys, barriers.full_k, barriers.raw_k)

    @property
    def smem_bytes(self):
        """Dynamic shared memory of a block, with room to align it."""
        return self.barriers.end + ALIGNMENT


# By head_dim up to: consumers, tile_n, k_stages, v_stages, q_stages, do_stages, registers, blocks a
# multiprocessor, speed. TFLOP/s of the kernel, three products, and δ: dense, butterfly, local 1
# (bf16, N = 8192, 2048 / head_dim heads, batch 2, NVIDIA H100 80GB HBM3, 2026-11-21). 64 × 64 tiles
# are for blocks of 64; for their speed see the table of columns in `config.py`.
_TABLE = {
    64: (
        (2, 128, 4, 2, 2, 1, (56, 224), 1, 1.0),  # 608, 495, 373
        (1, 64, 4, 4, 1, 1, (40, 216), 2, 0.91),
    ),
    128: (
        (2, 128, 2, 2, 2, 1, (56, 224), 1, 1.0),  # 737, 574, 413; 64 keys are 10 to 15 % slower
        (1, 64, 2, 2, 1, 1, (40, 216), 2, 0.92),
    ),
    192: ((2, 64, 3, 2, 1, 1, (56, 224), 1, 1.0),),  # 692, 558, 359
    256: ((2, 64, 2, 1, 1, 1, (56, 224), 1, 1.0),),  # 775, 573, 379
}


def dq_configs(dtype, head_dim):
    """The rows of the table for a problem."""
    fields = "consumers", "tile_n", "k_stages", "v_stages", "q_stages", "do_stages", "registers"
    fields += "min_blocks", "speed"
    return [Sm90DqConfig(dtype, head_dim, **row) for row in rows_of(_TABLE, head_dim, fields)]


def completed(config, score=None, dropout=False):
    """The configuration with score functions or dropout, which take registers of those that load,
    and dropout keys where both are most.
    """
    if not (score or dropout):
        return config
    config = replace(config, score=score, dropout=dropout)
    if config.min_blocks == 1:
        config = replace(config, registers=(40, 232))
    if dropout and config.panels > 1 and config.tile_n > 64:
        return replace(config, tile_n=64, k_stages=3, v_stages=3, speed=0.91)
    return config
