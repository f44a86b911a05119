"""The Hopper decode kernel in the simulator against the float64 reference."""

import ml_dtypes
import numpy as np
import pytest
from decode_cases import DTYPES, check, contiguous, of_both_caches, paged, same_bits
from decode_sm90_runs import joined, run

import masks
from nbflash.cuda import simulator as sim
from nbflash.definitions.quantised import dequantise, quantise

T = 64  # keys of a tile
PAGE = 16
CAPACITY = 3 * T
LENGTHS = np.array([0, 1, 2, T - 1, T, T + 1, 2 * T + 3, CAPACITY], np.int32)
SOME = LENGTHS[[0, 2, 5, 7]]


def problem(nq=1, heads=(4, 2), head_dim=16, dtype="f16", lengths=LENGTHS):
    """q and caches of ``CAPACITY`` keys, NaN behind ``lengths``."""
    return contiguous(nq, heads, head_dim, DTYPES[dtype], lengths, CAPACITY)


run_both = of_both_caches(run, LENGTHS)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)], ids=lambda h: f"{h[0]}:{h[1]}")
@pytest.mark.parametrize("nq", [1, 3])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_lengths(dtype, nq, heads):
    """Sequences of no key, of fewer than q_len, of a tile and beside it."""
    q, k, v = problem(nq, heads, dtype=dtype)
    check(run_both(q, k, v), q, k, v, LENGTHS)


@pytest.mark.parametrize(("nq", "heads"), [(64, (2, 1)), (17, (8, 2)), (64, (1, 1))])
def test_more_rows_than_a_row_tile(nq, heads):
    lengths = np.array([3, T + 20, CAPACITY], np.int32)
    q, k, v = problem(nq, heads, lengths=lengths)
    check(run_both(q, k, v, lengths, splits=3), q, k, v, lengths)


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_splits(splits):
    q, k, v = problem(2, lengths=SOME)
    check(run_both(q, k, v, SOME, splits=splits), q, k, v, SOME)


@pytest.mark.parametrize("page_size", [8, 24, 48, 64, 96, 256])
def test_page_sizes(page_size):
    q, k, v = problem(2, lengths=SOME)
    check(run_both(q, k, v, SOME, page_size), q, k, v, SOME)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 200, 256])
def test_head_dims(head_dim):
    lengths = LENGTHS[3:7]
    q, k, v = problem(1, head_dim=head_dim, dtype="bf16", lengths=lengths)
    check(run_both(q, k, v, lengths), q, k, v, lengths)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_scales(scale):
    q, k, v = problem(2, lengths=SOME)
    check(run_both(q, k, v, SOME, scale=scale), q, k, v, SOME, scale=scale)


def test_lse_of_a_single_score_of_zero_is_zero():
    q, k, v = problem(1, lengths=LENGTHS[1:2])
    got = run_both(q, k, v, LENGTHS[1:2], scale=-0.0)
    assert not got[1].any()
    check(got, q, k, v, LENGTHS[1:2], scale=-0.0)


@pytest.mark.parametrize("masked", [False, True])
def test_lengths_beyond_the_capacity_count_up_to_it(masked):
    """Negative ones are 0; no page of another sequence is read."""
    lengths = np.array([40, 0, 40], np.int32)
    q, k, v = contiguous(2, (2, 1), 16, DTYPES["f16"], lengths, 40)
    mask = masks.dense(2, 40) if masked else None
    *pages, table = paged(k, v, lengths=lengths, page_size=8, spare=0)
    wrong = np.array([50, -3, 99], np.int32)
    expected = run(q, k, v, lengths, mask=mask)
    assert same_bits(expected, run(q, k, v, wrong, mask=mask))
    assert same_bits(expected, run(q, *pages, wrong, table, mask=mask))


