"""decode's kernels without tensor cores, in the simulator, against the float64 reference."""

import ml_dtypes
import numpy as np
import pytest
from decode_cases import (
    CAPACITY,
    DTYPES,
    LENGTHS,
    check,
    contiguous,
    of_both_caches,
    paged,
    same_bits,
)
from decode_runs import decoded

import masks
from nbflash.backends.simt.decode_configs import decode_config
from nbflash.backends.split_kv.splits import splits_for
from nbflash.cuda import simulator as sim
from nbflash.cuda.kinds import float32
from nbflash.cuda.tile.convert import widened
from nbflash.definitions.quantised import dequantise, quantise
from nbflash.inputs.decode_problem import Cache
from nbflash.planning.decode_plan import lookup

STORAGE = {"int8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn}
SHORT = LENGTHS[2:5]


run_both = of_both_caches(decoded)


HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (6, 1)}
PROBLEMS = [("f32", nq, name) for nq in (1, 3) for name in HEADS]
PROBLEMS += [(dtype, 3, "gqa") for dtype in DTYPES if dtype != "f32"]


@pytest.mark.parametrize(("dtype", "nq", "heads"), PROBLEMS)
def test_lengths(dtype, nq, heads):
    """Sequences of no key, of fewer than q_len, of a page and beside it."""
    q, k, v = contiguous(nq, HEADS[heads], 12, DTYPES[dtype])
    out, lse = run_both(q, k, v, splits=2)
    check((out, lse), q, k, v, LENGTHS)
    assert out.dtype == DTYPES[dtype]
    assert lse.dtype == (np.float64 if dtype == "f64" else np.float32)
    assert not out[0].any()
    assert np.isneginf(lse[0]).all()


