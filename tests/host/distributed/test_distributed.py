"""Attention over ranks: the result of one process, for every mask; ranks are threads."""

import ml_dtypes
import numpy as np
import pytest

import masks
import nbflash
from nbflash import distributed, reference, scores
from nbflash.distributed import Sharding, gather, rank_plan, run, scatter
from nbflash.distributed.communicator import messages
from nbflash.distributed.stages import groups, part_count, stages_of
from nbflash.testing import (
    assert_within_reference,
    low_precision,
    low_precision_backward,
    make_qkv,
    poisoned,
)

TILE = 32
RESULTS = ("out", "lse", "dq", "dk", "dv")


def local(x, sharding, comm, of="queries", axis=1):
    return scatter(x, sharding, comm.rank, axis=axis, of=of)


def on_rank(comm, sharding, inputs, options, backward):
    """out, lse, dq, dk and dv of a rank."""
    q, k, v, dout, dlse = inputs
    given = local(q, sharding, comm), *(local(x, sharding, comm, "keys") for x in (k, v))
    own = local(dout, sharding, comm), local(dlse, sharding, comm, axis=2)
    out, lse = distributed.attention(*given, sharding, comm, return_lse=True, **options)
    gradients = distributed.attention_backward(
        own[0], *given, out, lse, sharding, comm, dlse=own[1], **options, **backward
    )
    return out, lse, *gradients


def over_ranks(sharding, inputs, options, backward=None):
    """What all ranks return together, in the order of the sequence."""
    parts = run(on_rank, sharding.ranks, sharding, inputs, options, backward or {}, timeout=30)
    whole = []
    for i, name in enumerate(RESULTS):
        of, axis = ("keys" if name in ("dk", "dv") else "queries"), 1 + (name == "lse")
        like = inputs[4] if name == "lse" else inputs["qkv".find(name[-1])] if i > 1 else inputs[0]
        x = poisoned(like.shape, parts[0][i].dtype)
        for rank, part in enumerate(parts):
            places = sharding.positions(rank, of)
            x[(slice(None),) * axis + (places,)] = part[i]
        whole.append(x)
    return whole


