"""Who has which tokens, what travels between ranks, and in which order they add."""

import math
import pickle
import queue
from types import SimpleNamespace

import numpy as np
import pytest

import masks
from nbflash.distributed import Sharding, gather, run, scatter
from nbflash.distributed.call import Call
from nbflash.distributed.communicator import SUMMARY, summary
from nbflash.distributed.local import LocalCommunicator
from nbflash.distributed.sharding import row_work
from nbflash.distributed.stages import stages_of

TILE = 32


def test_scatter_and_gather_are_inverse():
    sharding = Sharding.of(masks.causal(100, 180), 3, TILE)
    x = np.arange(2 * 180).reshape(2, 180)
    places = [sharding.positions(rank, "keys") for rank in range(3)]
    assert (np.sort(np.concatenate(places)) == np.arange(180)).all()
    for whole in run(back_again, 3, sharding, x):
        np.testing.assert_array_equal(whole, x)


def back_again(comm, sharding, x):
    own = scatter(x, sharding, comm.rank, of="keys")
    np.testing.assert_array_equal(own, x[:, sharding.positions(comm.rank, "keys")])
    return gather(own, sharding, comm, of="keys")


def test_positions_are_what_rotary_embeddings_need():
    sharding = Sharding.of(masks.causal(256), 2, 64)
    assert (sharding.positions(0) == np.r_[0:64, 192:256]).all()
    assert (sharding.positions(1) == np.r_[64:192]).all()
    assert math.isclose(sharding.balance, 1)


def test_equal_shardings_share_what_is_planned():
    """One that is made anew in every step costs no other plans."""
    one, again = (Sharding.of(masks.documents([40, 88]), 2, TILE) for _ in range(2))
    other = Sharding.of(masks.documents([41, 87]), 2, TILE)
    assert one == again == pickle.loads(pickle.dumps(one))
    assert len({one, again, other}) == 2
    assert one.digest == again.digest != other.digest
    assert stages_of(one, 0, 1) is stages_of(again, 0, 1)
    assert one != "sharding"


def test_the_tile_of_a_sharding_counts():
    one, other = (Sharding.of(masks.dense(100), 2, tile) for tile in (64, 96))
    assert (one.query_owner == other.query_owner).all()
    assert one != other
    assert one.positions(1).size == 36
    assert other.positions(1).size == 4


def test_cells_of_bit_tiles_are_in_the_digest():
    """Two masks with tiles of the same kinds at the same places."""
    cells = np.eye(64, dtype=bool)
    cells[3, 9] = True
    one, other = (Sharding.of(masks.from_dense(x), 2, TILE) for x in (cells, cells.T))
    assert (one.query_owner == other.query_owner).all()
    assert (one.needs == other.needs).all()
    assert one.digest != other.digest


def test_the_heads_that_have_a_plane_are_in_the_digest():
    a, b = masks.causal(64), masks.window(64, left=7, right=0)
    one, other = (
        Sharding.of(masks.per_head(planes), 2, TILE) for planes in ([a, b, a, b], [a, b, b, a])
    )
    assert one.mask.planes == other.mask.planes
    assert (one.query_owner == other.query_owner).all()
    assert one.digest != other.digest


def test_masks_by_head_and_by_batch_are_told_apart_in_the_digest():
    """Of as many planes in the same order."""
    planes = masks.causal(64), masks.window(64, left=7, right=0)
    one, other = (Sharding.of(make(planes), 2, TILE) for make in (masks.per_head, masks.per_batch))
    assert (one.query_owner == other.query_owner).all()
    assert one.digest != other.digest


@pytest.mark.parametrize("shape", [(65, 290), (290, 65)])
def test_traffic_counts_the_keys_that_are_sent(shape):
    sharding = Sharding.of(masks.dense(*shape), 4, TILE)
    for source in range(4):
        for target in set(range(4)) - {source}:
            sent = sharding.sent(source, target).size
            assert sharding.traffic[source, target] == sent
    assert sharding.traffic.sum() > 0


def test_work_is_counted_in_float64():
    """By tiles: of all masks together it may be more than int32 counts."""
    sharding = Sharding.of(masks.per_head([masks.dense(256), masks.causal(256)]), 2, 64)
    assert sharding.work.dtype == sharding.work_on.dtype == np.float64
    assert row_work(sharding.mask, 64).tolist() == [4 + 1, 4 + 2, 4 + 3, 4 + 4]
    assert sharding.work.tolist() == sharding.work_on.sum(1).tolist() == [13, 13]


def test_what_was_sent_may_change():
    """A message that has not been taken yet is the array as it was."""
    boxes = [[queue.SimpleQueue() for _ in range(2)] for _ in range(2)]
    one, other = (LocalCommunicator(rank, boxes) for rank in range(2))
    x, got = np.zeros(3), np.empty(3)
    one.exchange({1: x}, {}).wait()
    x[:] = 1
    other.exchange({}, {0: got}).wait()
    assert got.tolist() == [0, 0, 0]


def sum_of_ranks(comm, values):
    return Call._over_ranks(SimpleNamespace(comm=comm, xp=np), values[comm.rank : comm.rank + 1])


def test_ranks_add_in_one_order():
    """The same bits on each; in another order 1 is lost."""
    values = np.array([1, 1e16, -1e16])
    assert run(sum_of_ranks, 3, values) == [1, 1, 1]


def test_what_is_merged_more_than_once_is_wide():
    x, call = np.zeros(1, np.float16), SimpleNamespace(_wide=np.dtype(np.float32))
    found = [Call.summed(call, x, times).dtype.itemsize for times in range(4)]
    assert found == [2, 2, 4, 4]


def test_a_summary_is_the_length_and_a_digest_of_a_note():
    """Of one size, since all ranks gather those of all; the length tells who sends the note."""
    notes = "", "a", "b", "é" * 300, "é" * 299 + "e"
    found = [summary(note) for note in notes]
    assert {(x.dtype.name, x.shape) for x in found} == {("uint8", (SUMMARY,))}
    lengths = [int.from_bytes(x[:8].tobytes(), "little") for x in found]
    assert lengths == [0, 1, 1, 600, 599]
    assert len({x.tobytes() for x in found}) == len(notes)
    assert (summary(notes[1])[8:] != summary(notes[2])[8:]).any()
