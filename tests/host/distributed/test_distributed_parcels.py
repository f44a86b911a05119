"""Tokens that go to other ranks: which they are, in which order, and which need no copy."""

import contextlib
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from nbflash.distributed import parcels, run
from nbflash.distributed.by_heads import queries_of
from nbflash.distributed.call import Call
from nbflash.distributed.parcels import Index, Parcels, taken
from nbflash.inputs.arrays import alignment_in_memory, pointer

APART = {3: np.array([0, 2, 5]), 1: np.array([1, 3, 4, 6])}
RUNS = {3: np.arange(4, 7), 1: np.arange(4)}
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def numbered(*shape, dtype=np.float32):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 3, 8])
def test_taken_is_what_indexing_gives(dtype, head_dim):
    """Whatever the bytes of a row, and its alignment."""
    x = numbered(2, 7, 3, head_dim + 1, dtype=dtype)
    wider = numbered(2, 9, 3, head_dim + 1, dtype=dtype)
    for given in (x, x[..., 1:], x[:, :, 1:], wider[:, 1:8], wider[:, 7:0:-1]):
        for places in APART.values():
            got = taken(given, Index(places), 1)
            assert got.dtype == given.dtype
            assert got.flags.c_contiguous
            assert got.tobytes() == given[:, places].tobytes()
    lse = numbered(2, 3, 7)
    np.testing.assert_array_equal(taken(lse, Index(APART[1]), 2), lse[:, :, APART[1]])


def test_tokens_that_follow_each_other_are_a_view():
    x = numbered(2, 7, 3, 4)
    assert np.shares_memory(taken(x, Index(np.arange(2, 5)), 1), x)
    assert taken(x, Index(np.zeros(0, np.int64)), 1).shape == (2, 0, 3, 4)


@pytest.mark.parametrize("places", [APART, RUNS], ids=["apart", "runs"])
@pytest.mark.parametrize("batch", [1, 2])
def test_messages_and_back(places, batch):
    x = numbered(batch, 7, 2, 4)
    parcels = Parcels(places | {2: np.zeros(0, np.int64)}, 7)
    cut = parcels.cut(x)
    assert list(cut) == list(parcels.ranks) == [3, 1]
    whole, parts = parcels.room(np, batch, (2, 4), x.dtype, in_place=True)
    for rank, part in cut.items():
        assert part.flags.c_contiguous
        np.testing.assert_array_equal(part, x[:, places[rank]])
        assert parts[rank].flags.c_contiguous
        parts[rank][...] = part
    np.testing.assert_array_equal(parcels.ordered(whole, batch), x)


def test_runs_of_one_sequence_are_not_copied():
    x, parcels = numbered(1, 7, 2, 4), Parcels(RUNS, 7)
    assert all(np.shares_memory(part, x) for part in parcels.cut(x).values())
    whole, parts = parcels.room(np, 1, (2, 4), x.dtype, in_place=True)
    assert all(np.shares_memory(part, whole) for part in parts.values())
    assert np.shares_memory(parcels.ordered(whole, 1), whole)


def test_heads_of_a_wider_array_are_sent_contiguous():
    x = numbered(1, 7, 6, 4)[:, :, 2:4]
    for part in Parcels(RUNS, 7).cut(x).values():
        assert part.flags.c_contiguous


def test_ranks_that_need_the_same_tokens_have_room_each():
    """Gradients of the same keys come from several ranks."""
    parcels = Parcels({0: np.arange(4), 1: np.arange(2, 6)}, 6)
    _, parts = parcels.room(np, 1, (2, 4), np.float32, in_place=False)
    assert not np.shares_memory(parts[0], parts[1])
    assert [part.shape for part in parts.values()] == [(1, 4, 2, 4)] * 2


def test_nothing():
    parcels = Parcels({}, 0)
    assert parcels.cut(numbered(2, 5, 1, 4)) == {}
    whole, parts = parcels.room(np, 2, (1, 4), np.float32, in_place=True)
    assert parts == {}
    assert parcels.ordered(whole, 2).shape == (2, 0, 1, 4)


def test_tokens_are_taken_in_words_that_lie_at_their_multiples(monkeypatch):
    """NumPy would take any, a GPU none that is misaligned."""
    widths = []

    def take(x, at, axis):
        widths.append(x.itemsize)
        assert pointer(x) % x.itemsize == 0
        assert all(step % x.itemsize == 0 for step in x.strides)
        return np.take(x, at, axis)

    fake = SimpleNamespace(take=take), contextlib.nullcontext()
    monkeypatch.setattr(parcels, "library", lambda x: fake)
    memory, index = np.empty(16 * 64, np.uint8), Index(np.array([0, 2, 5]))
    first = -pointer(memory) % 16
    for off in (0, 8, 4, 2):
        x = memory[first + off :][: 6 * 32].view(np.float16).reshape(1, 6, 2, 8)
        x[...] = np.arange(x.size).reshape(x.shape)
        np.testing.assert_array_equal(taken(x, index, 1), x[:, [0, 2, 5]])
    assert widths == [16, 8, 4, 2]


def test_every_head_of_q_alone_is_aligned_alike():
    """The plan of the first slice runs all of them."""
    q = np.zeros((2, 5, 4, 12), np.float16)
    found = {alignment_in_memory(queries_of(q, slice(h, h + 1))) for h in range(4)}
    assert len(found) == 1


def test_sums_of_all_ranks_have_the_same_bits():
    """They are taken in the order of ranks, whichever of them adds."""
    values = np.float32([1, 1e8, -1e8, 3])

    def rank(comm):
        call = SimpleNamespace(comm=comm, xp=np)
        return Call._over_ranks(call, values[comm.rank : comm.rank + 1])

    first, *others = run(rank, 4, timeout=20)
    assert [x.tobytes() for x in others] == [first.tobytes()] * 3