def make_inputs(batch, nq, nk, heads, heads_kv, d, dtype=np.float32):
    q, k, v, dout = make_qkv(batch, nq, nk, heads, heads_kv, d, dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    dlse = np.random.default_rng(1).standard_normal((batch, heads, nq)).astype(wide)
    return q, k, v, dout, dlse


def check(sharding, inputs, options=None, backward=None, **how):
    options = options or {}
    q, k, v, dout, dlse = inputs
    got = over_ranks(sharding, inputs, options | how, backward)
    how = {"mask": sharding.mask, **options}
    ref = (
        *reference.attention(q, k, v, **how),
        *reference.attention_backward(dout, q, k, v, dlse=dlse, **how),
    )
    low = *low_precision(q, k, v, **how), *low_precision_backward(dout, q, k, v, dlse=dlse, **how)
    for name, *each in zip(RESULTS, got, ref, low, strict=True):
        assert_within_reference(*each, name)
    return got


def per_head(n):
    window, random = masks.window(n, left=40, right=3), masks.random(n, 16, 0.2, seed=3)
    return masks.per_head([masks.causal(n), window, random, ~masks.dense(n)])


CASES = {  # mask, ranks
    "causal": (masks.causal(203), 4),
    "one-rank": (masks.causal(70), 1),
    "documents": (masks.documents([100, 0, 33, 70, 1], causal=True), 3),
    "scattered": (masks.documents([150, 12, 350], causal=True), 4),
    "window": (masks.window(200, left=40, right=0), 4),
    "butterfly": (masks.butterfly(256, 16), 4),
    "strided": (masks.strided(200, 1, 7, 3, causal=True), 2),
    "function": (masks.from_function(lambda q, kv: (q * kv) % 3 == 1, 130), 2),
    "per-head": (per_head(150), 4),
    "padding": (masks.padding([90, 0], 120), 3),
    "more-ranks-than-chunks": (masks.causal(70), 5),
    "fewer-queries": (masks.causal(65, 290), 4),
    "more-queries": (masks.causal(290, 65), 4),
    "empty": (~masks.dense(80), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_result_is_that_of_one_process(name):
    mask, ranks = CASES[name]
    sharding = Sharding.of(mask, ranks, TILE)
    inputs = make_inputs(mask.batch or 1, *mask.shape, 4, 2, 16)
    check(sharding, inputs, {"scale": 0.3}, stages=4)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("per-head", "padding")])
def test_heads_one_by_one(name):
    """Three exchanges forward and four backward; two sequences."""
    mask, ranks = CASES[name]
    inputs = make_inputs(2, *mask.shape, 6, 3, 16)
    check(Sharding.of(mask, ranks, TILE), inputs, {"scale": 0.3}, stages=3, split="heads")


@pytest.mark.parametrize("split", ["ranks", "heads"])
def test_sums_of_parts_in_bfloat16_are_rounded_once(split):
    """256 and, of two other ranks, 1."""
    sharding = Sharding.of(masks.dense(96, 1), 3, TILE)
    *arrays, dout, dlse = make_inputs(1, 96, 1, 2, 2, 8, ml_dtypes.bfloat16)
    dout[...] = 0
    for rank in range(3):
        own = sharding.positions(rank, "keys").size
        dout[:, sharding.positions(rank, "queries")[0]] = 256 if own else 1
    how = {"stages": 1, "split": split}, {"reduce": "input"}
    assert (over_ranks(sharding, (*arrays, dout, dlse), *how)[4] == 258).all()


@pytest.mark.parametrize("stages", [1, 3, 9])
def test_any_number_of_stages_and_the_same_bits_every_time(stages):
    sharding, inputs = Sharding.of(masks.causal(200), 5, TILE), make_inputs(1, 200, 200, 2, 1, 8)
    how = {"stages": stages}, {"deterministic": True}
    first, again = (over_ranks(sharding, inputs, *how) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(first, over_ranks(sharding, inputs, {}), strict=True):
        np.testing.assert_allclose(a, b, atol=4 * np.abs(b[np.isfinite(b)]).max() * 2**-20)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "reduce"),
    [(ml_dtypes.bfloat16, "wide"), (ml_dtypes.bfloat16, "input"), (np.float64, "wide")],
    ids=["bfloat16", "bfloat16-reduce-input", "float64"],
)
def test_dtypes(dtype, reduce, stages):
    """One merge in the dtype of the results, or two in float32; or heads one by one."""
    sharding, reduced = Sharding.of(masks.dense(140), 3, TILE), {"reduce": reduce}
    for split, heads in (("ranks", (2, 1)), ("heads", (4, 2))):
        inputs = make_inputs(1, 140, 140, *heads, 16, dtype)
        check(sharding, inputs, None, reduced, stages=stages, split=split)


def test_stages_by_what_arrives():
    """One where there is little work; more where keys, or their gradients, take longer than own."""
    counts = {
        "dense": (masks.dense(32768), 4, 4, 1),
        "more heads of K and V": (masks.dense(1 << 19), 64, 1, 4),
        "more ranks": (masks.dense(1 << 19), 64, 4, 4),
        "gradients on their way": (masks.dense(1 << 19), 4, 4, 2),
        "two ranks": (masks.dense(65536), 2, 1, 1),
        "window": (masks.window(65536, left=1023, right=0), 8, 4, 1),
        "butterfly": (masks.butterfly(1 << 16, 128), 8, 4, 1),
        "alone": (masks.dense(1024), 1, 4, 1),
        "nothing": (~masks.dense(1024), 2, 4, 1),
    }
    for name, (mask, ranks, group, expected) in counts.items():
        sharding = Sharding.of(mask, ranks, 1024)
        assert part_count(sharding, 1, group, "ranks") == expected, name
        stages = stages_of(sharding, 0, expected)
        assert len(stages) == 1 + min(expected, ranks - 1), name


