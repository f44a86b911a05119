"""The decode kernel on Hopper."""

import ml_dtypes
import numpy as np
from decode_cases import DTYPES, check, check_tokens, contiguous, paged
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
    WARPS,
)
from mutant_family import Family
from mutants import TWO_STAGES

import masks
from nbflash.cuda import simulator as sim
from nbflash.definitions.quantised import dequantise, quantise

T, CAPACITY, NQ = 64, 192, 3
LENGTHS = np.array([1, T + 1, 2 * T + 6], np.int32)
OTHERS = (
    masks.from_function(lambda q, kv: (5 * q + 7 * kv) % 11 < 4, NQ, CAPACITY),
    masks.dense(NQ, CAPACITY),
    masks.from_function(lambda q, kv: kv % 3 == q, NQ, CAPACITY),
)


def of_heads(group):
    """A mask for each of three sequences and two groups of heads."""
    windows = [masks.window(NQ, CAPACITY, left=30 * (b + 1)) for b in range(3)]
    pairs = zip(windows, OTHERS, strict=True)
    return masks.per_batch([masks.per_head([w] * group + [o] * group) for w, o in pairs])


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


def poisoned(spec_of, scales=None):
    """A draft's value that only the last token sees."""
    lengths = np.array([T - 2], np.int32)
    q, k, v = contiguous(NQ, (2, 2), 16, DTYPES["f16"], lengths, CAPACITY)
    stored = [k, v] if scales is None else [x.astype(ml_dtypes.float8_e4m3fn) for x in (k, v)]
    named, (k, v) = {"scales": scales, "splits": 1, "spec_of": spec_of}, stored
    v[0, T - 3, 0, 0] = np.nan
    out, lse = run(q, k, v, lengths, **named)
    assert np.isnan(out[0, 2, 0].astype(np.float32)).all()
    v[0, T - 3, 0, 0] = 0
    good = run(q, k, v, lengths, scales=scales)
    out[0, 2, 0], lse[0, 0, 2] = good[0][0, 2, 0], good[1][0, 0, 2]
    check((out, lse), q, k, v, lengths)


def poisoned_bytes(spec_of):
    poisoned(spec_of, (np.ones(2, np.float32),) * 2)


def with_scales(spec_of, stored, heads, head_dim, dtype, lengths, **options):
    """Rows of many sizes, more than 8, scales that grow, and pages."""
    q, k, v = contiguous(NQ, heads, head_dim, DTYPES[dtype], lengths, CAPACITY)
    q *= np.linspace(0.5, 9, NQ * heads[0]).astype(q.dtype).reshape(NQ, -1, 1)
    v *= np.linspace(1, 9, CAPACITY).astype(v.dtype)[:, None, None]
    (k, k_scale), (v, v_scale) = (quantise(x, stored) for x in (k, v))
    *pages, table = paged(k, v, lengths=lengths)
    *scales, _ = paged(k_scale, v_scale, lengths=lengths)
    got = run(q, *pages, lengths, table, scales=scales, splits=1, spec_of=spec_of, **options)
    real = np.dtype(np.float32)
    check(got, q, dequantise(k, k_scale, real), dequantise(v, v_scale, real), lengths)


def bytes_with_scales(spec_of):
    with sim.options(race=True, seed=2):
        with_scales(spec_of, np.int8, (8, 2), 48, "f16", LENGTHS[1:], stages=2)


def wide_bytes(spec_of):
    """Two panels, and Q that is no float16."""
    with_scales(spec_of, ml_dtypes.float8_e4m3fn, (4, 1), 144, "bf16", LENGTHS[2:])


def masked_bytes(spec_of):
    """NaN that no query attends, in keys, values and their scales."""
    q, k, v = contiguous(NQ, (8, 2), 80, DTYPES["bf16"], LENGTHS, CAPACITY)
    (k, k_scale), (v, v_scale) = (quantise(x, ml_dtypes.float8_e4m3fn) for x in (k, v))
    mask, real = of_heads(4), np.dtype(np.float32)
    exact = dequantise(k, k_scale, real), dequantise(v, v_scale, real)
    dense = mask.dense()
    hidden = ~dense.reshape(3, 2, -1, CAPACITY).any(axis=2).swapaxes(1, 2)
    assert hidden.any()
    k[hidden], v[hidden], v_scale[hidden] = np.nan, np.nan, np.nan
    scales, named = (k_scale, v_scale), {"mask": mask, "splits": 1, "spec_of": spec_of}
    got = run(q, k, v, LENGTHS, scales=scales, **named)
    check(got, q, *exact, LENGTHS, keep=lambda b: dense[b, ..., : LENGTHS[b]])


