"""Where tokens are in a sequence: blocks, and what is added to their numbers."""

import numpy as np
import pytest

from nbflash.inputs.positions import Positions

PAST = 4  # blocks behind the last one that a tile may reach into
RUNS = {
    "all": np.arange(256),
    "ragged": np.arange(200),
    "swapped": np.r_[128:192, 0:64, 320:384],
    "last": np.r_[640:704, 64:100],
    "none": np.arange(0),
    "halves": np.r_[32:64, 0:32],
    "inside": np.arange(10, 74),
    "gap": np.r_[0:30, 31:65],
    "backwards": np.arange(64)[::-1],
}


def _blocks(tokens, size):
    """Where each block begins, if each is one of the sequence's from its first token on."""
    found = []
    for first in range(0, tokens.size, size):
        own = tokens[first : first + size]
        if own[0] % size or (own != own[0] + np.arange(own.size)).any():
            return None
        found.append(int(own[0]))
    return found


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("keys", RUNS)
@pytest.mark.parametrize("queries", RUNS)
def test_blocks_begin_where_their_first_token_is(queries, keys, size):
    at, expected = Positions(RUNS[queries], RUNS[keys]), []
    expected = [_blocks(RUNS[queries], size), _blocks(RUNS[keys], 64)]
    found = at.starts((size, 64))
    assert (found is None) == (None in expected)
    if found is not None:
        assert [x.tolist() for x in found] == expected


@pytest.mark.parametrize("keys", ["all", "ragged", "swapped", "last", "none"])
def test_shifts_are_those_of_blocks_and_of_what_lies_behind(keys):
    """Added to its number in the part, modulo 2³², a token has its number in the sequence."""
    tokens = RUNS[keys]
    _, shifts = Positions(RUNS["all"], tokens).shifts()
    count = -(-tokens.size // 64)
    assert (shifts.dtype, shifts.size) == (np.uint32, count + PAST)
    numbers = np.arange(tokens.size, dtype=np.uint32)
    assert (numbers + shifts[numbers // 64] == tokens).all()
    assert len(set(shifts[max(count - 1, 0) :].tolist())) == 1
    assert tokens.size or not shifts.any()