def test_slices_of_heads_by_what_arrives():
    """One where there is little work; as many as divide the heads where keys are many."""
    butterfly = Sharding.of(masks.butterfly(1 << 16, 128), 4, 128)
    assert part_count(butterfly, 4, 4, "heads") == 4
    assert part_count(butterfly, 6, 4, "heads") == 3
    assert part_count(butterfly, 1, 4, "heads") == 1
    assert part_count(Sharding.of(masks.causal(1024), 2, 128), 4, 4, "heads") == 1


def logged(sharding, inputs, how):
    """Of every rank, forward and backward: messages that each exchange sends, and begun ones."""

    def on_rank(comm):
        log = []

        class Logged:
            rank, size, agree = comm.rank, comm.size, comm.agree

            def exchange(self, sends, receives):
                log.append(("sent", sum(1 for _ in messages(sends))))
                return Watched(comm.exchange(sends, receives))

        class Watched:
            def __init__(self, exchange):
                self.wait = exchange.wait

            def begun(self):
                log.append("begun")

        own = [scatter(x, sharding, comm.rank) for x in inputs[:4]]
        results = distributed.attention(*own[:3], sharding, Logged(), return_lse=True, **how)
        forward = list(log)
        log.clear()
        distributed.attention_backward(own[3], *own[:3], *results, sharding, Logged(), **how)
        return forward, log

    return run(on_rank, sharding.ranks)


def test_keys_of_all_stages_are_on_their_way_from_the_start():
    """And messages begin before the kernels that follow: keys at once, gradients stage by stage."""
    inputs = make_inputs(1, 128, 128, 2, 1, 8)
    cast = [("sent", 2)] * 3 + ["begun"]
    for forward, backward in logged(Sharding.of(masks.dense(128), 4, TILE), inputs, {"stages": 3}):
        assert forward == cast
        assert backward == cast + [("sent", 2), "begun"] * 3


def test_a_slice_of_heads_is_on_its_way_before_the_one_before_is_computed():
    """With it go the gradients of the slice before that; what is left goes back at the end."""
    inputs, how = make_inputs(1, 128, 128, 6, 3, 8), {"split": "heads", "stages": 3}
    keys, both, gradients = ("sent", 2), ("sent", 4), ("sent", 2)
    for forward, backward in logged(Sharding.of(masks.dense(128), 2, TILE), inputs, how):
        assert forward == [keys, keys, "begun", keys, "begun"]
        assert backward == [keys, keys, "begun", both, "begun", gradients, "begun", gradients]


def test_dropout_drops_what_it_does_on_one_process():
    """Equal scores and unit matrices: the results are the elements of P, and of P transposed."""
    n, heads = 200, 2
    sharding = Sharding.of(masks.causal(n), 4, TILE)
    q = np.zeros((1, n, heads, n), np.float32)
    eye = np.broadcast_to(np.eye(n, dtype=np.float32)[:, None], q.shape)
    how = {"dropout": 0.3, "seed": (3, 5)}
    inputs = q, q, eye, eye, np.zeros((1, heads, n), np.float32)
    out, *_, dv = over_ranks(sharding, inputs, how)
    expected, lse = nbflash.attention(q, q, eye, sharding.mask, return_lse=True, **how)
    gradients = nbflash.attention_backward(eye, q, q, eye, expected, lse, sharding.mask, **how)
    np.testing.assert_array_equal(out != 0, expected != 0)
    np.testing.assert_array_equal(dv != 0, gradients[2] != 0)
    assert 0.2 < 1 - np.count_nonzero(out) / (heads * n * (n + 1) / 2) < 0.4