def uneven_bytes(spec_of):
    """Values that float16 cannot hold, and in one of two sequences a key's 2^60 times as large."""
    lengths = np.array([T, T], np.int32)
    q, k, v = contiguous(1, (2, 2), 16, DTYPES["bf16"], lengths, T)
    k, v = (np.nan_to_num(x.astype(np.float32) * 16).astype(np.int8) for x in (k, v))
    k_scale, v_scale = (np.full(k.shape[:3], 2.0**n, np.float32) for n in (-4, -40))
    v_scale[0, 5] = 2.0**20
    got = run(q, k, v, lengths, scales=(k_scale, v_scale), splits=1, spec_of=spec_of)
    real = np.dtype(np.float32)
    check(got, q, dequantise(k, k_scale, real), dequantise(v, v_scale, real), lengths)


def low_bytes(spec_of):
    """A scale below 0, and scores too: most warps have no key, rows of two heads fill a tile."""
    lengths = np.array([5], np.int32)
    q, k, v = contiguous(4, (8, 2), 16, DTYPES["f16"], lengths, T)
    q, k, v = q + 10, *((4 * np.nan_to_num(x)).astype(np.int8) for x in (k, v))
    k += 60
    named = {"scale": -0.3, "scales": (np.ones(2, np.float32),) * 2}
    got = run(q, k, v, lengths, splits=1, spec_of=spec_of, **named)
    check(got, q, *(x.astype(np.float32) for x in (k, v)), lengths, scale=named["scale"])


def sink_bytes(spec_of):
    """A key with 2^20 times the weight of every other, and nothing to give."""
    lengths = np.array([T], np.int32)
    for dtype in ("bf16", "f16"):
        q, k, v = (np.zeros((1, n, 1, 16), np.int8) for n in (1, T, T))
        q, k[0, 0], v[0, 1:] = np.ones(q.shape, DTYPES[dtype]), 1, 100
        named = {"scale": 20 * np.log(2) / 16, "scales": (np.ones(1, np.float32),) * 2}
        got = run(q, k, v, lengths, splits=1, spec_of=spec_of, **named)
        k, v = (x.astype(np.float32) for x in (k, v))
        check(got, q, k, v, lengths, scale=named["scale"])


def outlier_bytes(spec_of):
    """Scales of V far above others, each for one token of a tile; behind them a full tile."""
    lengths = np.array([2 * T], np.int32)
    q, k, v = contiguous(NQ, (4, 1), 16, DTYPES["bf16"], lengths, 2 * T)
    (k, k_scale), (v, v_scale) = (quantise(x, np.int8) for x in (k, v))
    dense = np.ones((1, NQ, 2 * T), bool)
    dense[0, :, 7 : 7 + NQ + 1] = np.eye(NQ, NQ + 1)
    v_scale[0, 7 : 7 + NQ + 1, 0] = 1e30, 1e20, 1e-10, 1e30
    named = {"mask": masks.from_dense(dense[0]), "splits": 1, "spec_of": spec_of}
    got = run(q, k, v, lengths, scales=(k_scale, v_scale), **named)
    real = np.dtype(np.float32)
    check_tokens(got, q, dequantise(k, k_scale, real), dequantise(v, v_scale, real), lengths, dense)


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
BYTES = outlier_bytes, sink_bytes, uneven_bytes, poisoned_bytes, low_bytes
BYTES += wide_bytes, masked_bytes, bytes_with_scales
JOINS = join_spans, join_row_tiles, join_heads, join_rounds, join_steps
CASES = WORDS + JOINS + BYTES
CASES_OF = {JOINING: JOINS, STORED: BYTES, WARPS: BYTES, PRODUCTS: BYTES, SCALES: BYTES}


def reach(target):
    return [case.__name__ for case in CASES_OF.get(target, CASES)]


def case_of(case):
    return lambda modules: case(modules[KERNEL].decode_sm90_spec)


FAMILY = Family(
    "decode_sm90",
    CHAIN,
    {case.__name__: case_of(case) for case in CASES},
    MUTANTS,
    generate=(PART, LOADING, COMPUTING, STORED, JOINING, KERNEL),
    reach=reach,
    survivors={"decode.consumer: compute: mbarrier_arrive stage shifted": TWO_STAGES},
)
