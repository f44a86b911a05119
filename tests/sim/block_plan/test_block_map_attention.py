"""Attention over block maps that the device plans, through the public API, in the simulator."""

import numpy as np
import pytest
from simt_runs import DTYPES, assert_close, bits, expected

import masks
import nbflash
from nbflash import BlockMap
from nbflash.backends.block_plan.host import BlockSchedule
from nbflash.testing import make_qkv


def run(inputs, mask, impl, *, deterministic=False, **options):
    q, k, v, dout = inputs
    out, lse = nbflash.attention(q, k, v, mask, impl=impl, return_lse=True, **options)
    gradients = nbflash.attention_backward(
        dout, q, k, v, out, lse, mask, impl=impl, deterministic=deterministic, **options
    )
    return out, lse, *gradients


# A row of blocks and a column of them without anything; entries twice and out of range.
INDICES = np.array([[[[2, 2, 9], [0, 1, -1], [5, 5, 5]], [[0, 2, 0], [1, 1, 1], [2, 0, 1]]]])
COUNTS = np.array([[[3, 2, 3], [3, 0, 3]]])


def chosen(n, heads):
    rows = -(-n // 64)
    return BlockMap(INDICES[:, :heads, :rows], COUNTS[:, :heads, :rows], shape=n, block=64)


# Blocks of 64 in tiles of 128: bits, and those that the diagonal cuts. sm90 in both forms.
CASES = [
    ("simt", "float32", 70, 1, False),
    ("sm80", "float16", 70, 2, True),
    ("sm90", "bfloat16", 130, 2, False),
    ("sm90", "bfloat16", 160, 2, True),
]


@pytest.mark.parametrize(("impl", "dtype", "n", "heads", "deterministic"), CASES)
def test_values(impl, dtype, n, heads, deterministic):
    inputs, made = make_qkv(1, n, n, heads, heads, 8, DTYPES[dtype]), chosen(n, heads)
    got = run(inputs, made, impl, deterministic=deterministic, causal=True)
    assert_close(got, *expected(made.to_mask() & masks.causal(n), *inputs))


def test_a_plan_reads_the_lists_of_the_call():
    """Of one layout there is one plan; a plan for a map reads what its arrays hold now."""
    q, k, v, _ = make_qkv(1, 3, 70, 1, 1, 8, np.float16)
    indices = np.zeros((1, 1, 1, 1), np.int32)
    made = BlockMap(indices, shape=(3, 70), block=64)
    other = BlockMap(np.ones_like(indices), shape=(3, 70), block=64)
    plan, same = (nbflash.plan(q, k, v, x, impl="sm80") for x in (made, other))
    assert plan._base is same._base is not None
    assert repr(plan.schedule) == (
        "BlockSchedule(3x70, tiles 64x64 by rows, 1 plane(s), blocks of (64, 64), k=1)"
    )
    plan._executor.bind_backward()
    assert callable(plan._executor.bind_forward())
    first, second = plan(q, k, v), same(q, k, v)
    indices[...] = 1
    assert bits(plan(q, k, v)) == bits(second)
    assert bits(first) != bits(second)
    static = nbflash.plan(q, k, v, other.to_mask(), impl="sm80")
    assert not isinstance(static.schedule, BlockSchedule)
    assert bits(static(q, k, v)) == bits(second)


@pytest.mark.design
@pytest.mark.parametrize("extent", [(2, 2), (1, 2), (2, 1), (1, 1)], ids=str)
def test_rows_without_room_are_nan_and_no_others(extent):
    """In any layout of the result, for the batch elements and heads of that row of the map."""
    q, k, v, _ = make_qkv(2, 70, 3, 2, 2, 8, np.float16)
    counts = np.ones((*extent, 2), np.int32)
    counts[-1, 0, 1] = 3
    made = BlockMap(np.zeros((*extent, 2, 1), np.int32), counts, shape=(70, 3), block=64)
    out = np.zeros((2, 2, 70, 8), np.float16).transpose(0, 2, 1, 3)
    _, lse = nbflash.attention(q, k, v, made, impl="sm80", return_lse=True, out=out)
    bad = np.zeros((2, 70, 2), bool)
    batch, heads = (slice(-(2 // n), None) for n in extent)
    bad[batch, 64:, heads if extent[1] == 1 else 0] = True
    assert np.array_equal(np.isnan(out), np.broadcast_to(bad[..., None], out.shape))
    assert np.array_equal(np.isnan(lse), bad.transpose(0, 2, 1))
    with pytest.raises(ValueError, match="the row needs 3 entries, and indices has room for k=1"):
        made.check()


def test_no_keys():
    """Nothing is planned where there is nothing to attend to."""
    q, k, v, _ = make_qkv(1, 20, 0, 2, 1, 8, np.float16)
    made = BlockMap(np.zeros((1, 1, 2, 0), np.int32), shape=(20, 0), block=16)
    assert not nbflash.attention(q, k, v, made, impl="sm80").any()


def test_a_plan_of_a_map_is_not_pickled():
    q, k, v, _ = make_qkv(1, 20, 20, 2, 1, 8, np.float16)
    made = BlockMap(np.zeros((1, 1, 1, 1), np.int32), shape=20, block=64)
    with pytest.raises(TypeError, match="a plan of a BlockMap on the device is not pickled"):
        nbflash.plan(q, k, v, made, impl="sm80").__reduce__()