NQ = 5
HEADS = masks.per_head([masks.causal(NQ, CAPACITY), masks.sinks(NQ, 1, 9, nk=CAPACITY)] * 2)
GROUPS = masks.per_head([masks.window(NQ, CAPACITY, left=20 * i) for i in (1, 1, 5, 5)])
MASKS = {
    "sinks": masks.sinks(NQ, 4, 20, nk=CAPACITY),
    "dense": masks.dense(NQ, CAPACITY),
    "empty": ~masks.dense(NQ, CAPACITY),
    "scattered": masks.from_function(lambda q, kv: (5 * q + 7 * kv) % 11 < 4, NQ, CAPACITY),
    "late": masks.from_function(lambda q, kv: kv > 100, NQ, CAPACITY),
    "per-head": HEADS,
    "per-group": GROUPS,
    "per-batch": masks.per_batch(
        [masks.window(NQ, CAPACITY, left=9 * i) for i in range(len(SOME))]
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    """Keys are counted from the first of a sequence; those behind its length do not exist."""
    q, k, v = problem(NQ, lengths=SOME)
    dense = np.broadcast_to(MASKS[name].dense(), (len(SOME), 4, NQ, CAPACITY))
    got = run_both(q, k, v, SOME, mask=MASKS[name])
    check(got, q, k, v, SOME, keep=lambda b: dense[b, ..., : SOME[b]])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_poisoned_key_reaches_what_attends_it(poison):
    """A draft's value that only later tokens see, and values that nobody sees."""
    lengths = np.array([T - 2, 2 * T + 3], np.int32)
    q, k, v = problem(3, lengths=lengths)
    clean = run(q, k, v, lengths)
    for b, length in enumerate(lengths):
        v[b, length - 1, 0, 0] = poison  # of the last token
    out, _ = run_both(q, k, v, lengths)
    group = slice(0, 2)
    assert not np.isfinite(out[:, 2, group].astype(np.float32)).all(-1).any()
    assert out[:, :2].tobytes() == clean[0][:, :2].tobytes()
    assert out[:, 2, 2:].tobytes() == clean[0][:, 2, 2:].tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_schedules_and_races(seed):
    lengths = LENGTHS[-3:]
    q, k, v = problem(2, lengths=lengths)
    expected = run_both(q, k, v, lengths, splits=2, stages=2)
    with sim.options(race=True, seed=seed):
        assert same_bits(expected, run_both(q, k, v, lengths, splits=2, stages=2))


STORAGE = {"int8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn}


@pytest.mark.parametrize("per", ["head", "token"])
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_quantised(dtype, storage, per):
    """A key is stored · scale; what lies behind the lengths, scales too, may be anything."""
    q, k, v = problem(2, head_dim=32, dtype=dtype, lengths=SOME)
    (k, k_scale), (v, v_scale) = (quantise(x, STORAGE[storage]) for x in (k, v))
    assert np.isnan(k_scale[0]).all()
    scales = paged_scales = k_scale, v_scale
    if per == "head":
        scales = paged_scales = [np.array(x, np.float32) for x in ([0.01, 0.5], [2.0, 0.003])]
    else:
        *paged_scales, _ = paged(*scales, lengths=SOME, page_size=PAGE)
    got = run(q, k, v, SOME, scales=scales)
    values = [dequantise(x, y, np.dtype(np.float32)) for x, y in zip((k, v), scales, strict=True)]
    check(got, q, *values, SOME)
    k_pages, v_pages, table = paged(k, v, lengths=SOME, page_size=PAGE)
    assert same_bits(got, run(q, k_pages, v_pages, SOME, table, scales=paged_scales))


@pytest.mark.parametrize("stored", [False, True], ids=["f16", "int8"])
@pytest.mark.parametrize(
    ("lengths", "splits", "head_dim", "race"),
    [
        ([0, CAPACITY], 1, 40, True),
        ([2, T + 1], 3, 40, True),
        (LENGTHS, 3, 8, False),
        ([CAPACITY], 2, 200, False),
        ([CAPACITY], 19, 40, False),  # two rounds of sixteen
    ],
)
def test_the_last_block_joins(lengths, splits, head_dim, race, stored):
    """Twice in a row, with the counts that the first call has left, and blocks in other orders."""
    lengths = np.array(lengths, np.int32)
    q, k, v = problem(3, head_dim=head_dim + 8 * stored, lengths=lengths)
    named, (k_, v_) = {"splits": splits, "stages": 2}, (k, v)
    if stored:
        (k, k_scale), (v, v_scale) = (quantise(x, np.int8) for x in (k, v))
        real = np.dtype(np.float32)
        k_, v_ = dequantise(k, k_scale, real), dequantise(v, v_scale, real)
        named["scales"] = k_scale, v_scale
    counts = np.zeros(len(lengths) * 2, np.uint32)
    for seed in range(2):
        with sim.options(race=race, seed=seed):
            got = joined(q, k, v, lengths, counts=counts, **named)
        check(got, q, k_, v_, lengths)
        assert not counts.any()
