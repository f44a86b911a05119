"""The decode kernel on Hopper."""

from functools import partial

import numpy as np
from byte_cases import BYTES, CAPACITY, LENGTHS, NQ, T, of_heads, poisoned
from decode_cases import DTYPES, check, contiguous, paged
from decode_sm90_runs import joined, run
from faults.decode_sm90 import (
    CHAIN,
    COMPUTING,
    JOINING,
    KERNEL,
    LOADING,
    MUTANTS,
    PART,
    PRODUCTS,
    SCALES,
    STORED,
    UNITS,
    WARPS,
)
from mutant_family import Family
from mutants import TWO_STAGES

from nbflash.cuda import simulator as sim

HEADS = of_heads(2)


def causal(spec_of):
    """Pages of 24, more splits than tiles, columns that no panel is full of."""
    q, k, v = contiguous(NQ, (4, 2), 72, DTYPES["bf16"], LENGTHS, CAPACITY)
    pages = paged(k, v, lengths=LENGTHS, page_size=24)
    got = run(q, *pages[:2], LENGTHS, pages[2], splits=2, spec_of=spec_of)
    check(got, q, k, v, LENGTHS)


def masked(spec_of):
    """A mask of its own for every sequence and group of heads."""
    q, k, v = contiguous(NQ, (4, 2), 16, DTYPES["f16"], LENGTHS, CAPACITY)
    dense = np.broadcast_to(HEADS.dense(), (len(LENGTHS), 4, NQ, CAPACITY))
    got = run(q, k, v, LENGTHS, mask=HEADS, splits=2, spec_of=spec_of)
    check(got, q, k, v, LENGTHS, keep=lambda b: dense[b, ..., : LENGTHS[b]])


def rows(spec_of):
    """Two row tiles, in two stages, the accesses of all threads compared."""
    lengths = np.array([CAPACITY], np.int32)
    q, k, v = contiguous(33, (2, 1), 16, DTYPES["f16"], lengths, CAPACITY)
    k *= np.linspace(1, 9, CAPACITY).astype(k.dtype)[:, None, None]
    with sim.options(race=True, seed=1):
        got = run(q, k, v, lengths, splits=1, stages=2, spec_of=spec_of)
    check(got, q, k, v, lengths)


def beyond(spec_of):
    """A length that counts up to the capacity."""
    lengths = np.array([40], np.int32)
    q, k, v = contiguous(NQ, (2, 2), 16, DTYPES["f16"], lengths, 40)
    check(run(q, k, v, lengths + 9, splits=1, spec_of=spec_of), q, k, v, lengths)


def join(spec_of, nq, heads, head_dim, lengths, capacity=CAPACITY, dtype="f16", **options):
    """Parts joined by the last block; the counts are 0 again."""
    lengths, race = np.array(lengths, np.int32), options.pop("race", False)
    q, k, v = contiguous(nq, heads, head_dim, DTYPES[dtype], lengths, capacity)
    counts = np.zeros(len(lengths) * heads[1] * -(-nq * heads[0] // heads[1] // T), np.uint32)
    with sim.options(race=race, seed=1):
        got = joined(q, k, v, lengths, counts=counts, spec_of=spec_of, **options)
    check(got, q, k, v, lengths)
    assert not counts.any()


def join_heads(spec_of):
    """Of sequences, tokens and heads."""
    join(spec_of, NQ, (4, 2), 72, (T + 1, T - 9), splits=2)


def join_row_tiles(spec_of):
    join(spec_of, 33, (2, 1), 16, (20,), splits=2)


def join_spans(spec_of):
    """More columns than a warp joins at once."""
    join(spec_of, 1, (2, 1), 136, (T + 1,), splits=2)


ROOM = {"tile_n": 32, "box": 32, "stages": 2}  # for eight parts


def join_rounds(spec_of):
    """More parts than there is room for, and by two warps."""
    join(spec_of, 1, (2, 1), 16, (32 * 11 - 5,), 32 * 11, splits=11, race=True, **ROOM)


def join_steps(spec_of):
    """Where two parts more would be, the last block has had keys of NaN, as float32 too."""
    join(spec_of, 1, (2, 1), 16, (32 * 6 - 10,), 32 * 6, "bf16", splits=6, **ROOM)


WORDS = beyond, poisoned, masked, rows, causal
JOINS = join_spans, join_row_tiles, join_heads, join_rounds, join_steps
CASES = WORDS + JOINS + BYTES
CASES_OF = {JOINING: JOINS} | dict.fromkeys((STORED, UNITS, WARPS, PRODUCTS, SCALES), BYTES)


def reach(target):
    return [case.__name__ for case in CASES_OF.get(target, CASES)]


def case_of(case):
    def run_case(modules):
        spec_of = modules[KERNEL].decode_sm90_spec
        case(partial(run, spec_of=spec_of) if case in (*BYTES, poisoned) else spec_of)

    return run_case


FAMILY = Family(
    "decode_sm90",
    CHAIN,
    {case.__name__: case_of(case) for case in CASES},
    MUTANTS,
    generate=(PART, LOADING, COMPUTING, STORED, JOINING, KERNEL),
    reach=reach,
    survivors={"decode.consumer: compute: mbarrier_arrive stage shifted": TWO_STAGES},
)
