"""The portable decode kernel."""

from functools import partial

import decode_rules
import numpy as np
from byte_cases import BYTES
from decode_cases import DTYPES, check, check_scored, contiguous, keep_of, paged
from decode_sm80_runs import decoded
from faults.decode_sm80 import (
    BINDING,
    CHAIN,
    COMPUTING,
    COPIES,
    KERNEL,
    MUTANTS,
    RESULTS,
    STORED,
)
from mutant_family import Family

import masks
from nbflash.cuda import simulator as sim
from nbflash.definitions.quantised import dequantise, quantise

T, CAPACITY, NQ = 32, 112, 3
LENGTHS = np.array([1, T + 1, 3 * T + 6], np.int32)


def causal(host):
    """Pages of 48, rows of the table apart, columns that fill no step, V in an order of its own."""
    q, k, v = contiguous(NQ, (4, 2), 24, DTYPES["bf16"], LENGTHS, CAPACITY)
    k_pages, v_pages, table = paged(k, v, lengths=LENGTHS, page_size=48)
    v_pages = np.ascontiguousarray(v_pages.swapaxes(0, 2)).swapaxes(0, 2)
    table = np.pad(table, ((0, 0), (0, 5)))[:, :-5]
    check(decoded(q, k_pages, v_pages, LENGTHS, table, host=host, stages=2), q, k, v, LENGTHS)


def races(host):
    """One sequence, under many schedules of the warps."""
    lengths = np.array([3 * T + 6], np.int32)
    q, k, v = contiguous(NQ, (2, 1), 16, DTYPES["f16"], lengths, CAPACITY)
    for seed in range(2):
        with sim.options(race=True, seed=seed):
            got = decoded(q, k, v, lengths, host=host, splits=1, stages=2)
        check(got, q, k, v, lengths)


