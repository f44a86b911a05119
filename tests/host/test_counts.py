"""Counts of decode's row tiles: no two calls that may run at the same time share a set."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbflash.planning.decode_plan import _PER_THREAD, _SETS, _Counts


class Memory:
    """What a device gives: a number for each row of an array."""

    @staticmethod
    def resident(tables):
        return tables

    @staticmethod
    def rows(x):
        assert not x.any()
        return range(len(x))


@given(st.lists(st.tuples(st.integers(0, _SETS + 3), st.booleans()), max_size=3 * _SETS))
def test_streams_and_graphs_have_sets_of_their_own(calls):
    """A stream keeps the set it found; a graph's set is nobody else's, ever."""
    counts, users, known = _Counts(Memory, 3), {}, {}
    for number, (stream, capturing) in enumerate(calls):
        found = counts.find(stream, capturing)
        if stream == _PER_THREAD and not capturing:
            assert found is None
        if stream in known and not capturing:
            assert found == known[stream]
        if found is not None:
            user = ("graph", number) if capturing else ("stream", stream)
            assert users.setdefault(found, user) == user
            if not capturing:
                known[stream] = found
    assert len(users) <= _SETS


@pytest.mark.parametrize("capturing", [False, True], ids=["streams", "graphs"])
def test_every_set_is_given_out(capturing):
    counts = _Counts(Memory, np.int64(1))
    streams = [s for s in range(_SETS + 2) if s != _PER_THREAD]
    found = [counts.find(s, capturing) for s in streams]
    assert found == [*range(_SETS), None]
