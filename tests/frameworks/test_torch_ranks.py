"""nbflash.torch.distributed in one process: the arguments that it hands on, and its messages.

Results of several processes are those of test_distributed.py.
"""

import weakref
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensors import OPTIONS, as_numpy, assert_same_bits, of_core, of_torch, only_rank, qkv

import masks
from nbflash import distributed
from nbflash.distributed import Sharding
from nbflash.torch import distributed as over_ranks

RANK_OPTIONS = [x for x in OPTIONS if x not in ("causal", "blocks", "window", "open window")]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("option", RANK_OPTIONS)
def test_arguments_of_ranks(option, layout):
    """Of one rank, which has the bits of nbflash.distributed; the results used apart."""
    given, options = qkv(dtype="float32"), dict(OPTIONS[option])
    mask = options.pop("mask", masks.causal(33))
    if option == "dropout":
        options["seed"] = tuple(options["seed"])
    sharding, comm = Sharding.of(mask, 1, 64), only_rank()

    def call(q, k, v):
        if layout == "bhsd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        how = options | {"layout": layout, "return_lse": True}
        out, lse = over_ranks.attention(q, k, v, sharding, comm, **how)
        return out.transpose(1, 2) if layout == "bhsd" else out, lse

    dlse = torch.randn(2, 4, 33)
    want = of_core(*given, mask, dlse=dlse, **options)
    assert_same_bits(of_torch(call, *given, dlse), want)
    assert_same_bits(of_torch(call, *given), of_core(*given, mask, **options))
    lse = call(*given[:3])[1]
    got = torch.autograd.grad(lse, given[:3], dlse)
    zero = torch.zeros_like(given[3])
    for a, b in zip(got, of_core(*given[:3], zero, mask, dlse=dlse, **options)[2:], strict=True):
        assert np.array_equal(as_numpy(a), b)


def test_how_ranks_add_up_gradients_is_asked_for(monkeypatch):
    q, k, v, _ = qkv(1, 9, 9, dtype="bfloat16")
    seen, backward = [], distributed.attention_backward

    def noted(*given, **options):
        seen.append(options)
        return backward(*given, **options)

    monkeypatch.setattr(distributed, "attention_backward", noted)
    sharding = Sharding.of(masks.dense(9, 9), 1, 16)
    for how in ({}, {"reduce": "input"}, {"stages": 1, "split": "heads"}):
        over_ranks.attention(q, k, v, sharding, only_rank(), **how).sum().backward()
        assert {"reduce": "wide"} | how == {x: seen[-1][x] for x in ("reduce", *how)}


def test_refused():
    q, k, v, _ = (x.detach() for x in qkv(1, 9, 9))
    given = q, k, v, Sharding.of(masks.dense(9, 9), 1, 16), only_rank()
    for options, error, message in (
        ({"return_lse": 1}, TypeError, "return_lse must be True or False"),
        ({"layout": "bnsd"}, ValueError, "layout must be one of bshd, bhsd, got 'bnsd'"),
        ({"deterministic": 1}, TypeError, "deterministic must be True or False"),
    ):
        with pytest.raises(error, match=message):
            over_ranks.attention(*given, **options)
    with pytest.raises(ValueError, match="k must have 4 axes"):
        over_ranks.attention(q, k[0], *given[2:])


def test_under_autocast_and_of_any_strides():
    q, k, v, dout = qkv(1, dtype="float32")
    sharding = Sharding.of(masks.causal(33), 1, 64)
    apart = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = over_ranks.attention(*apart, sharding, only_rank())
    halves = [x.detach().bfloat16() for x in (q, k, v, dout)]
    want = of_core(*halves, masks.causal(33))
    assert np.array_equal(as_numpy(out), want[0])
    strided = halves[3].transpose(1, 3).contiguous().transpose(1, 3)
    got = torch.autograd.grad(out, (q, k, v), strided)
    for a, b in zip(got, want[2:], strict=True):
        assert np.array_equal(as_numpy(a), b.astype(np.float32))