def test_scores_count_tokens_in_the_sequence():
    """A relative bias by distance, one by place, and softcap; through the backward pass."""
    n = 130
    score = scores.compose(
        scores.softcap(3.0),
        scores.alibi(np.array([0.1, 0.02])),
        scores.bias(np.random.default_rng(0).standard_normal((1, 2, n, n))),
    )
    sharding = Sharding.of(masks.causal(n), 2, TILE)
    check(sharding, make_inputs(1, n, n, 2, 1, 16), {"score": score})


def score_gradients(comm, sharding, inputs, score):
    q, k, v, dout, dlse = inputs
    given = local(q, sharding, comm), *(local(x, sharding, comm, "keys") for x in (k, v))
    out, lse = distributed.attention(*given, sharding, comm, score=score, return_lse=True)
    own = {"dlse": local(dlse, sharding, comm, axis=2), "score": score}
    dout = local(dout, sharding, comm)
    return distributed.score_backward(dout, *given, out, lse, sharding, comm, **own)


def test_gradients_of_a_score_are_summed_over_ranks():
    """Slopes, to which all ranks add, and a bias with an element for every score."""
    n, rng = 100, np.random.default_rng(0)
    bias = scores.bias(rng.standard_normal((1, 1, n, n)))
    score = scores.compose(scores.alibi(np.array([0.1, 0.02])), bias)
    sharding, inputs = (
        Sharding.of(masks.causal(n), 3, TILE),
        make_inputs(1, n, n, 2, 1, 8, np.float64),
    )
    q, k, v, dout, dlse = inputs
    how = {"score": score}
    out, lse = nbflash.attention(q, k, v, sharding.mask, return_lse=True, **how)
    expected = nbflash.score_backward(dout, q, k, v, out, lse, sharding.mask, dlse=dlse, **how)
    for gradients in run(score_gradients, 3, sharding, inputs, score, timeout=60):
        for got, one in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(got, one, atol=np.abs(one).max() * 2**-42)


def with_sink(comm, sharding, inputs, sink):
    """As a training step would: a sink behind attention, and its gradients."""
    q, k, v, dout, _ = inputs
    given = local(q, sharding, comm), *(local(x, sharding, comm, "keys") for x in (k, v))
    out, lse = distributed.attention(*given, sharding, comm, return_lse=True)
    whole, _ = nbflash.merge_sink(out, lse, sink)
    back = nbflash.merge_sink_backward(local(dout, sharding, comm), out, lse, sink)
    gradients = distributed.attention_backward(
        back[0], *given, out, lse, sharding, comm, dlse=back[1]
    )
    return gather(whole, sharding, comm), gather(gradients[0], sharding, comm), back[2]


def test_sinks_stand_behind_attention_as_on_one_process():
    n, sink = 100, np.array([0.3, -1.0], np.float32)
    sharding, inputs = Sharding.of(masks.causal(n), 3, TILE), make_inputs(1, n, n, 2, 1, 16)
    parts = run(with_sink, 3, sharding, inputs, sink)
    (out,), (dq,) = (
        [part[i] for part in run(with_sink, 1, Sharding.of(sharding.mask, 1, TILE), inputs, sink)]
        for i in range(2)
    )
    np.testing.assert_allclose(parts[0][0], out, atol=4 * np.abs(out).max() * 2**-23)
    np.testing.assert_allclose(parts[2][1], dq, atol=8 * np.abs(dq).max() * 2**-23)


def outputs(comm, sharding, q, k, v):
    given = local(q, sharding, comm), *(local(x, sharding, comm, "keys") for x in (k, v))
    return gather(distributed.attention(*given, sharding, comm), sharding, comm)


