"""Ranks that disagree, fail or die: an error on every rank, and no hang."""

import json
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

import masks
from nbflash import distributed, scores
from nbflash.distributed import Sharding, run
from nbflash.distributed.rank_plan import RankOptions, RankPlan
from nbflash.testing import make_qkv

N, RANKS = 100, 3
MASK = masks.dense(N)


class Told:
    """What a rank's call has raised."""

    def __init__(self, error):
        self.kind, self.text = type(error).__name__, str(error)


def as_it_is(comm, given, options):
    pass


def attended(comm, of_rank=as_it_is):
    """`attention`, after a change by ``of_rank`` of what a rank gives; the error it raises."""
    sharding = Sharding.of(MASK, RANKS, 32)
    q, k, v, _ = make_qkv(1, N, N, 2, 1, 8)
    own = [x[:, sharding.positions(comm.rank)] for x in (q, k, v)]
    given, options = [*own, sharding, comm], {"dropout": 0.1, "seed": 1}
    of_rank(comm, given, options)
    try:
        distributed.attention(*given, **options)
    except Exception as error:
        return Told(error)
    return None


def another_mask(comm, given, options):
    """Of one pair."""
    if comm.rank == 1:
        given[3] = Sharding.of(masks.window(N, left=N - 2), RANKS, 32)


def another_seed(comm, given, options):
    options["seed"] += comm.rank == 1


def another_head_dim(comm, given, options):
    if comm.rank == 1:
        given[:3] = [np.concatenate([x, x], axis=-1) for x in given[:3]]


DIFFERENT = {
    "mask": (another_mask, "sharding differs between ranks: rank 0: .*; rank 1: .*; rank 2: "),
    "seed": (another_seed, r"seed differs between ranks: rank 0: \[1, 0\]; rank 1: \[2, 0\]"),
    "head-dim": (another_head_dim, "head_dim differs .*rank 0: .1, 2, 1, 8.; rank 1: .1, 2, 1, 16"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_between_ranks_is_an_error_on_all(name):
    change, match = DIFFERENT[name]
    for told in run(attended, RANKS, change, timeout=20):
        assert told.kind == "ValueError"
        with pytest.raises(ValueError, match=match):
            raise ValueError(told.text)


def test_seeds_of_a_later_call_are_compared_too():
    """What the ranks' plans keep of a call holds no seed."""
    assert run(attended, RANKS, timeout=20) == [None] * RANKS
    for told in run(attended, RANKS, another_seed, timeout=20):
        assert "seed differs between ranks" in told.text


def test_a_seed_in_device_memory_is_not_compared():
    """The host would wait for it."""
    of_plan = SimpleNamespace(_notes={}, _facts={"batch": 1})
    notes = [RankPlan.note(of_plan, seed) for seed in (np.zeros(2, np.uint64), None, (3, 0))]
    assert [json.loads(note)["seed"] for note in notes] == [None, None, [3, 0]]


def test_another_version_of_nbflash_is_an_error_on_all():
    def older(comm, given, options):
        agree = comm.agree
        if comm.rank == 2:
            comm.agree = lambda note: agree(note.replace('"nbflash": "', '"nbflash": "0.'))

    for told in run(attended, RANKS, older, timeout=20):
        assert told.kind == "ValueError"
        assert told.text.startswith("nbflash differs between ranks")


def too_short(comm, given, options):
    if comm.rank == 2:
        given[0] = given[0][:, 1:]


def test_the_mistake_of_one_rank_is_told_on_all():
    told = run(attended, RANKS, too_short, timeout=20)
    assert [each.kind for each in told] == ["RuntimeError", "RuntimeError", "ValueError"]
    assert "another rank has failed; rank 2: ValueError: mask must have shape" in told[0].text


def test_the_number_of_ranks_is_that_of_the_sharding():
    (told,) = run(attended, 1, timeout=20)
    assert told.text == "sharding is for 3 ranks, comm has 1"


def test_a_rank_that_does_not_come_is_an_error_on_all_others():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank . got no message of rank 1 for 0.5 s"):
        run(leave_or_attend, RANKS, timeout=0.5)
    assert time.monotonic() - start < 20


def leave_or_attend(comm, leaves=1):
    """A rank returns at once, as good as dead."""
    if comm.rank != leaves:
        told = attended(comm)
        raise TimeoutError(told.text) if told.kind == "TimeoutError" else AssertionError(told.text)


def died_between(comm):
    """A rank dies after all have agreed, before it sends."""
    if comm.rank == 1:
        comm.exchange = lambda sends, receives: os._exit(3)
    leave_or_attend(comm, leaves=3)


def test_a_process_that_dies_within_a_call_is_an_error_on_all_others():
    """Real processes; the two that live tell of it in time."""
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"the processes of ranks \[1\] have died") as caught:
        run(died_between, RANKS, processes=True, timeout=2)
    with pytest.raises(TimeoutError, match="got no message of rank 1 for 2 s"):
        raise caught.value.__cause__
    assert time.monotonic() - start < 60


def test_processes_give_what_threads_do():
    assert run(attended, RANKS, processes=True, timeout=60) == [None] * RANKS


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"ranks": 0}, ValueError, "ranks must be at least 1, got 0"),
        ({"ranks": 2.0}, TypeError, "ranks must be an integer, got 2.0"),
        ({"key_cost": float("nan")}, ValueError, "key_cost must be finite and at least 0, got nan"),
        ({"key_cost": float("inf")}, ValueError, "key_cost must be finite and at least 0, got inf"),
        ({"ranks": np.array(1.5)}, TypeError, "ranks must be an integer"),
        ({"tile": True}, TypeError, "tile must be an integer, got True"),
        ({"mask": np.ones((2, 2), bool)}, TypeError, r"mask must be a masks.Mask, got ndarray"),
    ],
)
def test_a_sharding_that_cannot_be(change, error, match):
    with pytest.raises(error, match=match):
        Sharding.of(**{"mask": MASK, "ranks": 2, "tile": 32} | change)


