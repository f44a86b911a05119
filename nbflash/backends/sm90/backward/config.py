"""Frozen configurations of the Hopper backward kernel and the table they are chosen from."""

from dataclasses import dataclass, field

from nbflash.backends.sm90.shared.config import BAD_WORDS, Panels
from nbflash.cuda.tile.score import ScoreCode
from nbflash.cuda.tile.smem_layout import barrier_layout, smem_layout
from nbflash.cuda.tile.wgmma.gemm import ALIGNMENT, PANEL
from nbflash.cuda.tile.wgmma.gradient import PART
from nbflash.cuda.tile.wgmma.store_rows import warp_bytes

# Of a tile in a column: kind (negative at its first tile), key tile, head, query tile.
COLUMN_DESCRIPTOR_WORDS = 4
PLACE_WORDS = 4  # batch element, query head, first query, first key


@dataclass(frozen=True)
class Sm90BackwardConfig(Panels):
    """Geometry of ``bwd_sm90``.

    Attributes
    ----------
    dtype : {"float16", "bfloat16"}
    head_dim : int
        A multiple of 8 up to 128; up to 256 without dQ.
    consumers : int
        Warpgroups that compute, 64 keys each; one more loads. Each computes one 64 × 64 part of a
        tile of dQ, so there are as many parts as warpgroups. Above 128 columns (`split`) two of
        them share 64 keys: one has dV, the other dK.
    tile_m : int
        Queries of a tile.
    stages : int
        Tiles of Q, and of dO, in flight.
    registers : tuple of int
        Of a thread that loads and of one that computes; () leaves them as launched.
    min_blocks : int
        Blocks a multiprocessor should hold.
    with_dq : bool
        False: dK and dV alone, in four products, without a sum in the order of arrival.
    k_stages : int
        With two the next column's K is there before this one's is done.
    full_tiles : bool
        No tile of the schedule is masked, but for what lies past the last key. The kernel has no
        code for masked tiles.
    edge : bool
        Full tiles may reach past the last key: dS is set to 0 there.
    score : ScoreCode, optional
        Functions of the scores.
    dropout : bool or "placed"
        Without dQ alone.
    speed : float
        Scores a second, relative to the first row of the table.
    """

    dtype: str
    head_dim: int
    consumers: int
    tile_m: int
    stages: int = 2
    registers: tuple = (24, 240)
    min_blocks: int = 1
    with_dq: bool = True
    k_stages: int = 2
    full_tiles: bool = False
    edge: bool = False
    score: ScoreCode | None = None
    dropout: bool | str = False
    speed: float = field(default=1.0, repr=False, compare=False)

    @property
    def split(self):
        """Whether dK and dV of 64 keys fill the registers of a warpgroup each."""
        return self.head_dim > 128

    @property
    def keys_in_registers(self):
        """Whether K and V stay in registers as long as their column lasts."""
        return self.head_dim <= PANEL and not self.with_dq

    @property
    def key_readers(self):
        """Warpgroups that read a tile of K, or of V."""
        return 1 if self.split else self.consumers

    @property
    def early_dv(self):
        """Whether registers suffice to issue dV before dS is computed."""
        return self.tile_m == 64

    @property
    def masks_in_place(self):
        """Whether registers are too few for copies of P and dS for each kind of tile.

        In place there would be too few for slopes beside P.
        """
        return self.with_dq and not self.sloped

    @property
    def sloped(self):
        """Whether slopes of scores are kept beside P."""
        return self.score is not None and self.score.has_slope

    def why_not(self):
        """Reasons why there is no such kernel; empty where there is."""
        reasons = super().why_not()
        if self.head_dim % 8:
            reasons.append(f"head_dim is a multiple of 8, got {self.head_dim}")
        if self.tile_m not in (64, 128):
            reasons.append(f"tile_m is 64 or 128, got {self.tile_m}")
        if self.stages < 2:
            reasons.append(f"S of the next tile needs two stages, got {self.stages}")
        if self.dropout and self.with_dq:
            reasons.append("dropout takes two passes, one without dQ")
        if self.with_dq:
            parts = self.tile_m // 64 * self.panels
            if self.split:
                reasons.append(f"head_dim is at most {MOST_HEAD_DIM} with dQ, got {self.head_dim}")
            if self.consumers != parts:
                reasons.append(f"{parts} parts of dQ for {self.consumers} warpgroups")
            if self.k_stages < 2:
                reasons.append(f"the search in K needs two stages, got {self.k_stages}")
            if self.tile_m > 64 and self.sloped and not (self.full_tiles and self.score.capped):
                reasons.append(
                    "beside slopes of scores, but softcap's where no tile is masked, a tile has 64 "
                    f"queries, got {self.tile_m}"
                )
        elif self.tile_m != 64:
            reasons.append(f"without dQ a tile has 64 queries, got {self.tile_m}")
        elif self.split and self.consumers != 2:
            reasons.append(f"above 128 columns two warpgroups share keys, got {self.consumers}")
        return reasons

    @property
    def tile_n(self):
        return 64 * self.key_readers

    @property
    def stat_bytes(self):
        """shift and −δ of a query tile."""
        return 2 * 4 * self.tile_m

    @property
    def bit_bytes(self):
        """A bit tile."""
        return self.tile_m * -(-self.tile_n // 32) * 4

    @property
    def mask_bytes(self):
        """Room for the bounds of a query tile or for a bit tile."""
        return 0 if self.full_tiles else max(self.stat_bytes, self.bit_bytes)

    @property
    def sum_bytes(self):
        """Of a warpgroup's part of dQ."""
        return 4 * PART if self.with_dq else 0

    @property
    def out_columns(self):
        """How many columns of dK and dV a warp stores at a time.

        64 where there is room: 1 % faster without dQ at d=128, nothing at d=64. With dQ there is
        room at d=64 alone, where it is 2 % slower (causal; N = 8192, NVIDIA H100 80GB HBM3,
        2026-11-23).
        """
        return 32 if self.with_dq or self.split else PANEL

    @property
    def out_offset(self):
        """Where the warps' rows of dK and dV wait to leave, behind dQ."""
        return self.smem.leaving + self.consumers * self.sum_bytes

    @property
    def smem(self):
        """Shared memory, in bytes. Warpgroups exchange dS, or P; what leaves is dQ, and rows of dK
        and dV; ``slots`` are tile numbers of dQ, ``places`` those of scores.
        """
        exchange = 4 * PART if self.split else 0
        return smem_layout(
            q=self.stages * self.q_bytes,
            k=self.k_stages * self.kv_bytes,
            v=self.kv_bytes,
            do=self.stages * self.q_bytes,
            exchange=self.tile_m * self.tile_n * 2 if self.with_dq else exchange,
            leaving=self.consumers * (self.sum_bytes + 4 * warp_bytes(self.out_columns)),
            statistics=self.stages * self.stat_bytes,
            masks=self.stages * self.mask_bytes,
            descriptors=self.stages * COLUMN_DESCRIPTOR_WORDS * 4,
            bad_keys=self.k_stages * BAD_WORDS * 4,
            slots=4 * 4,
            places=self.stages * PLACE_WORDS * 4 * self.placed,
        )

    @property
    def placed(self):
        """Whether anything depends on where a score is."""
        return self.score is not None or bool(self.dropout)

    @property
    def barriers(self):
        """Behind it; ``raw`` ones are completed by the copy, ``full`` ones once rows are clean.

        Q and dO of a stage are released together, and arrive together but where there is dQ.
        """
        n, k = self.stages, self.k_stages
        queries = {"full_q": n, "full_do": n * self.with_dq, "empty_q": n}
        keys = {"full_k": k, "empty_k": k, "full_v": 1, "empty_v": 1}
        return barrier_layout(self.smem.end, **queries, **keys, raw=n, raw_k=k)

    @property
    def smem_bytes(self):
        """Dynamic shared memory of a block, with room to align it."""
        return self.barriers.end + ALIGNMENT


# By head_dim up to: consumers, tile_m, stages, registers, blocks a multiprocessor, speed.
#
# d=64 with 24 and 240 registers spills 112 bytes where tiles are masked: causal 5 %, dense 1 %
# slower (bf16, N = 8192, 32 heads, batch 2, NVIDIA H100 80GB HBM3, 2026-11-22). 64 × 64 tiles, two
# blocks a multiprocessor, are for slopes of scores, beside which 128 queries have no registers;
# three stages are no faster. Dense, causal, random blocks of 64 (12.5 %) and a butterfly of blocks
# of 64: 436, 415, 262 and 222 TFLOP/s, the first row 497, 452, 126 and 181 (the same sizes and GPU,
# 2026-11-26). Without slopes two passes have 358 and 308 of the last two.
_TABLE = {
    64: ((2, 128, 2, (40, 232), 1, 1.0), (1, 64, 2, (32, 224), 2, 0.88)),
    128: ((2, 64, 2, (24, 240), 1, 1.0),),
}
MOST_HEAD_DIM = max(_TABLE)  # in one pass

# What a key of two passes costs over one of one, by head_dim up to. Both passes compute softcap's
# tanh: causal, one pass and two, all kernels, 385 and 246 TFLOP/s at d=64, 397 and 351 at d=128
# (bf16, N = 8192, 2048 / head_dim heads, batch 2, NVIDIA H100 80GB HBM3, 2026-11-27). Both read
# biases: 277 and 214, relative ones 338 and 215 at d=128 (the same sizes, NVIDIA H200, 2026-11-27).
_KEY_OF_TWO = {
    "plain": {64: 1.2, 128: 1.1},
    "softcap": {64: 1.7, 128: 1.2},
    "reading": {64: 1.2, 128: 1.5},
}

# What clearing, adding up and rounding dQ costs a query, in keys. Time of one pass over that of
# two, all kernels, at 384 keys a query (local 1), 896 (butterfly) and 1113 (local 4), N = 8192, and
# at 2048 (dense, N = 2048; bf16, 2048 / head_dim heads, 16384 tokens, NVIDIA H100 80GB HBM3,
# 2026-11-22):
#     d=64     1.31, 1.03, 0.985, 0.94
#     d=128    1.43, 1.12, 1.08
SUM_KEYS = 256


def row_of(table, head_dim):
    """The entry of the least head_dim that a problem's is within; () beyond the table."""
    return next((row for most, row in table.items() if head_dim <= most), ())


def rows_of(table, head_dim, fields):
    """The rows for a head_dim, as keyword arguments."""
    return [dict(zip(fields, row, strict=True)) for row in row_of(table, head_dim)]


def two_passes_are_faster(head_dim, keys, rows_keys, columns_keys, scores="plain"):
    """Whether dQ by rows and dK and dV by columns take less time than one pass over columns.

    Both times are linear in the keys that a query meets on average in the tiles that are walked,
    over their speed: in one pass, in the pass by rows (3 of 7 products) and in that by columns.
    ``scores``: "plain", "softcap" where that is among their functions, or "reading" where they read
    an array by place.
    """
    key_of_two = row_of(_KEY_OF_TWO[scores], head_dim)
    return key_of_two * (3 * rows_keys + 4 * columns_keys) / 7 <= keys + SUM_KEYS


def backward_configs(dtype, head_dim):
    """The rows of the table for a problem; none above `MOST_HEAD_DIM`."""
    fields = "consumers", "tile_m", "stages", "registers", "min_blocks", "speed"
    return [Sm90BackwardConfig(dtype, head_dim, **row) for row in rows_of(_TABLE, head_dim, fields)]


# Without dQ, by head_dim up to: consumers, tile_m, stages, registers, k_stages, blocks a
# multiprocessor, speed. TFLOP/s of the kernel, four products: dense, butterfly, local 1 (bf16,
# N = 8192, 2048 / head_dim heads, batch 2, NVIDIA H100 80GB HBM3, 2026-11-21). 64 × 64 tiles are
# for blocks of 64; their speed is what both passes of random blocks of 128, of windows and of dense
# tiles take with one and with the other (2026-11-27).
_COLUMNS = {
    64: (
        (2, 64, 4, (56, 224), 2, 1, 1.0),  # 605, 545, 477; a stage of K, six of Q: 10 to 20 % less
        (1, 64, 4, (32, 224), 2, 2, 0.97),
    ),
    128: (
        (2, 64, 3, (40, 232), 2, 1, 1.0),  # 708, 625, 515; two stages: 12 % less
        (1, 64, 2, (32, 224), 1, 2, 0.92),
    ),
    192: ((2, 64, 3, (56, 224), 1, 1, 1.0),),  # 577, 528, 437
    256: ((2, 64, 2, (56, 224), 1, 1, 1.0),),  # 609, 542, 440
}


def columns_configs(dtype, head_dim):
    """The rows of the table for a problem's pass over columns, for dK and dV alone."""
    fields = "consumers", "tile_m", "stages", "registers", "k_stages", "min_blocks", "speed"
    rows = rows_of(_COLUMNS, head_dim, fields)
    return [Sm90BackwardConfig(dtype, head_dim, with_dq=False, **row) for row in rows]
