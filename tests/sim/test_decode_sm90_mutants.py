"""Mutation tests of the Hopper decode kernel: every planted fault is noticed."""

import numpy as np
import pytest
from decode_cases import DTYPES, check, contiguous, paged
from decode_sm90_runs import run
from mutants import mutated_modules
from mutants_decode_sm90 import CHAIN, KERNEL, MUTANTS

import masks
from nbflash import sim
from nbflash.kernels.decode_sm90 import decode_sm90_spec
from nbflash.quantised import dequantise, quantise

FAULTS = (sim.SimError, AssertionError, ArithmeticError, LookupError, TypeError, ValueError)
T, CAPACITY, NQ = 64, 192, 3
LENGTHS = np.array([1, T + 1, 2 * T + 6], np.int32)
HEADS = masks.per_batch(
    [
        masks.per_head([masks.window(NQ, CAPACITY, left=30 * (b + 1))] * 2 + [other] * 2)
        for b, other in enumerate(
            [
                masks.from_function(lambda q, kv: (5 * q + 7 * kv) % 11 < 4, NQ, CAPACITY),
                masks.dense(NQ, CAPACITY),
                masks.from_function(lambda q, kv: kv % 3 == q, NQ, CAPACITY),
            ]
        )
    ]
)


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


def poisoned(spec_of):
    """A draft's value that only the last token sees."""
    lengths = np.array([T - 2], np.int32)
    q, k, v = contiguous(NQ, (2, 2), 16, DTYPES["f16"], lengths, CAPACITY)
    v[0, T - 3, 0, 0] = np.nan
    out, lse = run(q, k, v, lengths, splits=1, spec_of=spec_of)
    assert np.isnan(out[0, 2, 0].astype(np.float32)).all()
    v[0, T - 3, 0, 0] = 0
    good = run(q, k, v, lengths)
    out[0, 2, 0], lse[0, 0, 2] = good[0][0, 2, 0], good[1][0, 0, 2]
    check((out, lse), q, k, v, lengths)


def bytes_with_scales(spec_of):
    q, k, v = contiguous(NQ, (4, 2), 48, DTYPES["f16"], LENGTHS, CAPACITY)
    (k, k_scale), (v, v_scale) = (quantise(x, np.int8) for x in (k, v))
    *pages, table = paged(k, v, lengths=LENGTHS)
    *scales, _ = paged(k_scale, v_scale, lengths=LENGTHS)
    with sim.options(race=True, seed=2):
        got = run(q, *pages, LENGTHS, table, scales=scales, splits=1, stages=2, spec_of=spec_of)
    real = np.dtype(np.float32)
    check(got, q, dequantise(k, k_scale, real), dequantise(v, v_scale, real), LENGTHS)


def beyond(spec_of):
    """A length that counts up to the capacity."""
    lengths = np.array([40], np.int32)
    q, k, v = contiguous(NQ, (2, 2), 16, DTYPES["f16"], lengths, 40)
    check(run(q, k, v, lengths + 9, splits=1, spec_of=spec_of), q, k, v, lengths)


CASES = (beyond, masked, causal, poisoned, rows, bytes_with_scales)


@pytest.mark.parametrize("case", CASES)
def test_kernel_passes(case):
    case(decode_sm90_spec)


def check_all(spec_of):
    for case in CASES:
        case(spec_of)


def name_of(target, mutant, *_):
    return f"{target.rpartition('.')[2]}-{mutant}"


@pytest.mark.parametrize(("target", "mutant"), MUTANTS, ids=[name_of(*m) for m in MUTANTS])
def test_mutant_is_caught(target, mutant):
    dependents = CHAIN[CHAIN.index(target) + 1 :]
    modules = mutated_modules(target, mutant, dependents)
    with pytest.raises(FAULTS):
        check_all(modules[KERNEL].decode_sm90_spec)