def alone(**options):
    """A call on one rank."""
    mask = options.pop("mask", masks.causal(N))
    q, k, v, dout = make_qkv(1, N, N, 2, 1, 8)
    (comm,) = run(lambda comm: comm, 1)
    how = {"tile": 24} if options.get("dropout") else {}
    backward = options.pop("backward", False)
    given = q, k, v, Sharding.of(mask, 1, **how), comm
    if not backward:
        return distributed.attention(*given, **options)
    out, lse = distributed.attention(*given, return_lse=True)
    return distributed.attention_backward(dout, q, k, v, out, lse, *given[3:], **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"stages": 0}, "stages must be at least 1, got 0"),
        ({"backward": True, "reduce": "float32"}, "reduce must be 'wide' or 'input', got 'float32"),
        ({"dropout": 0.5}, "seed must be given with dropout"),
        ({"split": "keys"}, "split must be 'ranks' or 'heads', got 'keys'"),
        ({"split": "heads", "stages": 2}, "stages must divide the 1 heads of k and v, got 2"),
        (
            {"split": "heads", "dropout": 0.5, "seed": 1, "score": scores.softcap(2.0)},
            "split='heads' does not run with score= or dropout= yet",
        ),
    ],
)
def test_options_that_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        alone(**options)


def test_dropout_needs_tiles_that_its_blocks_divide():
    """The first stage of both ranks has whole blocks, the second one of one rank has not."""
    sharding = Sharding.of(masks.window(256, left=16, right=0), 2, 16)

    def rank(comm):
        q, k, v, _ = make_qkv(1, 256, 256, 2, 1, 8)
        own = [x[:, sharding.positions(comm.rank)] for x in (q, k, v)]
        distributed.attention(*own, sharding, comm, dropout=0.1, seed=1)

    with pytest.raises(ValueError, match="sharding has tile=16: dropout needs a multiple of 32"):
        run(rank, 2, timeout=20)


def test_heads_are_not_split_with_a_mask_of_each():
    mask = masks.per_head([masks.causal(N), masks.dense(N)])
    with pytest.raises(ValueError, match="does not run with a mask that differs by batch or head"):
        alone(mask=mask, split="heads")


def test_dout_of_any_strides():
    q, k, v, _ = make_qkv(1, N, N, 2, 1, 8)
    (comm,) = run(lambda comm: comm, 1)
    last = Sharding.of(MASK, 1), comm
    out, lse = distributed.attention(q, k, v, *last, return_lse=True)
    ones = np.ones_like(out), np.broadcast_to(np.float32(1), out.shape)
    one, other = (distributed.attention_backward(dout, q, k, v, out, lse, *last) for dout in ones)
    assert all(map(np.array_equal, one, other))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda comm: MASK, TypeError, "sharding must be a Sharding, got"),
        (lambda comm: Sharding.of(MASK, 2).positions(2), ValueError, "rank must be from 0 to 1"),
        (lambda comm: Sharding.of(MASK, 2).positions(-1), ValueError, "rank must be from 0 to 1"),
        (lambda comm: Sharding.of(MASK, 2).positions(None), TypeError, "rank must be an integer"),
        (lambda comm: run(print, -1), ValueError, "ranks must be at least 1, got -1"),
    ],
)
def test_what_is_no_sharding_rank_or_number_of_ranks(call, error, match):
    q, k, v, _ = make_qkv(1, N, N, 2, 1, 8)
    (comm,) = run(lambda comm: comm, 1)
    with pytest.raises(error, match=match):
        distributed.attention(q, k, v, call(comm), comm)


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
def test_results_of_another_shape_are_refused(name):
    """Before the backward pass sends anything."""
    q, k, v, dout = make_qkv(1, N, N, 2, 1, 8)
    (comm,) = run(lambda comm: comm, 1)
    last = Sharding.of(MASK, 1), comm
    out, lse = distributed.attention(q, k, v, *last, return_lse=True)
    given = {"dout": dout, "out": out, "lse": lse, "dlse": np.zeros_like(lse)}
    given[name] = given[name][:, :1]
    *given, dlse = given.values()
    with pytest.raises(ValueError, match=f"{name} must have shape"):
        distributed.attention_backward(given[0], q, k, v, *given[1:], *last, dlse=dlse)


