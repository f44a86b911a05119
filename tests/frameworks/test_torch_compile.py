"""One graph, torch.compile(fullgraph=True): what else goes into it, and what it looks at again."""

import functools
import gc

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from tensors import (
    DEVICE,
    as_numpy,
    assert_close,
    assert_same_bits,
    decoded_by_core,
    of_core,
    qkv,
    sdpa,
)
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import masks
import nbflash
from nbflash import torch as nt
from nbflash.distributed import Sharding
from nbflash.torch import distributed as over_ranks
from nbflash.torch import handles, operators
from nbflash.torch.handles import handle_of
from nbflash.torch.late_masks import Documents

OPS = torch.ops.nbflash


@pytest.fixture(autouse=True)
def compiles_anew():
    torch.compiler.reset()


def compiled(function, **options):
    """The function in one graph, and a counter of its compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def assert_as_eager(function, given, learned, dout):
    """A compiled function gives the results and gradients of the function itself."""
    results = [f(*given) for f in (compiled(function)[0], function)]
    assert_close(*results)
    got, want = (torch.autograd.grad(out, learned, dout) for out in results)
    assert_close(got, want)


STARTS = [[0, 10, 40], [0, 25, 40], [0, 0, 39, 40]]
KINDS = {"list": list, "int32": lambda x: torch.tensor(x, dtype=torch.int32), "numpy": np.array}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_sequences_are_read_when_a_graph_runs(kind):
    q, k, v, dout = qkv(1, 40, 40)

    def layer(q, k, v, starts):
        out = nt.varlen_attention(q[0], k[0], v[0], starts, causal=True, return_lse=True)
        return [x[None] for x in out]

    run, counter = compiled(layer)
    for starts in STARTS:
        out, lse = run(q, k, v, kind(starts))
        got = out, lse, *torch.autograd.grad(out, (q, k, v), dout)
        mask = masks.documents_from_cu_seqlens(starts, causal=True)
        assert_same_bits(got, of_core(q, k, v, dout, mask))
    assert counter.frame_count == (3 if kind is list else 2)  # by the number of sequences


def test_offsets_and_seeds_are_in_host_memory_under_a_default_device():
    q, k, v, _ = (x[0] for x in qkv(1, 40, 40))
    run, _ = compiled(lambda *x: nt.varlen_attention(*x, [0, 10, 40], dropout=0.5, seed=3))
    want = run(q, k, v)
    with torch.device("meta"):
        assert torch.equal(run(q, k, v), want)


def test_a_mask_that_is_made_inside_breaks_the_graph():
    def layer(q, k, v):
        return nt.attention(2 * q, k, v, masks.window(q.shape[1], left=5, right=0))

    run = torch.compile(layer, backend="aot_eager")
    for n in (40, 33):
        q, k, v, dout = qkv(1, n, n)
        got, want = (
            (out, *torch.autograd.grad(out, (q, k, v), dout))
            for out in (run(q, k, v), layer(q, k, v))
        )
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    with pytest.raises(TorchDynamoException, match="marked as skipped"):
        compiled(layer)[0](q, k, v)


def test_sequences_of_any_length_by_one_graph():
    run, counter = compiled(nt.varlen_attention, dynamic=True)
    counts = []
    for n in (40, 33, 70):
        q, k, v, dout = qkv(1, n, n + 5)
        starts, of_keys = torch.tensor([0, n // 2, n]), torch.tensor([0, 3, n + 5])
        out = run(q[0], k[0], v[0], starts, of_keys)
        mask = masks.documents_from_cu_seqlens(starts.tolist(), of_keys.tolist())
        want = of_core(q, k, v, dout, mask)
        got = torch.autograd.grad(out, (q, k, v), dout[0])
        for a, b in zip((out[None], *got), (want[0], *want[2:]), strict=True):
            assert np.array_equal(as_numpy(a), b)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


def test_sequences_with_a_learned_score_and_dropout():
    q, k, v, dout = qkv(1, 40, 40)
    table = torch.randn(4, 9, dtype=q.dtype, requires_grad=True)

    def layer(q, k, v, table, starts):
        options = {"score": nt.scores.relative(table), "dropout": 0.25, "seed": 3}
        return nt.varlen_attention(q[0], k[0], v[0], starts, **options)

    learned = q, k, v, table
    assert_as_eager(layer, (*learned, torch.tensor(STARTS[0])), learned, dout[0])


SLOPES = [0.5, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize("inside", [True, False])
def test_constant_scores(inside):
    """Besides a learned one; those of nbflash.scores are made outside."""
    q, k, v, dout = qkv()
    bias = torch.randn(1, 4, 33, 33, dtype=q.dtype, requires_grad=True)
    own = nbflash.scores.softcap(5.0), nbflash.scores.alibi(SLOPES), nbflash.scores.alibi(0.5)
    made = nt.scores.compose(*own, nt.scores.bias(bias))

    def layer(q, k, v):
        if not inside:
            return nt.attention(q, k, v, score=made)
        parts = nt.scores.softcap(5.0), nt.scores.alibi(SLOPES), nt.scores.alibi(0.5)
        return nt.attention(q, k, v, score=nt.scores.compose(*parts, nt.scores.bias(bias)))

    assert_as_eager(layer, (q, k, v), (q, k, v, bias), dout)
    assert torch.equal(layer(q, k, v), nt.attention(q, k, v, score=made))


def test_a_score_that_changes():
    q, k, v, _ = qkv()
    run, _ = compiled(lambda score: nt.attention(q, k, v, score=score))
    for score in (nbflash.scores.softcap(5.0), nbflash.scores.softcap(2.0), nt.scores.alibi(0.5)):
        assert torch.equal(run(score), nt.attention(q, k, v, score=score))


def test_operators_of_late_masks_pass_opcheck():
    q, k, v, dout = qkv(1, 9, 9, 2, 1, 8)
    table = torch.randn(2, 5, dtype=q.dtype, requires_grad=True)
    score = nt.scores.relative(table)
    handle = handle_of(Documents(True), False, None, None, score.stages, 0.0, False, "auto")
    given = q, k, v, [table, *2 * [torch.tensor([0, 4, 9])]], None, handle
    torch.library.opcheck(OPS.late_attention.default, given)
    out, lse = OPS.late_attention.default(*given)
    tensors = [x.detach() for x in (dout, q, k, v, out, lse)]
    given = *tensors, None, [x.detach() for x in given[3]], None, handle
    torch.library.opcheck(OPS.late_attention_backward.default, given)
    torch.library.opcheck(OPS.late_score_backward.default, given)
    assert torch.Tag.cudagraph_unsafe in OPS.late_attention.default.tags


def test_operators_of_a_graph_with_late_masks():
    """Those that no CUDA graph records, backward too: their masks are read when they run."""
    q, k, v, dout = qkv(1, 9, 9, 2, 1, 8)
    table = torch.randn(2, 5, dtype=q.dtype, requires_grad=True)
    names = []

    def keep(graph, _):
        names.append({str(x.target) for x in graph.graph.nodes if "nbflash" in str(x.target)})
        return make_boxed_func(graph.forward)

    def layer(q, k, v, starts):
        score = nt.scores.relative(table)
        return nt.varlen_attention(q[0], k[0], v[0], starts, causal=True, score=score)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    out = torch.compile(layer, fullgraph=True, backend=backend)(q, k, v, torch.tensor([0, 4, 9]))
    out.backward(dout[0])
    forward, backward = names
    assert forward == {"nbflash.late_attention.default"}
    assert backward == {
        "nbflash.late_attention_backward.default",
        "nbflash.late_score_backward.default",
    }


def test_a_graph_keeps_what_its_number_stands_for():
    q, k, v, _ = (x.detach() for x in qkv())
    run, _ = compiled(lambda q: nt.attention(q, k, v, causal=True, scale=0.3))
    want = run(q)
    handles._recent.clear()
    gc.collect()
    assert torch.equal(run(q), want)


def test_lengths_that_change():
    run, counter = compiled(lambda q, k, v: nt.attention(q, k, v, causal=True, dropout=0.0))
    for n in (33, 40, 7, 90):
        q, k, v, _ = qkv(1, n, n)
        assert torch.equal(run(q, k, v), nt.attention(q, k, v, causal=True))
    assert counter.frame_count == 2  # of one length, and of any


def test_numbers_that_change():
    q, k, v, _ = qkv()

    def layer(q, k, v, seed, scale, left):
        window = left, 0
        return nt.attention(q, k, v, dropout=0.5, seed=seed, scale=scale, window=window)

    run, _ = compiled(layer)
    for given in [
        (1, 0.5, 3),
        (2, 0.25, 4),
        ((2**64 - 1, 5), 1.0, 5),
        ([6, 7], 1.0, 5),
        ([8, 9], 1.0, 5),
        (torch.tensor([3, 4]), 1, 2),
    ]:
        assert torch.equal(run(q, k, v, *given), layer(q, k, v, *given))


def test_seed_is_drawn_in_every_call():
    q, k, v, _ = qkv()
    run, counter = compiled(lambda q, k, v: nt.attention(q, k, v, dropout=0.5))
    torch.manual_seed(3)
    first, second = run(q, k, v), run(q, k, v)
    torch.manual_seed(3)
    assert torch.equal(run(q, k, v), first)
    assert not torch.equal(first, second)
    assert counter.frame_count == 1


def test_decodes_from_a_cache_that_a_graph_fills():
    q, k, v, _ = (x.detach() for x in qkv(2, 20, 20, dtype="float32"))
    caches = [torch.full_like(x, torch.nan) for x in (k, v)]

    def step(token, lengths, at):
        for cache, x in zip(caches, (k, v), strict=True):
            cache.index_copy_(1, at, x.index_select(1, at))
        return nt.decode(q.index_select(1, at), *caches, lengths, return_lse=True)

    run, counter = compiled(step)
    for token in range(5):
        lengths = torch.full((2,), token + 1, dtype=torch.int32)
        out, lse = run(token, lengths, torch.tensor([token]))
        want = decoded_by_core(q[:, token : token + 1], k, v, lengths)
        for a, b in zip((out, lse), want, strict=True):
            assert np.array_equal(as_numpy(a), b)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("inside", [True, False])
def test_checkpointed(inside):
    """A layer that draws its dropout's seed: a graph that checkpoints, and a checkpointed graph.

    A graph that checkpoints draws from numbers of its own on a GPU, whatever the seed of torch.
    """
    q, k, v, dout = qkv()

    def layer(q, k, v):
        return nt.attention(torch.sin(q), k, v, causal=True, dropout=0.5)

    def run(q, k, v):
        return checkpoint(layer if inside else graph, q, k, v, use_reentrant=False)

    graph, _ = compiled(run if inside else layer)
    results = []
    for function in (graph if inside else run, layer):
        torch.manual_seed(7)
        out = function(q, k, v)
        torch.rand(3)
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
        out, *_, dv = results[-1]
        assert_close((dv * v).sum(), (dout * out).sum())  # linear, with the same scores dropped
    if DEVICE == "cpu" or not inside:
        assert_close(*results)


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_policy_saves_attention(in_graph, monkeypatch):
    """Selective checkpointing knows the operator by its name, in eager mode too."""
    q, k, v, dout = qkv()
    calls, forward = [], operators._forward
    monkeypatch.setattr(operators, "_forward", lambda *x, **y: calls.append(x) or forward(*x, **y))

    def policy(context, operator, *args, **kwargs):
        saved = operator == OPS.attention.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(q, k, v):
        return torch.sin(nt.attention(2 * q, k, v, causal=True))

    def run(q, k, v):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(layer, q, k, v, use_reentrant=False, context_fn=contexts)

    run = compiled(run)[0] if in_graph else run
    got = torch.autograd.grad(run(q, k, v), (q, k, v), dout)
    assert len(calls) == 1
    assert_close(got, torch.autograd.grad(layer(q, k, v), (q, k, v), dout))


def test_sinks_and_merged_parts():
    q, k, v, dout = qkv()
    sink = torch.randn(4, dtype=q.dtype, requires_grad=True)

    def layer(q, k, v, sink):
        parts = [
            nt.attention(q, k[:, part], v[:, part], return_lse=True)
            for part in (slice(20), slice(20, 33))
        ]
        return nt.merge_sink(*nt.merge(*parts[0], *parts[1]), sink)[0]

    assert_as_eager(layer, (q, k, v, sink), (q, k, v, sink), dout)
    want = sdpa(q, k, v)
    assert_close(layer(q, k, v, sink), nt.merge_sink(*want, sink)[0])


def test_gradients_of_any_strides():
    q, k, v, dout = qkv()
    run, _ = compiled(lambda q, k, v: nt.attention(q, k, v, causal=True))
    expanded = torch.tensor(0.5, dtype=q.dtype).expand_as(dout)
    for given in (expanded, dout.transpose(1, 3).contiguous().transpose(1, 3)):
        got = torch.autograd.grad(run(q, k, v), (q, k, v), given)
        want = of_core(q, k, v, given.contiguous(), causal=True)[2:]
        assert all(np.array_equal(as_numpy(a), b) for a, b in zip(got, want, strict=True))


def test_of_functions():
    q, k, v, _ = (x.detach() for x in qkv())
    gradient = torch.func.grad(lambda q: nt.attention(q, k, v).sin().sum())
    assert torch.equal(compiled(gradient)[0](q), gradient(q))


def test_vmap_is_refused():
    q, k, v, _ = (x.detach() for x in qkv())
    mapped = torch.func.vmap(lambda q: nt.attention(q, k, v))
    with pytest.raises(TorchDynamoException, match="fold the mapped axis into the batch"):
        compiled(mapped)[0](q[None])


def test_second_derivatives_are_refused():
    q, k, v, _ = qkv()
    out = compiled(nt.attention)[0](q, k, v)
    (dq,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        dq.sum().backward()


def decoded(q, k, v, mask):
    return nt.decode(q, k, v, torch.full((2,), 33, dtype=torch.int32), mask=mask)


@pytest.mark.parametrize(("run", "queries"), [(nt.attention, 33), (decoded, 2)])
def test_block_maps_stay_outside(run, queries):
    """Else their contents would be those of the first call."""
    q, k, v = (x.detach() for x in qkv()[:3])
    q = q[:, :queries]
    indices = torch.zeros(1, 1, -(-queries // 16), 1, dtype=torch.int32)
    chosen = nbflash.BlockMap(indices, shape=(queries, 33), block=(16, 8))
    with pytest.raises(TorchDynamoException, match="make a mask of it outside"):
        compiled(lambda q, k, v: run(q, k, v, chosen))[0](q, k, v)
    broken = torch.compile(lambda q, k, v: run(q, k, v, chosen), backend="eager")
    for block in range(3):
        indices.fill_(block)
        assert torch.equal(broken(q, k, v), run(q, k, v, chosen))


def test_attention_over_ranks_is_between_graphs(tmp_path):
    q, k, v, dout = qkv(1)
    meeting = f"file://{tmp_path / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        comm, sharding = over_ranks.TorchCommunicator(), Sharding.of(masks.causal(33), 1, 8)
        run = torch.compile(
            lambda q, k, v: torch.sin(over_ranks.attention(2 * q, k, v, sharding, comm)),
            backend="aot_eager",
        )
        got = torch.autograd.grad(run(q, k, v), (q, k, v), dout)
        out = torch.sin(nt.attention(2 * q, k, v, causal=True))
        assert_close(got, torch.autograd.grad(out, (q, k, v), dout))
    finally:
        torch.distributed.destroy_process_group()
