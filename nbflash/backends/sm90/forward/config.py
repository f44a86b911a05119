"""Frozen configurations of the Hopper forward and the table they are chosen from."""

from dataclasses import dataclass, field, replace

from nbflash.backends.sm90.shared.config import (
    BAD_WORDS,
    DESCRIPTOR_WORDS,
    MOST_CONSUMERS,
    CleanedOperand,
    Panels,
)
from nbflash.cuda.tile.score import ScoreCode
from nbflash.cuda.tile.smem_layout import barrier_layout, smem_layout
from nbflash.cuda.tile.wgmma.gemm import ALIGNMENT, ROW_BYTES


@dataclass(frozen=True)
class Sm90Config(Panels):
    """Geometry of ``fwd_sm90``.

    Attributes
    ----------
    dtype : {"float16", "bfloat16"}
    head_dim : int
        A multiple of 8 up to 256.
    consumers : int
        Warpgroups that compute, 64 query rows each; one more loads.
    tile_n : int
        Keys of a tile, a multiple of 16 (by halves of 32, with dropout of twice that) up to 128: a
        thread's part of a mask's row is a word.
    k_stages, v_stages : int
        Tiles of K and of V in flight.
    q_stages : int
        Query tiles: with two, the next row's arrives while this row is computed; O of the row
        before may still be leaving through its place, for which more are there.
    registers : tuple of int
        Of a thread that loads and of one that computes; () leaves them as launched.
    min_blocks : int
        Blocks a multiprocessor should hold.
    halves : bool
        Work on a tile by halves: :mod:`.mainloop_overlap`.
    speed : float
        TFLOP/s over the scores of its tiles: see the table.
    negate : bool
        For scales below zero: S = −Q Kᵀ.
    score : ScoreCode, optional
        Functions of the scores.
    dropout : bool or "placed"
    full_tiles : bool
        No tile of the schedule is masked, and nothing is there for those that are: see `choose`.
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
    halves: bool = False
    speed: float = field(default=1.0, repr=False, compare=False)
    negate: bool = False
    score: ScoreCode | None = None
    dropout: bool | str = False
    full_tiles: bool = False

    @property
    def tile_m(self):
        return 64 * self.consumers

    def why_not(self):
        """Reasons why there is no such kernel; empty where there is."""
        reasons = super().why_not()
        step, most = 16 * (1 + self.halves) * (1 + bool(self.dropout)), 32 * BAD_WORDS
        if self.tile_n % step or self.tile_n > most:
            reasons.append(f"tile_n is a multiple of {step} up to {most}, got {self.tile_n}")
        # A tile's K and V are awaited before those of the one before are released.
        reasons += self.too_few(consumers=1, k_stages=2, v_stages=2, q_stages=1)
        if self.consumers > MOST_CONSUMERS:
            reasons.append(f"consumers is at most {MOST_CONSUMERS}, got {self.consumers}")
        return reasons

    @property
    def ramp(self):
        """Whether ALiBi is a product: see :mod:`.alibi_gemm`. Of whole tiles, with room for R; and
        a kernel without masked tiles has no step for those that the diagonal crosses.
        """
        adds = self.score is not None and self.score.adds
        return adds and self.panels == 1 and not (self.halves or self.full_tiles)

    @property
    def smem(self):
        """Shared memory, in bytes."""
        return smem_layout(
            q=self.q_stages * self.q_bytes,
            k=self.k_stages * self.kv_bytes,
            v=self.v_stages * self.kv_bytes,
            ramp=self.ramp * self.tile_n * ROW_BYTES,
            descriptors=4 * DESCRIPTOR_WORDS * self.k_stages,
            bad_keys=4 * BAD_WORDS * self.v_stages,
        )

    @property
    def barriers(self):
        """Behind it; ``raw_v`` is completed by the copy, ``full_v`` once V is clean."""
        q, k, v = self.q_stages, self.k_stages, self.v_stages
        stages = {"full_q": q, "empty_q": q, "full_k": k, "empty_k": k}
        return barrier_layout(self.smem.end, **stages, full_v=v, empty_v=v, raw_v=v)

    @property
    def cleaned(self):
        """The operand that 0 is multiplied with: V."""
        smem, barriers = self.smem, self.barriers
        return CleanedOperand(self.v_stages, smem.v, smem.bad_keys, barriers.full_v, barriers.raw_v)

    @property
    def smem_bytes(self):
        """Dynamic shared memory of a block, with room to align it."""
        return self.barriers.end + ALIGNMENT


# A row for head_dims up to its first number: consumers, tile_n, k_stages, v_stages, q_stages,
# registers, min_blocks, halves; and TFLOP/s over the scores of its tiles (bf16, N = 8192,
# 2048 / head_dim heads, batch 2, NVIDIA H100 80GB HBM3, 2026-11-21; wide heads 2026-11-23), by
# which a schedule chooses between rows of one width; of tiles without scores and dropout.
# To measure them anew, beside candidates: ``python -m experiments tune``.
_TABLE = (
    # 192 × 112: three warpgroups hide more, if the mask does not mind.
    (64, 3, 112, 3, 3, 2, (56, 152), 1, False, 545),
    # 128 keys and queries, the blocks of most masks. Two places of Q for four: N = 512 and 1024,
    # causal, 10 and 3 % slower; long rows and 192 × 112 the same.
    (64, 2, 128, 3, 3, 4, (56, 224), 1, True, 460),
    (128, 2, 128, 3, 2, 2, (56, 224), 1, False, 690),
    (192, 2, 64, 3, 2, 2, (56, 224), 1, False, 780),
    (256, 2, 64, 3, 2, 1, (56, 224), 1, False, 805),
    # One warpgroup on 64 × 64, two blocks on a multiprocessor: for masks of small blocks.
    (64, 1, 64, 3, 3, 2, (56, 200), 2, True, 345),
    (128, 1, 64, 2, 2, 2, (56, 200), 2, False, 490),
)


def forward_configs(dtype, head_dim, negate=False, score=None, dropout=False):
    """The candidates for a problem."""
    least = min(row[0] for row in _TABLE if head_dim <= row[0])
    rows = [row for row in _TABLE if row[0] == least]
    configs = [Sm90Config(dtype, head_dim, *row[1:], negate, score, dropout) for row in rows]
    if score and "softcap" in score.forms:  # tanh and the exponentials outlast the products
        return [replace(c, halves=True) for c in configs if c.consumers < 3]
    if dropout or (score and not configs[0].ramp):  # registers that three warpgroups have not
        return [replace(c, tile_n=96) if c.consumers == 3 else c for c in configs]
    return configs