def test_arrays_of_another_length_are_refused():
    sharding = Sharding.of(MASK, 1, 32)
    x = np.zeros((1, N - 1, 4))
    with pytest.raises(ValueError, match=r"x must have 100 tokens along axis 1, got shape"):
        distributed.scatter(x, sharding, 0)
    with pytest.raises(ValueError, match="axis must be an axis of x, which has 3, got 3"):
        distributed.scatter(x, sharding, 0, axis=3)
    with pytest.raises(TypeError, match="axis must be an integer, got 'tokens'"):
        distributed.scatter(x, sharding, 0, axis="tokens")
    with pytest.raises(ValueError, match="of must be 'queries' or 'keys', got 'rows'"):
        sharding.positions(0, "rows")
    with pytest.raises(ValueError, match=r"x must have 100 tokens along axis 1, got shape"):
        run(lambda comm: distributed.gather(x, sharding, comm), 1)


def test_what_is_no_sharding_and_no_cost_is_named():
    x = np.zeros((1, N))
    with pytest.raises(TypeError, match="sharding must be a Sharding, got NoneType"):
        distributed.scatter(x, None, 0)
    with pytest.raises(TypeError, match="sharding must be a Sharding, got NoneType"):
        run(lambda comm: distributed.gather(x, None, comm), 1)
    with pytest.raises(TypeError, match="key_cost must be a number, got None"):
        Sharding.of(MASK, 1, 32, key_cost=None)


@pytest.mark.parametrize("dtype", [complex, object, "U3"])
def test_arrays_that_cannot_be_sent_are_refused(dtype):
    sharding, x = Sharding.of(MASK, 1, 32), np.zeros((1, N), dtype)
    expected = f"x must have elements of 1, 2, 4 or 8 bytes, got dtype {x.dtype}"
    with pytest.raises(TypeError, match=expected):
        distributed.scatter(x, sharding, 0)
    with pytest.raises(TypeError, match=expected):
        run(lambda comm: distributed.gather(x, sharding, comm), 1)


EQUAL = masks.dense(96)
GATHERED = {
    "axis": {"axis": 1},
    "of": {"of": "keys"},
    "dtype": {"x": np.zeros((32, 32), np.float32)},
    "shape besides": {"x": np.zeros((32, 1))},
    "sharding": {"sharding": Sharding.of(masks.window(96, left=94), RANKS, 32)},
}


def gathered(comm, fact):
    given = {"x": np.zeros((32, 32)), "sharding": Sharding.of(EQUAL, RANKS, 32), "axis": 0}
    if comm.rank == 1:
        given |= GATHERED[fact]
    try:
        distributed.gather(comm=comm, **given)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("fact", GATHERED)
def test_ranks_gather_what_is_alike(fact):
    for text in run(gathered, RANKS, fact, timeout=30):
        assert text.startswith(f"{fact} differs between ranks")


def test_ranks_agree_on_the_parameters_of_a_score():
    """Arrays and all digits of numbers, which no name has."""
    q, sharding = np.ones((2, 32, 4, 8), np.float32), Sharding.of(masks.causal(64), 2, 32)

    def note(score):
        options = RankOptions(None, score, 0.0, 1, "ranks", "cpu")
        return RankPlan(q, q, q, sharding, 0, options).note(None)

    slopes, table = np.arange(1.0, 5), np.ones((4, 5))
    made = [scores.softcap(2.0), scores.softcap(2.0 + 1e-9), scores.alibi(slopes)]
    made += [scores.alibi(slopes[::-1]), scores.relative(table), scores.relative(2 * table)]
    notes = [note(score) for score in made]
    assert len(set(notes)) == len(made)
    assert note(scores.alibi(slopes.copy())) == notes[2]
