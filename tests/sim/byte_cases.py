"""Cases of decode kernels over 8-bit quantised caches, whichever kernel it is.

``run(q, k, v, lengths, table, mask, *, scales, scale, splits)`` gives ``(out, lse)``; ``scales``
are those of K and V.
"""

import ml_dtypes
import numpy as np
from decode_cases import DTYPES, check, check_tokens, contiguous, paged

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


def poisoned(run, scales=None, heads=(2, 2)):
    """A draft's value that only the last token sees."""
    lengths = np.array([T - 2], np.int32)
    q, k, v = contiguous(NQ, heads, 16, DTYPES["f16"], lengths, CAPACITY)
    group = heads[0] // heads[1]
    stored = [k, v] if scales is None else [x.astype(ml_dtypes.float8_e4m3fn) for x in (k, v)]
    named, (k, v) = {"scales": scales, "splits": 1}, stored
    v[0, T - 3, 0, 0] = np.nan
    out, lse = run(q, k, v, lengths, **named)
    assert np.isnan(out[0, 2, :group].astype(np.float32)).all()
    v[0, T - 3, 0, 0] = 0
    good = run(q, k, v, lengths, scales=scales)
    out[0, 2, :group], lse[0, :group, 2] = good[0][0, 2, :group], good[1][0, :group, 2]
    check((out, lse), q, k, v, lengths)


def poisoned_bytes(run):
    """That token's rows of four heads are the lower ones of a warp."""
    poisoned(run, (np.ones(2, np.float32),) * 2, (8, 2))


def with_scales(run, stored, heads, head_dim, dtype, lengths, **options):
    """Rows of many sizes, more than 8, scales that grow, of both signs, and pages."""
    q, k, v = contiguous(NQ, heads, head_dim, DTYPES[dtype], lengths, CAPACITY)
    q *= np.linspace(0.5, 9, NQ * heads[0]).astype(q.dtype).reshape(NQ, -1, 1)
    v *= np.linspace(1, 9, CAPACITY).astype(v.dtype)[:, None, None]
    (k, k_scale), (v, v_scale) = (quantise(x, stored) for x in (k, v))
    k_scale[:, ::3], v_scale[:, 1::3] = -k_scale[:, ::3], -v_scale[:, 1::3]
    *pages, table = paged(k, v, lengths=lengths)
    *scales, _ = paged(k_scale, v_scale, lengths=lengths)
    got = run(q, *pages, lengths, table, scales=scales, splits=1, **options)
    real = np.dtype(np.float32)
    check(got, q, dequantise(k, k_scale, real), dequantise(v, v_scale, real), lengths)


def bytes_with_scales(run):
    with sim.options(race=True, seed=2):
        with_scales(run, np.int8, (8, 2), 48, "f16", LENGTHS[1:], stages=2)


def wide_bytes(run):
    """Two panels, and Q that is no float16."""
    with_scales(run, ml_dtypes.float8_e4m3fn, (4, 1), 144, "bf16", LENGTHS[2:])


def masked_bytes(run):
    """NaN that no query attends, in keys, values and their scales."""
    q, k, v = contiguous(NQ, (8, 2), 80, DTYPES["bf16"], LENGTHS, CAPACITY)
    (k, k_scale), (v, v_scale) = (quantise(x, ml_dtypes.float8_e4m3fn) for x in (k, v))
    mask, real = of_heads(4), np.dtype(np.float32)
    exact = dequantise(k, k_scale, real), dequantise(v, v_scale, real)
    dense = mask.dense()
    hidden = ~dense.reshape(3, 2, -1, CAPACITY).any(axis=2).swapaxes(1, 2)
    assert hidden.any()
    k[hidden], v[hidden], v_scale[hidden] = np.nan, np.nan, np.nan
    scales, named = (k_scale, v_scale), {"mask": mask, "splits": 1}
    got = run(q, k, v, LENGTHS, scales=scales, **named)
    check(got, q, *exact, LENGTHS, keep=lambda b: dense[b, ..., : LENGTHS[b]])


def uneven_bytes(run):
    """Values that float16 cannot hold, and in one of two sequences a key's 2^60 times as large."""
    lengths = np.array([T, T], np.int32)
    q, k, v = contiguous(1, (2, 2), 16, DTYPES["bf16"], lengths, T)
    k, v = (np.nan_to_num(x.astype(np.float32) * 16).astype(np.int8) for x in (k, v))
    k_scale, v_scale = (np.full(k.shape[:3], 2.0**n, np.float32) for n in (-4, -40))
    v_scale[0, 5] = 2.0**20
    got = run(q, k, v, lengths, scales=(k_scale, v_scale), splits=1)
    real = np.dtype(np.float32)
    check(got, q, dequantise(k, k_scale, real), dequantise(v, v_scale, real), lengths)


def low_bytes(run):
    """A scale below 0, and scores too: most warps have no key, rows of two heads fill a tile."""
    lengths = np.array([5], np.int32)
    q, k, v = contiguous(4, (8, 2), 16, DTYPES["f16"], lengths, T)
    q, k, v = q + 10, *((4 * np.nan_to_num(x)).astype(np.int8) for x in (k, v))
    k += 60
    named = {"scale": -0.3, "scales": (np.ones(2, np.float32),) * 2}
    got = run(q, k, v, lengths, splits=1, **named)
    check(got, q, *(x.astype(np.float32) for x in (k, v)), lengths, scale=named["scale"])


def sink_bytes(run):
    """A key with 2^20 times the weight of every other, and nothing to give."""
    lengths = np.array([T], np.int32)
    for dtype in ("bf16", "f16"):
        q, k, v = (np.zeros((1, n, 1, 16), np.int8) for n in (1, T, T))
        q, k[0, 0], v[0, 1:] = np.ones(q.shape, DTYPES[dtype]), 1, 100
        named = {"scale": 20 * np.log(2) / 16, "scales": (np.ones(1, np.float32),) * 2}
        got = run(q, k, v, lengths, splits=1, **named)
        k, v = (x.astype(np.float32) for x in (k, v))
        check(got, q, k, v, lengths, scale=named["scale"])


def outlier_bytes(run):
    """Scales of V far above others, each for one token of a tile; behind them a full tile."""
    lengths = np.array([2 * T], np.int32)
    q, k, v = contiguous(NQ, (4, 1), 16, DTYPES["bf16"], lengths, 2 * T)
    (k, k_scale), (v, v_scale) = (quantise(x, np.int8) for x in (k, v))
    dense = np.ones((1, NQ, 2 * T), bool)
    dense[0, :, 7 : 7 + NQ + 1] = np.eye(NQ, NQ + 1)
    v_scale[0, 7 : 7 + NQ + 1, 0] = 1e30, 1e20, 1e-10, 1e30
    named = {"mask": masks.from_dense(dense[0]), "splits": 1}
    got = run(q, k, v, lengths, scales=(k_scale, v_scale), **named)
    real = np.dtype(np.float32)
    check_tokens(got, q, dequantise(k, k_scale, real), dequantise(v, v_scale, real), lengths, dense)


#: The cheapest first.
BYTES = outlier_bytes, sink_bytes, uneven_bytes, poisoned_bytes, low_bytes
BYTES += wide_bytes, masked_bytes, bytes_with_scales
