"""Pickles and copies hold what something is made of, and nothing that was computed from it."""

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from mask_cases import plain_cases

import masks
from nbflash import BlockMap, scores
from nbflash.distributed import Sharding
from nbflash.inputs.positions import Positions
from nbflash.schedule.tile_schedule import TileSchedule

CASES = {name: mask for name, (mask, _) in plain_cases().items() if name != "function"}
CASES["planes"] = masks.padding([3, 8, 0], 8) & masks.per_head([masks.causal(8), masks.dense(8)])

CASES["restricted"] = masks.restrict(masks.neighborhood((6, 8), 3), range(1, 48, 2), range(9))


def test_a_mask_of_another_process_has_the_hash_of_this_one():
    """Hashes of strings differ from process to process."""
    made = "masks.butterfly(96, 8) & masks.from_dense(np.eye(96, dtype=bool)) | masks.axial(8, 12)"
    code = (
        f"import pickle, sys, numpy as np, masks; mask = {made}; hash(mask); mask.tiles(8); "
        "sys.stdout.buffer.write(pickle.dumps(mask))"
    )
    run, environ = [sys.executable, "-c", code], {**os.environ, "PYTHONHASHSEED": "1"}
    sent = subprocess.run(run, check=True, capture_output=True, env=environ)
    received, own = pickle.loads(sent.stdout), eval(made)
    assert received == own
    assert hash(received) == hash(own)
    assert (received | masks.causal(96)) == (own | masks.causal(96))
    assert {own: 1}[received] == 1


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy}
COPIES |= {
    f"protocol-{n}": lambda x, n=n: pickle.loads(pickle.dumps(x, n))
    for n in range(2, pickle.HIGHEST_PROTOCOL + 1)
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_every_mask_survives(name, copied):
    mask = CASES[name]
    again = copied(mask)
    assert again == mask
    assert hash(again) == hash(mask)
    assert (again.dense() == mask.dense()).all()
    for part in again._parts():
        assert not isinstance(part, np.ndarray) or not part.flags.writeable


def test_a_pickle_of_a_mask_that_was_used_is_no_longer():
    mask = masks.butterfly(4096, 64, causal=True) | masks.dilated(4096, 8, 100)
    before = len(_bytes(mask))
    hash(mask), mask.tiles(64), mask.tiles(64).counts(), mask.T.tiles(64)
    assert len(_bytes(mask)) == before


def test_a_function_is_pickled_by_its_name():
    mask = masks.from_function(np.greater_equal, 9)
    assert pickle.loads(_bytes(mask)) == mask
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        _bytes(masks.from_function(lambda q, kv: q == kv, 9))


def test_a_pickle_of_a_schedule_that_was_used_is_no_longer():
    schedule = TileSchedule.from_mask(masks.butterfly(512, 32, causal=True), 32, 32)
    before = len(_bytes(schedule))
    assert schedule.T.row_order.size == schedule.outwards.n_row == 16
    assert len(_bytes(schedule)) == before
    again = pickle.loads(_bytes(schedule))
    assert (again.T.col_idx == schedule.T.col_idx).all()


LISTS = [[[[0, 2], [1, 1]]]]
OTHERS = {
    "positions": Positions([0, 2], [1, 3, 4]),
    "sharding": Sharding.of(masks.causal(4, 6), 2, 2),
    "schedule": TileSchedule.from_mask(CASES["planes"], 4, 2).T,
    "block map": BlockMap(np.array(LISTS), shape=(3, 5), block=2, within=masks.causal(3, 5)),
    **{f"stage {x}": x._stages[0] for x in (scores.alibi([1, 2]), scores.bias(np.ones((2, 3))))},
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("name", OTHERS)
def test_all_that_others_are_made_of_survives(name, copied):
    one, again = OTHERS[name], copied(OTHERS[name])
    attributes = getattr(one, "__slots__", None) or vars(one)
    for attribute in attributes:
        np.testing.assert_equal(getattr(again, attribute), getattr(one, attribute))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_score_makes_its_key_anew(copied):
    score = scores.compose(scores.softcap(3), scores.relative(np.zeros((2, 5))))
    score._key = "of another process"
    again = copied(score)
    assert again == scores.compose(scores.softcap(3), scores.relative(np.zeros((2, 5))))
    (table,) = again._stages[1].params
    assert not table.flags.writeable


def _bytes(x):
    return pickle.dumps(x, pickle.HIGHEST_PROTOCOL)
