"""The portable decode kernel in the simulator against the float64 reference."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from decode_cases import DTYPES, check, contiguous, of_both_caches, paged, same_bits
from decode_sm80_runs import decoded

import masks
from nbflash.backends.sm80.decode.host import why_not, why_not_capability
from nbflash.cuda import simulator as sim
from nbflash.definitions.quantised import dequantise, quantise
from nbflash.inputs.decode_problem import Cache, check_decode

T = 32  # keys of a tile of two warps
CAPACITY = 4 * T
LENGTHS = np.array([0, 1, T // 2, T - 1, T, T + 1, 3 * T + 3, CAPACITY], np.int32)
SOME = LENGTHS[[0, 3, 5, 6]]


def problem(nq=1, heads=(4, 2), head_dim=16, dtype="f16", lengths=LENGTHS):
    """q and caches of ``CAPACITY`` keys, NaN behind ``lengths``."""
    return contiguous(nq, heads, head_dim, DTYPES[dtype], lengths, CAPACITY)


run_both = of_both_caches(decoded, LENGTHS)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)], ids=lambda h: f"{h[0]}:{h[1]}")
@pytest.mark.parametrize("nq", [1, 3])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_lengths(dtype, nq, heads):
    """Sequences of no key, of fewer than q_len, of a tile and beside it."""
    q, k, v = problem(nq, heads, dtype=dtype)
    check(run_both(q, k, v), q, k, v, LENGTHS)


@pytest.mark.parametrize(("nq", "heads"), [(64, (2, 1)), (5, (8, 2)), (64, (1, 1))])
def test_more_rows_than_a_block_has(nq, heads):
    lengths = np.array([3, T + 20, CAPACITY], np.int32)
    q, k, v = problem(nq, heads, lengths=lengths)
    check(run_both(q, k, v, lengths, splits=3), q, k, v, lengths)


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_splits(splits):
    q, k, v = problem(2, lengths=SOME)
    check(run_both(q, k, v, SOME, splits=splits), q, k, v, SOME)


@pytest.mark.parametrize("page_size", [16, 32, 48, 256])
def test_page_sizes(page_size):
    q, k, v = problem(2, lengths=SOME)
    check(run_both(q, k, v, SOME, page_size), q, k, v, SOME)


@pytest.mark.parametrize("head_dim", [8, 24, 72, 256])
def test_head_dims(head_dim):
    lengths = LENGTHS[4:7]
    q, k, v = problem(1, head_dim=head_dim, dtype="bf16", lengths=lengths)
    check(run_both(q, k, v, lengths), q, k, v, lengths)


@pytest.mark.parametrize("options", [{"warps": 1}, {"warps": 4}, {"stages": 2}, {"stages": 5}])
def test_geometries(options):
    q, k, v = problem(2, lengths=SOME)
    check(run_both(q, k, v, SOME, **options), q, k, v, SOME)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_scales(scale):
    q, k, v = problem(2, lengths=SOME)
    check(run_both(q, k, v, SOME, scale=scale), q, k, v, SOME, scale=scale)


@pytest.mark.parametrize("masked", [False, True])
def test_lengths_beyond_the_capacity_count_up_to_it(masked):
    """Negative ones are 0; no page of another sequence is read."""
    lengths = np.array([40, 0, 40], np.int32)
    q, k, v = contiguous(2, (2, 1), 16, DTYPES["f16"], lengths, 40)
    mask = masks.dense(2, 40) if masked else None
    given = decoded(q, k, v, np.array([41, -3, 99], np.int32), mask=mask)
    assert same_bits(given, decoded(q, k, v, lengths, mask=mask))


NQ = 5
BY_HEAD = masks.per_head([masks.causal(NQ, CAPACITY), masks.sinks(NQ, 1, 9, nk=CAPACITY)] * 2)
MASKS = {
    "sinks": masks.sinks(NQ, 4, 20, nk=CAPACITY),
    "empty": ~masks.dense(NQ, CAPACITY),
    "late": masks.from_function(lambda q, kv: kv > 60, NQ, CAPACITY),
    "scattered": masks.from_function(lambda q, kv: (5 * q + 7 * kv) % 11 < 4, NQ, CAPACITY),
    "per-head": BY_HEAD,
    "per-batch-per-head": masks.per_batch([BY_HEAD, masks.dense(NQ, CAPACITY)] * 4),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    """Keys are counted from the first of a sequence; those behind its length do not exist."""
    q, k, v = problem(NQ)
    dense = np.broadcast_to(MASKS[name].dense(), (len(LENGTHS), 4, NQ, CAPACITY))
    got = run_both(q, k, v, mask=MASKS[name])
    check(got, q, k, v, LENGTHS, keep=lambda b: dense[b, ..., : LENGTHS[b]])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_poisoned_draft_reaches_later_tokens_alone(poison):
    """The value of the last token, which the tokens before it do not attend."""
    lengths = LENGTHS[4:]
    q, k, v = problem(3, lengths=lengths)
    clean, _ = decoded(q, k, v, lengths)
    for b, length in enumerate(lengths):
        v[b, length - 1, 0, 0] = poison
    out, _ = run_both(q, k, v, lengths)
    assert not np.isfinite(out[:, 2, :2, 0]).any()
    clean[:, 2, :2] = out[:, 2, :2]
    assert out.tobytes() == clean.tobytes()


STORED = {"int8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn}


def quantised(stored, *caches):
    """Two caches, their scales, and what they stand for."""
    pairs = [quantise(np.nan_to_num(x), STORED[stored]) for x in caches]
    wide = [dequantise(*pair, np.dtype(np.float32)) for pair in pairs]
    return [x for x, _ in pairs], [x for _, x in pairs], wide


@pytest.mark.parametrize(
    ("dtype", "stored", "head_dim"),
    [("f16", "e4m3", 16), ("bf16", "int8", 64), ("f16", "int8", 144), ("bf16", "e4m3", 256)],
)
def test_quantised_caches(dtype, stored, head_dim):
    """Two panels and half of one; in pages, too."""
    q, k, v = problem(3, (8, 2), head_dim, dtype, SOME)
    caches, scales, wide = quantised(stored, k, v)
    got = decoded(q, *caches, SOME, scales=scales)
    check(got, q, *wide, SOME)
    *pages, table = paged(*caches, *scales, lengths=SOME, page_size=16)
    assert same_bits(got, decoded(q, *pages[:2], SOME, table, scales=pages[2:]))


@pytest.mark.parametrize("stored", STORED)
def test_quantised_caches_that_lie_apart(stored):
    """K and V beside each other in one array, and q within one of q, k and v."""
    q, k, v = problem(3, (4, 2), 32, lengths=SOME)
    caches, scales, _ = quantised(stored, k, v)
    expected = decoded(q, *caches, SOME, scales=scales)
    both = np.stack(caches, axis=3)
    wide = np.concatenate([q, q[:, :, :2], q[:, :, :2]], axis=2)
    got = decoded(wide[:, :, :4], both[..., 0, :], both[..., 1, :], SOME, scales=scales)
    assert same_bits(got, expected)


@pytest.mark.parametrize("stored", [None, *STORED])
@pytest.mark.parametrize("seed", range(2))
def test_schedules_and_races(seed, stored):
    lengths = SOME[1:]
    q, k, v = problem(3, head_dim=24 if stored is None else 32, lengths=lengths)
    caches, scales, _ = quantised(stored, k, v) if stored else ((k, v), None, None)
    expected = decoded(q, *caches, lengths, scales=scales)
    with sim.options(race=True, seed=seed):
        assert same_bits(expected, decoded(q, *caches, lengths, scales=scales))


def reasons(q, k, v, *, paged_by=None):
    lengths = np.array([5], np.int32)
    table = None
    if paged_by:
        k, v, table = paged(k, v, lengths=lengths, page_size=paged_by)
    cache = Cache(k, v, lengths, table)
    return why_not(check_decode(q, cache, None), q, cache)


def test_what_it_cannot_run():
    lengths = np.array([5], np.int32)
    like = {"lengths": lengths, "capacity": 16}
    assert reasons(*contiguous(1, **like)) == ["needs float16 or bfloat16, got float32"]
    half = {"dtype": np.float16, **like}
    assert reasons(*contiguous(1, **half)) == []
    assert reasons(*contiguous(1, **half), paged_by=16) == []
    (pages,) = reasons(*contiguous(1, **half), paged_by=8)
    assert pages == "needs pages of a multiple of 16 keys, got 8"
    (columns,) = reasons(*contiguous(1, head_dim=12, **half))
    assert columns == "needs a head_dim of 8, 16, ... 256, got 12"
    q, *caches = contiguous(1, head_dim=8, **half)
    caches, scales, _ = quantised("int8", *caches)
    cache = Cache(*caches, lengths, None, *scales)
    (columns,) = why_not(check_decode(q, cache, None), q, cache)
    assert columns == "needs a head_dim of 16, 32, ... 256, got 8"


@pytest.mark.parametrize("stored", ["float16", "int8", "float8_e4m3fn"])
def test_the_devices_of_float8(stored):
    problem = SimpleNamespace(cache_dtype=stored)
    assert why_not_capability(problem, (8, 9)) == why_not_capability(problem, (9, 0)) == []
    found = why_not_capability(problem, (8, 6))
    reason = "needs compute capability 8.9 for float8, this device has 8.6"
    assert found == [reason] * (stored == "float8_e4m3fn")