def test_a_document_that_changes_changes_its_own_outputs_alone():
    """On every rank, bit for bit: no mask is replaced by another."""
    lengths = [70, 33, 50, 97]
    sharding = Sharding.of(masks.documents(lengths, causal=True), 4, TILE)
    q, k, v, _ = make_qkv(1, 250, 250, 2, 1, 8)
    before, changed = run(outputs, 4, sharding, q, k, v), v.copy()
    changed[:, 103:153] += 1
    document = np.repeat(np.arange(4), lengths)
    for a, b in zip(before, run(outputs, 4, sharding, q, k, changed), strict=True):
        np.testing.assert_array_equal((a != b).any((0, 2, 3)), document == 2)


class Recording:
    """A communicator that writes down what goes where."""

    def __init__(self, comm):
        self.rank, self.size, self.agree, self._comm = comm.rank, comm.size, comm.agree, comm
        self.sent = []

    def exchange(self, sends, receives):
        self.sent += [(target, x.shape, x.dtype) for target, x in messages(sends)]
        return self._comm.exchange(sends, receives)


def recorded(comm, sharding, inputs, options=None, backward=None):
    comm = Recording(comm)
    on_rank(comm, sharding, inputs, options or {}, backward or {})
    return comm.sent


def test_only_what_the_mask_asks_for_travels():
    """Of a window the tiles before each rank's own, and back: K and V, 64 keys of 2 heads."""
    sharding = Sharding.of(masks.window(512, left=63, right=0), 4, TILE)
    sent = run(recorded, 4, sharding, make_inputs(1, 512, 512, 4, 2, 8))
    message = (1, 64, 2, 8), np.dtype(np.float32)
    there, back = ([2 * [(r + step, *message)] for r in range(4)] for step in (1, -1))
    twice = [2 * message for message in there]  # forward and backward
    assert sent == [twice[0], twice[1] + back[1], twice[2] + back[2], back[3]]
    assert sharding.traffic.sum() == 3 * 64
    whole = Sharding.of(masks.dense(512), 4, TILE).traffic
    assert (whole == 128 * (1 - np.eye(4))).all()


@pytest.mark.parametrize("split", ["ranks", "heads"])
@pytest.mark.parametrize(
    ("dtype", "reduce", "back"),
    [
        ("float16", "wide", "float32"),
        ("float16", "input", "float16"),
        ("float64", "wide", "float64"),
    ],
)
def test_gradients_of_keys_travel_wide_or_as_the_keys_do(dtype, reduce, back, split):
    inputs, how = make_inputs(1, 64, 64, 2, 1, 8, np.dtype(dtype)), {"split": split, "stages": 1}
    for sent in run(
        recorded, 2, Sharding.of(masks.dense(64), 2, TILE), inputs, how, {"reduce": reduce}
    ):
        assert [kind.name for *_, kind in sent] == [dtype] * 4 + [back] * 2


def test_neighbours_come_first():
    """On both sides, whatever the number of stages."""
    assert groups(6, 5) == [[1], [5], [2], [4], [3]]
    assert groups(5, 2) == [[1, 4], [2, 3]]
    assert groups(4, 9) == [[1], [3], [2]]


def test_a_warm_call_plans_nothing(monkeypatch):
    """Nor does it check what the plan of its rank fixes; another scale is another plan."""
    sharding, inputs = Sharding.of(masks.causal(140), 2, TILE), make_inputs(1, 140, 140, 2, 1, 16)
    first = over_ranks(sharding, inputs, {"scale": 0.3})
    planned = []
    for name in ("check_forward", "plan_of", "stages_of"):
        real = getattr(rank_plan, name)
        monkeypatch.setattr(
            rank_plan, name, lambda *args, f=real, n=name: (planned.append(n), f(*args))[1]
        )
    for a, b in zip(first, over_ranks(sharding, inputs, {"scale": 0.3}), strict=True):
        np.testing.assert_array_equal(a, b)
    assert planned == []
    over_ranks(sharding, inputs, {"scale": 0.4})
    assert planned.count("plan_of") == 4  # of two ranks, two stages