def test_second_derivatives_are_refused():
    q, k, v, _ = qkv(1, 9, 9)
    out = over_ranks.attention(q, k, v, Sharding.of(masks.dense(9, 9), 1, 16), only_rank())
    (dq,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


class Work:
    def __init__(self, error=None):
        self.waited, self.error = 0, error

    def wait(self):
        self.waited += 1
        if self.error:
            raise self.error


@pytest.fixture
def comm(monkeypatch):
    """Rank 1 of the processes 4 and 7, whose messages are noted."""
    made = object.__new__(over_ranks.TorchCommunicator)
    made._ranks, made.rank, made.size, made._number = [4, 7], 1, 2, 0
    made._group, made._host, made.timeout, made.sent = "group", "host", 5.0, []

    def batch(operations):
        made.sent.append(operations)
        made.works = [Work() for _ in operations]
        return made.works

    monkeypatch.setattr(dist, "P2POp", lambda *given: given)
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    return made


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_messages(backend, comm):
    """Receives come first, to the numbers that processes have outside of the group."""
    comm._backend = backend
    arrays = [np.arange(8, dtype="float32").reshape(2, 4) for _ in range(5)]
    for number in (1, 2):
        exchange = comm.exchange({0: (arrays[0], arrays[1])}, {0: arrays[2], 1: arrays[3]})
        tag = number if backend == "gloo" else 0
        calls = [(dist.irecv, 4, 2), (dist.irecv, 7, 3), (dist.isend, 4, 0), (dist.isend, 4, 1)]
        for (call, x, peer, group, sent_tag), want in zip(comm.sent[-1], calls, strict=True):
            assert (call, peer) == want[:2]
            assert (group, sent_tag) == ("group", tag)
            assert (x.dtype, x.numel()) == (torch.uint8, 32)
            assert x.data_ptr() == arrays[want[2]].ctypes.data
        assert [work.waited for work in comm.works] == [0] * 4
        exchange.wait()
        exchange.wait()
        assert [work.waited for work in comm.works] == [1] * 4
    held = weakref.ref(arrays[4])
    exchange = comm.exchange({0: arrays[4]}, {})
    del arrays[4], x
    comm.sent[-1] = None
    assert held() is not None
    exchange.wait()
    assert held() is None
    sent = len(comm.sent)
    comm.exchange({}, {}).wait()
    assert len(comm.sent) == sent
    assert comm._number == 4


def test_a_rank_that_does_not_answer(comm):
    comm._backend = "gloo"
    exchange = comm.exchange({0: np.zeros(1)}, {})
    comm.works[0].error = KeyError("another error")
    with pytest.raises(KeyError):
        exchange.wait()
    comm.works[0].error = RuntimeError("late")
    with pytest.raises(TimeoutError, match=r"rank 1 got no answer .* within 5\.0 s: late"):
        exchange.wait()


@pytest.mark.parametrize("differs", [False, True])
def test_notes_travel_where_they_differ(differs, comm, monkeypatch):
    """What all ranks have said, in their order; the text of equal ones stays."""
    notes = ["other" if differs else "note", "note"]

    def gather(found, own, group):
        assert group == "host"
        for x, note in zip(found, notes, strict=True):
            x.copy_(torch.from_numpy(over_ranks.summary(note).copy()))
        assert torch.equal(own, found[1])

    def gather_texts(found, own, group):
        assert (own, group, differs) == ("note", "host", True)
        found[:] = notes

    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(dist, "all_gather_object", gather_texts)
    assert comm.agree("note") == notes


@pytest.mark.parametrize("part", [False, True])
def test_groups_of_a_communicator(part, monkeypatch):
    """Of the backend, and of gloo; those of a part of all processes wait for no others."""
    whole, made = list(range(300)), []
    given = "part" if part else None
    members = whole[1:] if part else whole
    by_group = {"part": whole[1:], "world": whole, None: whole}
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="world"))
    monkeypatch.setattr(dist, "get_process_group_ranks", by_group.get)
    monkeypatch.setattr(dist, "get_rank", {"part": 298, None: 299}.get)
    monkeypatch.setattr(dist, "get_world_size", lambda: 300)
    monkeypatch.setattr(dist, "get_backend", {"part": "nccl", None: "gloo"}.get)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **how: made.append((ranks, how)) or how)
    comm = over_ranks.TorchCommunicator(given, 7.5)
    options = {"timeout": timedelta(seconds=7.5), "use_local_synchronization": part}
    own = options | {"backend": "nccl" if part else "gloo"}
    assert made == [(members, own), (members, options | {"backend": "gloo"})]
    assert (comm._group, comm._host) == tuple(how for _, how in made)
    assert (comm.rank, comm.size) == (len(members) - 1, len(members))
    assert (comm.timeout, comm._backend, comm._ranks) == (7.5, own["backend"], members)
    assert over_ranks.TorchCommunicator(given).timeout == 300.0
