"""Rings of shared stages, and the persistent walk over a work list.

    stage     0   1   0   1   0 …          the n-th tile lies in stage n % stages
    phase     0   0   1   1   0 …          which completion of its barriers it waits for

A consumer waits for phase p of "full", a producer for phase p ^ 1 of "empty": the first round finds
every stage empty.
"""

from nbflash.cuda.ptx._asm import inlined, types
from nbflash.cuda.tile.tracing import equal, load4, select, unrolled


def make_advance(stages):
    """``advance(stage, phase)`` of a ring."""

    @unrolled
    def advance(stage, phase):
        last = equal(stage, stages - 1)
        return select(last, stage * 0, stage + 1), select(last, phase * -1 + 1, phase)

    return advance


def make_before(stages):
    """``before(stage)``: the last one that :func:`make_advance` left."""

    @unrolled
    def before(stage):
        return select(equal(stage, 0), stage * 0 + (stages - 1), stage - 1)

    return before


def make_ring(stages):
    """``stage(i), phase(i)`` of the i-th tile, as its consumer waits for it."""

    @unrolled
    def stage(i):
        return i % stages

    @unrolled
    def phase(i):
        return i // stages % 2

    return stage, phase


@unrolled
def read_descriptor(smem, at):
    """The four words of a tile descriptor, which a loader leaves beside the tile."""
    return load4(smem, at)


@inlined
def item_of(round_, blocks, block):
    """There and back over a list that is longest first: every block gets its share."""
    return round_ * blocks + (block if round_ % 2 == 0 else blocks - 1 - block)


@unrolled
def divmod_int32(a, b):
    """``(a // b, a % b)`` of int32 that are not negative; Numba would divide 64 bits."""
    return a // b, a % b


@inlined
def rounds_of(live, blocks):
    """How often a block looks at the work list."""
    rounds, _ = divmod_int32(types.int32(live + blocks - 1), blocks)
    return rounds
