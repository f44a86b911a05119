"""What the Hopper kernels share: tile descriptors, named barriers, tiles in panels."""

from typing import NamedTuple

from nbflash.cuda.tile.wgmma.gemm import PANEL

DESCRIPTOR_WORDS = 4  # kind, first key, row, head
BAD_WORDS = 4  # a bit for each of 128 keys
END = 0  # kind of the tile descriptor that closes a stream
FIRST = 1 << 30  # added to the kind of a row's first tile
# Of a multiprocessor: bytes of shared memory, those of them that a block has for itself, registers.
SMEM_BYTES, RESERVED_BYTES, REGISTERS = 228 << 10, 1 << 10, 1 << 16
MOST_CONSUMERS = 3
# Named barriers: of the NaN watch, of a warpgroup that stores its rows, of its turn to issue.
CLEANERS = 8
STORERS = CLEANERS + 1
TURNS = STORERS + MOST_CONSUMERS


class CleanedOperand(NamedTuple):
    """The operand that P, or dS, multiplies: 0 · NaN would be NaN, so that rows are looked at."""

    stages: int
    at: int
    bad_keys: int
    full: int
    raw: int


class Panels:
    """Sizes in common of the configurations: one loading warpgroup, tiles in panels."""

    @property
    def threads(self):
        return 128 * (self.consumers + 1)

    @property
    def panels(self):
        return -(-self.head_dim // PANEL)

    @property
    def q_bytes(self):
        return self.panels * self.tile_m * 2 * PANEL

    @property
    def kv_bytes(self):
        return self.panels * self.tile_n * 2 * PANEL

    def why_not(self):
        """Reasons why a multiprocessor cannot hold ``min_blocks`` blocks; empty where it can."""
        reasons = []
        smem = self.min_blocks * (self.smem_bytes + RESERVED_BYTES)
        if smem > SMEM_BYTES:
            reasons.append(f"{smem} bytes of shared memory, there are {SMEM_BYTES}")
        if self.registers:
            load, compute = self.registers
            launched = REGISTERS // (self.min_blocks * self.threads) // 8 * 8
            asked, there = load + self.consumers * compute, launched * (self.consumers + 1)
            if asked > there:  # setmaxnreg would wait for them for ever
                reasons.append(f"{128 * asked} registers, a block is launched with {128 * there}")
            if load % 8 or compute % 8:
                reasons.append(f"registers of a thread are multiples of 8, got {self.registers}")
        return reasons

    def too_few(self, **least):
        """A reason for every attribute that is below its least value."""
        return [
            f"{name} is at least {n}, got {getattr(self, name)}"
            for name, n in least.items()
            if getattr(self, name) < n
        ]