@pytest.mark.parametrize("tile", [8, 16, 32])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_lengths_around_a_tile(tile, beside):
    """Head_dim 32 is 4 lanes: 8 slots, of 1, 2 and 4 keys."""
    lengths = np.array([tile + beside, 2 * tile + beside], np.int32)
    q, k, v = contiguous(2, head_dim=32, lengths=lengths)
    check(run_both(q, k, v, lengths, keys=tile // 8, splits=2), q, k, v, lengths)


def test_the_whole_capacity():
    lengths = np.array([CAPACITY], np.int32)
    q, k, v = contiguous(2, lengths=lengths)
    check(run_both(q, k, v, lengths), q, k, v, lengths)


def test_64_tokens():
    """Blocks of 3 heads and 2 tokens; the second sequence is shorter than the tokens."""
    lengths = np.array([64, 40], np.int32)
    q, k, v = contiguous(64, (3, 1), lengths=lengths)
    check(decoded(q, k, v, lengths, splits=1), q, k, v, lengths)


@pytest.mark.parametrize("splits", [1, 2, 7, 50])
def test_splits(splits):
    """50 are more than there are tiles."""
    q, k, v = contiguous(2, head_dim=32)
    check(run_both(q, k, v, splits=splits), q, k, v, LENGTHS)


def test_four_warps_and_splits_by_the_rule():
    q, k, v = contiguous(2)
    check(run_both(q, k, v, warps=4), q, k, v, LENGTHS)


@pytest.mark.parametrize("page_size", [1, 16, 24, 256])
def test_page_sizes(page_size):
    q, k, v = contiguous(3)
    check(run_both(q, k, v, page_size=page_size, splits=2), q, k, v, LENGTHS)


@pytest.mark.parametrize("vectors", [False, True], ids=["scalar", "vectors"])
@pytest.mark.parametrize("head_dim", [4, 20, 72, 256])
def test_head_dims(head_dim, vectors):
    """With whole and with partly used lanes."""
    q, k, v = contiguous(1, (4, 2), head_dim, lengths=SHORT)
    check(run_both(q, k, v, SHORT, vectors=vectors), q, k, v, SHORT)


@pytest.mark.parametrize("head_dim", [1, 3, 65])
def test_head_dims_that_are_no_quads(head_dim):
    q, k, v = contiguous(2, (4, 2), head_dim, lengths=SHORT)
    check(run_both(q, k, v, SHORT), q, k, v, SHORT)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_scales(scale):
    q, k, v = contiguous(2)
    check(run_both(q, k, v, scale=scale), q, k, v, LENGTHS, scale=scale)


NQ = 5
TREE = masks.tree([-1, 0, 0, 1, 2], prefix=CAPACITY - NQ)
BY_HEAD = masks.per_head([masks.causal(NQ, CAPACITY), masks.sinks(NQ, 1, 9, nk=CAPACITY)] * 2)
MASKS = {
    "sinks": masks.sinks(NQ, 4, 20, nk=CAPACITY),
    "dense": masks.dense(NQ, CAPACITY),
    "empty": ~masks.dense(NQ, CAPACITY),
    "late": masks.from_function(lambda q, kv: kv > 60, NQ, CAPACITY),
    "scattered": masks.from_function(lambda q, kv: (5 * q + 7 * kv) % 11 < 4, NQ, CAPACITY),
    "tree": TREE,
    "per-head": BY_HEAD,
    "per-group": masks.per_head(
        [masks.window(NQ, CAPACITY, left=20 * i, right=None) for i in (1, 1, 4, 4)]
    ),
    "per-batch": masks.per_batch([masks.window(NQ, CAPACITY, left=9 * i) for i in range(6)]),
    "per-batch-per-head": masks.per_batch([BY_HEAD, masks.dense(NQ, CAPACITY)] * 3),
}


def keep_of(mask, lengths=LENGTHS, heads=4):
    dense = np.broadcast_to(mask.dense(), (len(lengths), heads, *mask.shape))
    return lambda b: dense[b, ..., : lengths[b]]


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    """Keys are counted from the first of a sequence; those behind its length do not exist."""
    q, k, v = contiguous(NQ)
    got = run_both(q, k, v, mask=MASKS[name], splits=2)
    check(got, q, k, v, LENGTHS, keep=keep_of(MASKS[name]))


@pytest.mark.parametrize("keys", [1, 4])
@pytest.mark.parametrize("nq", [1, 3, 17])
def test_masks_over_several_query_tiles(nq, keys):
    """Tiles of 8 or 32 keys, and of one token to three."""
    mask = masks.from_function(lambda q, kv: (q + 3 * kv) % 7 < 3, nq, CAPACITY)
    mask = mask | masks.window(nq, CAPACITY, left=40, right=0)
    q, k, v = contiguous(nq, (2, 1), head_dim=32)
    got = run_both(q, k, v, mask=mask, keys=keys, splits=3)
    check(got, q, k, v, LENGTHS, keep=keep_of(mask, heads=2))


def test_a_mask_of_fewer_columns_than_the_capacity():
    longest = int(LENGTHS.max())
    mask = masks.sinks(NQ, 4, 20, nk=longest)
    q, k, v = contiguous(NQ)
    check(run_both(q, k, v, mask=mask), q, k, v, LENGTHS, keep=keep_of(mask))


def test_masked_keys_may_hold_nan():
    q, k, v = contiguous(NQ)
    keep = MASKS["sinks"].dense()
    dead = ~keep.any(axis=0)
    k[:, dead], v[:, dead] = np.nan, np.nan
    got = run_both(q, k, v, mask=MASKS["sinks"])
    clean = [np.nan_to_num(x) for x in (k, v)]
    check(got, q, *clean, LENGTHS, keep=lambda b: keep[:, : LENGTHS[b]])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_poisoned_draft_reaches_later_tokens_alone(poison):
    """The value of the last token, which the tokens before it do not attend."""
    lengths = LENGTHS[3:]
    q, k, v = contiguous(3, lengths=lengths)
    clean, _ = decoded(q, k, v, lengths)
    for b, length in enumerate(lengths):
        v[b, length - 1, 0, 0] = poison
    out, _ = run_both(q, k, v, lengths)
    assert not np.isfinite(out[:, 2, :2, 0]).any()
    clean[:, 2, :2, 0] = out[:, 2, :2, 0]
    assert out.tobytes() == clean.tobytes()


@pytest.mark.parametrize("kind", ["head", "token"])
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("dtype", ["f16", "f32", "f64"])
def test_quantised_caches(dtype, storage, kind):
    """A key is stored · scale, in the working precision; what is not read may be anything."""
    q, k, v = contiguous(2, (4, 2), 24, DTYPES[dtype])
    real = np.dtype(np.float64 if dtype == "f64" else np.float32)
    (k, k_scale), (v, v_scale) = (quantise(x, STORAGE[storage]) for x in (k, v))
    scales = k_scale, v_scale
    if kind == "head":
        scales = [np.array(x, np.float32) for x in ([0.01, 0.5], [2.0, 0.003])]
    named = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    got = decoded(q, k, v, LENGTHS, **named, vectors=dtype == "f16")
    wide = (dequantise(x, scale, real) for x, scale in zip((k, v), scales, strict=True))
    check(got, q, *wide, LENGTHS)
    *pages, table = paged(k, v)
    if kind == "token":
        *scales, _ = paged(*scales)
        named = dict(zip(named, scales, strict=True))
    named["block_table"] = table
    assert same_bits(got, decoded(q, *pages, LENGTHS, **named, vectors=dtype == "f16"))


def test_every_fp8_number():
    bits = np.arange(256, dtype=np.uint8)
    exact = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found = [widened(x, "float8_e4m3fn", float32.numba) for x in bits]
    np.testing.assert_array_equal(found, exact)


LAYOUTS = {
    "heads-outside": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "padded-rows": lambda x: np.pad(x, ((0, 0), (0, 0), (0, 0), (3, 5)))[..., 3:-5],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    q, k, v = contiguous(2)
    plain = run_both(q, k, v)
    moved = [LAYOUTS[layout](x) for x in (q, k, v)]
    assert same_bits(plain, decoded(*moved, LENGTHS))
    *pages, table = paged(k, v)
    pages = map(LAYOUTS[layout], pages)
    table = np.pad(table, ((0, 0), (0, 5)))[:, :-5]
    assert same_bits(plain, decoded(moved[0], *pages, LENGTHS, block_table=table))


def test_lengths_out_of_range_end_at_the_capacity():
    """On a device nobody checks them."""
    beyond, inside = np.array([CAPACITY + 9, -5], np.int32), np.array([CAPACITY, 0], np.int32)
    q, k, v = contiguous(2, lengths=inside)
    assert same_bits(decoded(q, k, v, beyond), decoded(q, k, v, inside))


@pytest.mark.parametrize(("batch", "capacity"), [(0, CAPACITY), (2, 0)])
def test_nothing_to_attend(batch, capacity):
    lengths = np.zeros(batch, np.int32)
    q, k, v = contiguous(2, lengths=lengths, capacity=capacity)
    out, lse = decoded(q, k, v, lengths)
    assert (out.shape, lse.shape) == ((batch, 2, 4, 8), (batch, 4, 2))
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("seed", range(3))
def test_schedules_and_races(seed):
    q, k, v = contiguous(3, head_dim=20, lengths=SHORT)
    expected = run_both(q, k, v, SHORT, splits=2, warps=2)
    with sim.options(race=True, seed=seed):
        assert same_bits(expected, run_both(q, k, v, SHORT, splits=2, warps=2))


def test_calls_of_one_signature_share_a_decoder():
    q, k, v = contiguous(2, lengths=SHORT)
    first = lookup(q, Cache(k, v, SHORT), None, None, "simt")
    assert lookup(q.copy(), Cache(v, k, SHORT[::-1].copy()), None, None, "simt") is first
    moved = LAYOUTS["heads-outside"](k)
    others = [
        lookup(q, Cache(moved, v, SHORT), None, None, "simt"),
        lookup(q, Cache(k, v, SHORT), None, 0.5, "simt"),
        lookup(q, Cache(k, v, SHORT), masks.dense(2, CAPACITY), None, "simt"),
    ]
    assert len({id(x) for x in (first, *others)}) == 4
    out, lse = first(q, Cache(k, v, SHORT))
    check((out, lse), q, k, v, SHORT)
    with sim.options(race=True):  # the lse is written over the splits' own
        alone, none = first(q, Cache(k, v, SHORT), with_lse=False)
    assert none is None
    assert same_bits([alone], [out])


def test_a_new_call_is_checked():
    q, k, v = contiguous(2, lengths=SHORT)
    with pytest.raises(ValueError, match="mask must have 2 rows"):
        lookup(q, Cache(k, v, SHORT), masks.dense(3, CAPACITY), None, "simt")
    with pytest.raises(TypeError, match="lengths must have dtype int32"):
        lookup(q, Cache(k, v, SHORT.astype(np.int64)), None, None, "simt")
    with pytest.raises(TypeError, match="scale must be a real number or None"):
        lookup(q, Cache(k, v, SHORT), None, [1], "simt")


NEAR_BEST = 1.05  # of the shortest time there is


def time_of(items, splits, tiles, slots):
    """Of all waves, in tiles: a block's own, and four for its beginning and end."""
    return -(-items * splits // slots) * (-(-tiles // splits) + 4)


@pytest.mark.parametrize("slots", [108, 132, 264, 396])
@pytest.mark.parametrize("tiles", [1, 3, 64, 1024, 2048])
@pytest.mark.parametrize("items", [1, 8, 100, 133, 5000])
def test_the_number_of_splits(items, tiles, slots):
    splits = splits_for(items, tiles, slots)
    most = max(1, min(tiles // 2, 256))
    assert 1 <= splits <= most
    times = {n: time_of(items, n, tiles, slots) for n in range(1, most + 1)}
    enough = NEAR_BEST * min(times.values())
    assert splits == next(n for n, time in times.items() if time <= enough)


@pytest.mark.parametrize(
    ("items", "tiles", "slots", "splits"),
    [
        *((8, 1024, 132, 16), (40, 256, 132, 3), (128, 128, 132, 1)),
        *((8, 1024, 396, 47), (40, 256, 396, 9), (512, 128, 396, 3)),
    ],
)
def test_splits_of_an_h100(items, tiles, slots, splits):
    """8 heads of keys, of 1, 5, 16 and 64 sequences; one block a multiprocessor, and three."""
    assert splits_for(items, tiles, slots) == splits


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 12, 71])
@pytest.mark.parametrize("nq", [1, 2, 9, 64])
def test_rows_of_a_block(nq, group, dtype):
    cfg = decode_config(dtype, dtype, 128, nq=nq, group=group, masked=False, vectors=True)
    assert group % cfg.pack == 0
    assert 1 <= cfg.queries <= nq
    assert cfg.rows <= (2 if dtype == "float64" else 8)
    assert cfg.width >= 128
