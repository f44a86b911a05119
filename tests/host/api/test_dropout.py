"""Dropout on the CPU and in the reference: random numbers, values, gradients, errors."""

import functools
import itertools
import math

import ml_dtypes
import numba
import numpy as np
import pytest
from central_differences import assert_central_differences

import masks
import nbflash
from nbflash import reference, scores
from nbflash.backends.cpu import passes as cpu
from nbflash.definitions import philox
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import check_forward
from nbflash.planning.plan import AttentionPlan
from nbflash.schedule.tile_schedule import TileSchedule
from nbflash.testing import (
    assert_blocks_within_reference,
    low_precision,
    low_precision_backward,
    make_qkv,
    poisoned,
)

RESULTS, FACTORS = ("out", "lse", "dq", "dk", "dv"), (2, 2, 3, 3, 3)
BLOCK = 64
SEED = 2**63 + 5, 11
M0, M1 = 0xD2511F53, 0xCD9E8D57

# Known answers of Random123: the counter's words, the key's, the result's.
ONES = 2**32 - 1
PI = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0
KNOWN = [
    [0, 0, 0, 0, 0, 0, 0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
    [*[ONES] * 6, 0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    [*PI, 0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
]


@pytest.mark.parametrize("words", KNOWN)
def test_known_answers_of_philox_4x32_10(words):
    """Of scalars, arrays and the compiled function."""
    given, expected = np.uint32(words[:6]), words[6:]
    assert [*philox.philox(*given)] == expected
    assert [*philox.compiled(numba.njit)(*given)] == expected
    arrays = philox.philox(*(np.full((2, 3), x) for x in given))
    assert [x.tolist() for x in arrays] == [[[x] * 3] * 2 for x in expected]


def number_of(b, h, q, kv, key):
    """The 15 bits of a score by the table of `nbflash.definitions.philox`, in words of Python."""
    call = philox.philox(*map(np.uint32, (h, 4 * (kv // 32) + kv % 8 // 2, b)), group(q), *key)
    words = [int(word) for word in call]
    if kv // 16 % 2:
        a, b, c, d = words
        words = [a + M0 * (c ^ d), b + M1 * (c ^ d), c + M0 * (a ^ b), d + M1 * (a ^ b)]
    rows = (0, 1, 2, 3) if kv // 32 % 2 == 0 else (2, 3, 0, 1)
    own = rows[2 * (q % 2) + q // 8 % 2]
    other = {0: 1, 1: 0, 2: 3, 3: 2}[own]
    half, crossing = (words[n] % 2**32 >> 16 * (kv % 2) & 0xFFFF for n in (own, other))
    if kv // 8 % 2:
        half = half % 256 * 256 + crossing // 256
    return half % 2**15


def group(q):
    return np.uint32(4 * (q // 16) + q % 8 // 2)


def test_a_call_serves_four_queries_and_eight_keys():
    """Whose numbers are those of the definition, one by one."""
    shape, key = (2, 1, 21, 67), philox.key(*map(np.uint64, SEED))
    for b, h, q, kv in np.ndindex(shape):
        p = number_of(b, h, q, kv, key) / 2**15  # the threshold that keeps it just so
        assert philox.kept_at(b, h, q, kv, p, SEED)
        assert not philox.kept_at(b, h, q, kv, p + 2**-15, SEED)
    whole = philox.kept(shape, 0.3, SEED)
    np.testing.assert_array_equal(whole, philox.kept_at(*np.indices(shape), 0.3, SEED))


def test_some_places_are_those_of_the_whole():
    whole = philox.kept((2, 3, 37, 45), 0.3, SEED)
    places = np.ix_([1], [2, 0], [36, 8, 7], range(45))
    np.testing.assert_array_equal(philox.kept_at(*places, 0.3, SEED), whole[places])


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9])
def test_the_share_of_what_is_kept_is_binomial(p):
    """Six standard deviations, of all elements, of each head, query and key, and of neighbours."""
    kept = philox.kept((3, 2, 61, 67), p, SEED)

    def check(x, n, q):
        """x holds shares of n elements that are true with probability q."""
        assert (np.abs(x - q) <= 6 * math.sqrt(q * (1 - q) / n) + 1 / n).all()

    for axes in ((0, 1, 2, 3), (2, 3), (0, 1, 3), (0, 1, 2)):
        check(kept.mean(axis=axes), math.prod(kept.shape[i] for i in axes), 1 - p)
    for axis in range(4):
        n = kept.shape[axis]
        both = kept.take(range(n - 1), axis) & kept.take(range(1, n), axis)
        check(both.mean(), both.size, (1 - p) ** 2)


@pytest.mark.parametrize("p", [0.003, 0.1, 1 / 3, 0.5, 64.25 / 128, 0.988])
def test_neighbours_in_the_round_of_bytes(p):
    """Every value of the bytes a, b, c of the halves (a, b) of one word and (c, .) of another: the
    number of the first is a, b, that of `crossed` is b, c.
    """
    a, b, c = np.ix_(*(np.arange(n, dtype=np.uint32) for n in (128, 256, 256)))
    limit = philox.threshold(p)
    own = (a << 8 | b) >= limit
    other = philox.crossed(b, c << np.uint32(8)) & philox.MASK >= limit
    exact = 1 - int(limit) / 2**15
    assert own.mean() == other.mean() == exact
    correlation = ((own & other).mean() - exact**2) / (exact * (1 - exact))
    assert abs(correlation) <= (0 if limit % 256 == 0 else 1 / 257)


def test_three_words_of_a_call_are_any_three():
    """Of eight: every value of three words of 3 bits comes once for each value of the fourth."""
    a, b, c, d = np.indices((8,) * 4, np.uint32).reshape(4, -1)
    words = [a, b, c, d, *philox.far(a, b, c, d)]
    for three in itertools.combinations(words, 3):
        numbers = np.ravel_multi_index([x % 8 for x in three], (8,) * 3)
        np.testing.assert_array_equal(np.bincount(numbers), 8)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_scores_of_a_block_are_not_correlated(p):
    """All pairs of 16 × 32 that one block of 16 calls draws, of 8192 blocks, six sigma."""
    kept = philox.kept((4, 8, 256, 512), p, SEED).reshape(32, 16, 16, 16, 32)
    blocks = kept.transpose(0, 1, 3, 2, 4).reshape(8192, 512)
    correlations = np.corrcoef(blocks, rowvar=False) - np.eye(512)
    assert np.abs(correlations).max() <= 6 / math.sqrt(8192) + 1 / 257


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_three_and_four_scores_of_a_call_are_nearly_independent(p):
    """The mean product of their deviations is that of independent ones, 0: of 2¹⁶ calls, six sigma,
    and of four within 1 / 64.
    """
    kept = philox.kept((4, 4, 256, 1024), p, SEED).reshape(16, 16, 2, 4, 2, 32, 2, 2, 4, 2)
    calls = kept.transpose(2, 4, 6, 7, 9, 0, 1, 3, 5, 8).reshape(32, -1)
    exact = int(philox.threshold(p)) / 2**15
    x = (calls - (1 - exact)).astype(np.float32) / np.float32(math.sqrt(exact * (1 - exact)))
    pairs = np.array(list(itertools.combinations(range(32), 2)))
    noise = 6 / math.sqrt(x.shape[1])
    triples, fours = 0, 0
    for some in np.array_split(x, 16, axis=1):
        products = some[pairs[:, 0]] * some[pairs[:, 1]]
        triples, fours = triples + products @ some.T, fours + products @ products.T
    apart = (pairs[:, :, None] != np.arange(32)).all(axis=1)
    assert np.abs(triples[apart]).max() <= noise * x.shape[1]
    apart = (pairs[:, None, :, None] != pairs[None, :, None, :]).all(axis=(2, 3))
    assert np.abs(fours[apart]).max() <= (noise + 1 / 64) * x.shape[1]


@pytest.mark.parametrize("p", [1 / 128, 0.25, 0.5])
def test_four_scores_of_the_lowest_bytes(p):
    """x, c, d and x + M (c ^ d), which depend most: exactly, in the 7 bits that count of a byte."""
    limit = round(128 * p)
    dropped = (np.arange(128) < limit) - limit / 128
    dropped /= math.sqrt(limit / 128 * (1 - limit / 128))
    x, z = np.ix_(np.arange(128), np.arange(128))
    of_both = np.array([(dropped * dropped[np.arange(128) ^ i]).mean() for i in range(128)])
    for multiplier in (M0, M1):
        far = dropped[(x + multiplier * z) % 128]
        assert abs((dropped[x] * far * of_both[z]).mean()) <= 1 / 64


def test_every_bit_of_the_state_counts():
    """Masks of other seeds and offsets agree no more than by chance: half of 4096, six sigma."""
    states = [(0, 0)] + [(1 << i, 0) for i in (0, 31, 32, 63)] + [(0, 1 << i) for i in (0, 32, 63)]
    kept = [philox.kept((1, 1, 64, 64), 0.5, state) for state in states]
    for a, b in itertools.combinations(kept, 2):
        assert abs(np.count_nonzero(a == b) - 2048) <= 6 * 32


@pytest.mark.parametrize("tile", [(5, 3), (16, 16), (128, 64), (6, 70)])
def test_the_mask_is_that_of_any_tile(tile):
    """Equal scores and a unit matrix for V or dO: the results are the elements of P themselves."""
    batch, heads, n = 2, 3, 70
    q = np.zeros((batch, n, heads, n), np.float32)
    eye = np.broadcast_to(np.eye(n, dtype=np.float32)[:, None], q.shape)
    schedule = TileSchedule.from_mask(masks.dense(n), *tile)
    out, dq, dk, dv = (poisoned(q.shape) for _ in range(4))
    lse = poisoned((batch, heads, n))
    cpu.forward(q, q, eye, out, lse, schedule, 1.0, drop=cpu.Drop(0.3, SEED))
    zero = np.zeros_like(lse)
    cpu.backward(
        eye, q, q, eye, out, lse, zero, dq, dk, dv, schedule, 1.0, drop=cpu.Drop(0.3, SEED)
    )
    kept = philox.kept((batch, heads, n, n), 0.3, SEED)
    np.testing.assert_array_equal(out != 0, kept.transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(dv != 0, kept.transpose(0, 3, 1, 2))


def check(inputs, mask, p, score=None, scale=None, given=None):
    """Run on the CPU, on ``given`` if not on the inputs, and hold every block to its budget."""
    q, k, v, dout = given or inputs
    how = {"scale": scale, "score": score, "dropout": p, "seed": SEED}
    out, lse = nbflash.attention(q, k, v, mask, return_lse=True, **how)
    dlse = np.random.default_rng(1).standard_normal(lse.shape).astype(lse.dtype)
    got = out, lse, *nbflash.attention_backward(dout, q, k, v, out, lse, mask, dlse=dlse, **how)
    q, k, v, dout = inputs
    ref = reference.attention(q, k, v, mask, **how)
    ref += reference.attention_backward(dout, q, k, v, mask, dlse=dlse, **how)
    low = low_precision(q, k, v, mask, **how)
    low += low_precision_backward(dout, q, k, v, mask, dlse=dlse, **how)
    for name, factor, *values in zip(RESULTS, FACTORS, got, ref, low, strict=True):
        axis = 2 if name == "lse" else 1
        assert_blocks_within_reference(*values, BLOCK, name=name, factor=factor, axis=axis)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.95])
def test_values_and_gradients(p):
    """Rows that keep nothing, rows and columns that see nothing, one token; heads that share."""
    for nq, nk in ((120, 150), (150, 120), (1, 3)):
        inputs = make_qkv(2, nq, nk, 4, 2, 16)
        for mask in (masks.dense(nq, nk), masks.causal(nq, nk), masks.window(nq, nk, left=9)):
            check(inputs, mask, p)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_dtypes(dtype):
    check(make_qkv(1, 100, 100, 4, 2, 16, dtype), masks.causal(100), 0.2, scale=-0.3)


def test_after_a_score_function():
    score = scores.compose(scores.softcap(2), scores.alibi(0.1))
    check(make_qkv(1, 70, 70, 2, 2, 16), masks.causal(70), 0.2, score)


def test_garbage_where_nothing_attends():
    """In hidden keys and in queries that see nothing, beside scores that dropout makes 0."""
    mask = masks.from_function(lambda q, kv: (kv != 3) & (kv < 18) & (q > 1), 9, 20)
    clean = make_qkv(1, 9, 20, 4, 2, 8)
    dirty = [x.copy() for x in clean]
    for x, hidden in zip(dirty, ([0, 1], [3, 18], [3, 19], [0, 1]), strict=True):
        x[:, hidden] = np.nan
    check(clean, mask, 0.5, given=dirty)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_gradients_equal_central_differences(impl):
    q, k, v, dout = make_qkv(1, 5, 7, 4, 2, 4, np.float64)
    mask, dlse = masks.causal(5, 7), np.random.default_rng(1).standard_normal((1, 4, 5))
    how = {"dropout": 0.4, "seed": SEED, "impl": impl}
    attention = functools.partial(nbflash.attention, mask=mask, return_lse=True, **how)
    results = attention(q, k, v)
    gradients = nbflash.attention_backward(dout, q, k, v, *results, mask, dlse=dlse, **how)
    assert_central_differences(attention, (q, k, v), gradients, dout, dlse)


def test_the_reference_drops_after_the_softmax():
    q, k, v, _ = make_qkv(2, 6, 9, 2, 2, 4, np.float64)
    out, lse = reference.attention(q, k, v, dropout=0.25, seed=SEED)
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / 2
    p = np.exp(s) / np.exp(s).sum(axis=-1, keepdims=True)
    p *= philox.kept(p.shape, 0.25, SEED) * (4 / 3)
    np.testing.assert_array_equal(lse, reference.attention(q, k, v)[1])
    expected = np.einsum("bhqk,bkhd->bqhd", p, v)
    assert np.abs(out - expected).max() <= 16 * np.finfo(float).eps * np.abs(expected).max()


def test_dropout_leaves_lse_and_a_probability_of_0_everything():
    q, k, v, dout = make_qkv(1, 40, 40, 2, 1, 8)
    plain = nbflash.attention(q, k, v, return_lse=True)
    _, lse = nbflash.attention(q, k, v, dropout=0.5, seed=1, return_lse=True)
    np.testing.assert_array_equal(lse, plain[1])
    gradients = nbflash.attention_backward(dout, q, k, v, *plain)
    for p, seed in ((0, None), (0.0, 3), (1e-12, 4)):
        got = nbflash.attention(q, k, v, dropout=p, seed=seed, return_lse=True)
        got += nbflash.attention_backward(dout, q, k, v, *plain, dropout=p, seed=seed)
        for x, y in zip(got, (*plain, *gradients), strict=True):
            np.testing.assert_array_equal(x, y)


def test_forms_of_a_seed():
    q, k, v, _ = make_qkv(1, 20, 20, 2, 1, 8)
    run = lambda seed: nbflash.attention(q, k, v, dropout=0.5, seed=seed)
    for seed, same in (
        (7, (7, 0)),
        (np.int64(7), [np.uint8(7), 0]),
        ((2**63 - 1, 3), np.array([2**63 - 1, 3])),
        ((2**64 - 1, 3), np.array([2**64 - 1, 3], np.uint64)),
    ):
        np.testing.assert_array_equal(run(seed), run(same))
    state = np.array([7, 0])
    first = run(state)
    state[1] += 1
    assert (run(state) != first).any()


def test_one_plan_serves_every_seed():
    q, k, v, dout = make_qkv(1, 20, 20, 2, 1, 8)
    plan = nbflash.plan(q, k, v, dropout=0.5)
    assert plan is nbflash.plan(q, k, v, dropout=0.5)
    assert plan is not nbflash.plan(q, k, v, dropout=0.25)
    assert nbflash.plan(q, k, v, dropout=0) is nbflash.plan(q, k, v)
    for seed in (1, (1, 2)):
        out, pullback = plan.vjp(q, k, v, seed=seed)
        how = {"dropout": 0.5, "seed": seed}
        expected, lse = nbflash.attention(q, k, v, return_lse=True, **how)
        np.testing.assert_array_equal(out, expected)
        expected = nbflash.attention_backward(dout, q, k, v, out, lse, **how)
        for x, y in zip(pullback(dout), expected, strict=True):
            np.testing.assert_array_equal(x, y)
    apart = [np.repeat(x, 2, axis=1)[:, ::2] for x in (q, k, v)]
    np.testing.assert_array_equal(plan(*apart, seed=(1, 2))[0], out)


def test_without_queries_or_keys():
    q, k, v, dout = make_qkv(1, 4, 0, 2, 1, 8)
    plan = nbflash.plan(q, k, v, dropout=0.5)
    out, lse = plan(q, k, v, seed=1)
    assert not out.any()
    dq, _, _ = plan.backward(dout, q, k, v, out, lse, seed=1)
    assert not dq.any()


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"dropout": -0.1}, ValueError, "dropout must be at least 0 and below 1, got -0.1"),
        ({"dropout": 1}, ValueError, "dropout must be at least 0 and below 1, got 1"),
        ({"dropout": math.nan}, ValueError, "got nan"),
        ({"dropout": True}, TypeError, "dropout must be a real number, got True"),
        ({"dropout": False}, TypeError, "dropout must be a real number, got False"),
        ({"dropout": "x"}, TypeError, "dropout must be a real number, got 'x'"),
        ({}, ValueError, "seed must be given with dropout"),
        ({"seed": 1.5}, TypeError, "seed must be an integer, a pair .* got 1.5"),
        ({"seed": True}, TypeError, "got True"),
        ({"seed": (1, 2, 3)}, TypeError, r"got \(1, 2, 3\)"),
        ({"seed": (1, 0.5)}, TypeError, r"got \(1, 0.5\)"),
        ({"seed": -1}, ValueError, r"from 0 to 2\*\*64 - 1, got -1"),
        ({"seed": np.array([-1, 2])}, ValueError, r"from 0 to 2\*\*64 - 1, got array\(\[-1, +2"),
        ({"seed": (0, 2**64)}, ValueError, r"from 0 to 2\*\*64 - 1"),
        ({"seed": np.zeros(2)}, TypeError, "got an array of float64"),
        ({"seed": np.zeros(2, np.int32)}, TypeError, "got an array of int32"),
        ({"seed": np.zeros(3, np.int64)}, ValueError, r"of shape \(2,\), got shape \(3,\)"),
        ({"seed": np.zeros(4, np.int64)[::2]}, ValueError, r"strides \(16,\)"),
    ],
)
def test_bad_dropout_and_bad_seeds(how, error, match):
    q, k, v, dout = make_qkv(1, 6, 6, 2, 1, 8)
    out, lse = nbflash.attention(q, k, v, return_lse=True)
    how = {"dropout": 0.5, **how}
    with pytest.raises(error, match=match):
        nbflash.attention(q, k, v, **how)
    with pytest.raises(error, match=match):
        nbflash.attention_backward(dout, q, k, v, out, lse, **how)


@pytest.mark.parametrize(
    ("seed", "error", "match"),
    [
        ("x", TypeError, "seed must be an integer, a pair .* got 'x'"),
        ((1, 2, 3), TypeError, r"got \(1, 2, 3\)"),
        (-1, ValueError, r"from 0 to 2\*\*64 - 1, got -1"),
        (np.zeros(2), TypeError, "got an array of float64"),
    ],
)
def test_a_bad_seed_without_dropout(seed, error, match):
    """Every time; what was right once is not looked at again."""
    q, k, v, _ = make_qkv(1, 6, 6, 2, 1, 8)
    plan = AttentionPlan(AttentionSpec(check_forward(q, k, v), masks.dense(6, 6)), "cpu")
    for _ in range(2):
        with pytest.raises(error, match=match):
            plan(q, k, v, seed=seed)
    for _ in range(2):
        for right in (7, (1, 2), np.zeros(2, np.int64)):
            np.testing.assert_array_equal(plan(q, k, v, seed=right)[0], plan(q, k, v)[0])


def test_a_kernel_with_less_dropout_says_so():
    q, k, v, _ = make_qkv(1, 6, 6, 2, 1, 8)
    reason = "sm90 takes a dropout of at most 0.96875, got 0.97"
    assert reason in nbflash.why_not("sm90", q, k, v, dropout=0.97)
    assert "dropout" not in "".join(nbflash.why_not("sm90", q, k, v, dropout=0.96875))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999, 1 - 1e-12])
def test_factor_is_that_of_the_threshold(p):
    """What is kept of the 2¹⁵ values of 15 bits, times the factor, is all of them."""
    assert philox.factor(p) * (2**15 - int(philox.threshold(p))) == 2**15