def masked(host):
    """Of every sequence and group of heads its own, over keys whose NaN nobody sees."""
    rows, columns = np.ogrid[:NQ, :CAPACITY]
    bits = masks.from_dense((5 * rows + 7 * columns) % 11 < 4)
    second = masks.from_dense((columns % T >= T // 2) & (rows >= 0))
    windows = [masks.window(NQ, CAPACITY, left=30 * (b + 1)) for b in range(3)]
    pairs = zip(windows, (bits, second, masks.from_dense(columns % 3 == rows)), strict=True)
    mask = masks.per_batch([masks.per_head([w] * 2 + [o] * 2) for w, o in pairs])
    q, k, v = contiguous(NQ, (4, 2), 16, DTYPES["f16"], LENGTHS, CAPACITY)
    dense = np.broadcast_to(mask.dense(), (3, 4, NQ, CAPACITY))
    seen = dense.reshape(3, 2, 2, NQ, CAPACITY).any(axis=(2, 3)).swapaxes(1, 2)
    k[~seen], v[~seen] = np.nan, np.nan
    got = decoded(q, k, v, LENGTHS, mask=mask, host=host)
    clean = [np.nan_to_num(x) for x in (k, v)]
    check(got, q, *clean, LENGTHS, keep=lambda b: dense[b, ..., : LENGTHS[b]])


def by_head(host):
    """Masks that the heads of a group do not share."""
    mask = masks.per_head([masks.window(NQ, CAPACITY, left=9 * i, right=None) for i in range(4)])
    q, k, v = contiguous(NQ, (4, 2), 16, DTYPES["f16"], LENGTHS, CAPACITY)
    dense = np.broadcast_to(mask.dense(), (3, 4, NQ, CAPACITY))
    got = decoded(q, k, v, LENGTHS, mask=mask, host=host)
    check(got, q, k, v, LENGTHS, keep=lambda b: dense[b, ..., : LENGTHS[b]])


def poisoned(host):
    """V of the last token is infinite: tokens before it do not attend it."""
    lengths = np.array([T + 1], np.int32)
    q, k, v = contiguous(NQ, (2, 1), 16, DTYPES["f16"], lengths, CAPACITY)
    v[0, lengths[0] - 1] = np.inf
    with sim.options(race=True, seed=1):
        out, lse = decoded(q, k, v, lengths, host=host, splits=1)
    assert not np.isfinite(out[:, 2]).any()
    check((out[:, :2], lse[..., :2]), q[:, :2], k, v, lengths - 1)


def rows(host):
    """Two blocks of rows, whose parts eight warps are enough to join; a scale below zero."""
    lengths = np.array([40], np.int32)
    q, k, v = contiguous(20, (1, 1), 16, DTYPES["bf16"], lengths, 64)
    how = {"scale": -0.4, "warps": 8, "host": host}
    check(decoded(q, k, v, lengths, **how), q, k, v, lengths, scale=-0.4)


def beyond(host):
    """A length that counts up to the capacity, which is no whole tile: behind it are no pages."""
    lengths = np.array([48], np.int32)
    q, k, v = contiguous(NQ, (2, 2), 16, DTYPES["f16"], lengths, 48)
    check(decoded(q, k, v, lengths + 9, splits=1, host=host), q, k, v, lengths)
    *pages, table = paged(k, v, lengths=lengths, page_size=16)
    check(decoded(q, *pages, lengths, table, splits=1, host=host), q, k, v, lengths)


def end_bytes(run):
    """The last key and its scales at the end of memory, which is no whole tile."""
    lengths = np.array([40], np.int32)
    q, k, v = contiguous(NQ, (2, 2), 16, DTYPES["f16"], lengths, 40)
    (k, k_scale), (v, v_scale) = (quantise(x, np.int8) for x in (k, v))
    got = run(q, k, v, lengths, scales=(k_scale, v_scale), splits=1)
    real = np.dtype(np.float32)
    check(got, q, dequantise(k, k_scale, real), dequantise(v, v_scale, real), lengths)


def on_tiles(host):
    """What `decode_rules` runs, with rows of both halves of a warp's."""
    return decode_rules.Kernel(partial(decoded, host=host), T, np.float16, (6, 2))


def of_rule(name, rule):
    def case(host):
        rule(on_tiles(host))

    case.__name__ = name
    return case


def scored_bytes(run):
    """A window and a score of positions over keys of 8 bits."""
    q, k, v = contiguous(NQ, (4, 2), 16, DTYPES["f16"], LENGTHS, CAPACITY)
    (k, k_scale), (v, v_scale) = (quantise(np.nan_to_num(x), np.int8) for x in (k, v))
    score_of, real = decode_rules.score_named("place", CAPACITY, 4), np.dtype(np.float32)
    window, scales = (40, None), (k_scale, v_scale)
    got = run(q, k, v, LENGTHS, scales=scales, window=window, score=score_of(CAPACITY))
    k, v = dequantise(k, k_scale, real), dequantise(v, v_scale, real)
    check_scored(got, q, k, v, LENGTHS, score_of, keep_of(LENGTHS, NQ, window))


WORDS = beyond, rows, poisoned, by_head, races, masked, causal
WORDS += tuple(of_rule(*named) for named in decode_rules.RULES.items())
ALL_BYTES = end_bytes, scored_bytes, *BYTES
CASES = WORDS + ALL_BYTES
CASES_OF = {COMPUTING: WORDS, STORED: ALL_BYTES}


def reach(target):
    return [case.__name__ for case in CASES_OF.get(target, CASES)]


def case_of(case):
    def run_case(modules):
        host = modules[BINDING]
        case(host if case in WORDS else partial(decoded, host=host))

    return run_case


FAMILY = Family(
    "decode_sm80",
    CHAIN,
    {case.__name__: case_of(case) for case in CASES},
    MUTANTS,
    generate=(COPIES, COMPUTING, STORED, RESULTS, KERNEL),
    reach=reach,
)
