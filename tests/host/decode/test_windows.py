"""What windows of `decode` leave: bounds of keys, tiles, and windows of any size."""

import numpy as np
import pytest
from decode_cases import contiguous, same_bits

import masks
import nbflash
from nbflash.backends.split_kv.splits import walk
from nbflash.inputs.decode_problem import Cache, check_decode


def problem_of(nq, capacity, window):
    q, k, v = (np.zeros((1, n, 1, 8), np.float32) for n in (nq, capacity, capacity))
    return check_decode(q, Cache(k, v, np.zeros(1, np.int32)), window=window)


@pytest.mark.parametrize("window", [None, (0, 0), (5, None), (15, 0), (16, 2), (40, None)])
@pytest.mark.parametrize("nq", [1, 3, 18])
def test_the_tiles_of_a_window(nq, window):
    """As many as the longest row has, and no more: splits go by their number."""
    tile, capacity = 16, 2000
    p = problem_of(nq, capacity, window)
    left = capacity if window is None else window[0]
    firsts = [(max(n - nq - left, 0), n) for n in range(capacity + 1)]
    most = max(-(-n // tile) - first // tile for first, n in firsts)
    for mask in (None, masks.dense(nq, capacity)):
        _, tiles, _ = walk(p, mask, 64, tile, 1)
        assert tiles == most
    by_tokens, tiles, _ = walk(p, None, 2, tile, 1)  # rows of two tokens
    assert by_tokens == -(-nq // 2)
    assert tiles <= most


@pytest.mark.parametrize(("nq", "longest"), [(1, 5), (3, 5), (18, 6)])
@pytest.mark.parametrize("window", [None, (100, 0), (31, None), (0, 0)])
def test_the_tiles_of_a_mask(nq, longest, window):
    """A mask's longest row, or what the window leaves of it, in numbers that do not overflow."""
    mask = masks.window(nq, 2000, left=70, right=0)
    p = problem_of(nq, 2000, window)
    n_row, tiles, _ = walk(p, mask, 64, 16, 1)
    within = walk(p, None, 64, 16, 1)[1]
    assert (n_row, tiles) == (1, min(longest, within))
    assert type(tiles) is int


@pytest.mark.parametrize(
    ("window", "alone", "with_mask"),
    [
        (None, (9, 0), (9, 2)),
        ((None, None), (9, 0), (9, 2)),
        ((4, 1), (4, 0), (4, 1)),
        ((0, 0), (0, 0), (0, 0)),
        ((2**70, 2**70), (9, 0), (9, 2)),  # kernels add them to positions in 32 bits
    ],
)
def test_what_a_token_sees(window, alone, with_mask):
    problem = problem_of(3, 9, window)
    assert problem.window_within(None) == alone
    assert problem.window_within(masks.dense(3, 5)) == with_mask
    assert (problem.most_keys(None), problem.most_keys(masks.dense(3, 5))) == (9, 5)


def test_windows_of_any_size():
    """They hide nothing of a sequence that is shorter than the queries."""
    q, k, v = contiguous(3, lengths=(2,), capacity=9)
    whole = nbflash.decode(q, k, v, [2])
    for window in ((2**63 - 1, None), (2**70, 2**70), (None, 2**63 - 1)):
        assert same_bits(nbflash.decode(q, k, v, [2], window=window), whole)
    mask = masks.causal(3, 9)
    want = nbflash.decode(q, k, v, [2], mask=mask)
    assert same_bits(nbflash.decode(q, k, v, [2], mask=mask, window=(2**63 - 1, 2**63 - 1)), want)
