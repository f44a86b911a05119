"""nbflash.torch.attention: the numbers of nbflash, for any strides, and gradients of everything."""

import itertools
import weakref

import pytest
import torch
from tensors import DEVICE, as_numpy, assert_close, assert_same_bits, of_core, of_torch, qkv, sdpa

import masks
import nbflash
from nbflash import torch as nt
from nbflash.testing import mask_gallery

MASKS = "dense", "butterfly-causal", "documents-causal", "padding", "per-head", "dead-first"


def with_lse(*mask, **options):
    return lambda q, k, v: nt.attention(q, k, v, *mask, return_lse=True, **options)


@pytest.mark.parametrize("name", MASKS)
def test_same_bits_as_numpy(name):
    q, k, v, dout = qkv(dtype="float32")
    mask = mask_gallery(33, batch=2, heads=4)[name]
    assert_same_bits(of_torch(with_lse(mask), q, k, v, dout), of_core(q, k, v, dout, mask))


def test_takes_a_block_map():
    q, k, v, dout = qkv(dtype="float32")
    indices = torch.randint(-1, 5, (2, 2, 3, 2))
    chosen = nbflash.BlockMap(indices, shape=(33, 33), block=(16, 8))
    expected = of_core(q, k, v, dout, chosen.to_mask(4))
    assert_same_bits(of_torch(with_lse(chosen), q, k, v, dout), expected)


# flash-attention's own grid, its corners.
SIZES = [(1, 1), (1, 65), (113, 203), (128, 217), (108, 256), (129, 129), (256, 113)]
GRID = list(itertools.product(("float16", "bfloat16", "float64"), SIZES))


@pytest.mark.parametrize(("dtype", "sizes"), GRID, ids=str)
def test_grid(dtype, sizes):
    heads_kv = {1: 1, 65: 4}.get(sizes[1], 2)
    q, k, v, dout = qkv(1, *sizes, 4, heads_kv, 40, dtype)
    options = {"causal": sizes[0] <= sizes[1], "window": (64, 0) if sizes[0] == 129 else None}
    # On a GPU sums of tiles are in any order.
    options["deterministic"] = dtype == "float64" and DEVICE != "cpu"
    got = of_torch(with_lse(**options), q, k, v, dout)
    assert_same_bits(got, of_core(q, k, v, dout, **options))
    assert all(x.dtype == q.dtype for x in got[:1] + got[2:])


def test_gradient_into_lse():
    q, k, v, dout = qkv()
    dlse = torch.randn(2, 4, 33, dtype=q.dtype)
    mask = masks.causal(33)
    got = of_torch(with_lse(mask), q, k, v, dout, dlse)
    assert_same_bits(got, of_core(q, k, v, dout, mask, dlse=dlse))
    (dq,) = torch.autograd.grad(with_lse(mask)(q, k, v)[1], q, dlse)
    zero = torch.zeros_like(dout)
    assert (as_numpy(dq) == of_core(q, k, v, zero, mask, dlse=dlse)[2]).all()


def test_agrees_with_torch():
    q, k, v, dout = qkv()
    mask = masks.butterfly(33, block=8) & masks.causal(33)
    attended = torch.tensor(mask.dense())
    got = of_torch(with_lse(mask), q, k, v, dout)
    want = of_torch(lambda q, k, v: sdpa(q, k, v, attended), q, k, v, dout)
    assert_close(got, want)


def test_any_strides():
    q, k, v, dout = qkv(dtype="float32")
    contiguous = of_torch(with_lse(causal=True), q, k, v, dout)
    layouts = [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
        lambda x: torch.stack([x, x], dim=-1)[..., 0],
        lambda x: torch.cat([x, x], dim=2)[:, :, : x.shape[2]],
    ]
    for layout in layouts:
        given = [layout(x.detach()).requires_grad_() for x in (q, k, v)]
        got = of_torch(with_lse(causal=True), *given, layout(dout))
        assert all(torch.equal(a, b) for a, b in zip(got, contiguous, strict=True))


def test_expanded_gradient():
    q, k, v, _ = qkv()
    out = nt.attention(q, k, v)
    summed = torch.autograd.grad(out.sum(), (q, k, v))
    dout = torch.ones_like(out)
    assert all(
        map(torch.equal, summed, torch.autograd.grad(nt.attention(q, k, v), (q, k, v), dout))
    )


def test_layout_of_heads_first():
    q, k, v, dout = qkv()
    swapped = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    out = nt.attention(*swapped, layout="bhsd")
    assert torch.equal(out.transpose(1, 2), nt.attention(q, k, v))
    got = torch.autograd.grad(out, swapped, dout.transpose(1, 2))
    want = torch.autograd.grad(nt.attention(q, k, v), (q, k, v), dout)
    assert all(torch.equal(a.transpose(1, 2), b) for a, b in zip(got, want, strict=True))


def test_only_what_is_asked_for_gets_a_gradient():
    q, k, v, _ = qkv()
    out = nt.attention(q.detach(), k, v.detach())
    out.sum().backward()
    assert q.grad is None
    assert v.grad is None
    assert k.grad is not None


def test_results_are_contiguous():
    q, k, v, _ = qkv()
    out, lse = nt.attention(q.transpose(1, 3).contiguous().transpose(1, 3), k, v, return_lse=True)
    assert out.is_contiguous()
    assert lse.is_contiguous()


def test_gradcheck():
    q, k, v, _ = qkv(1, 9, 11, 4, 2, 8)
    mask = masks.window(9, 11, left=4, right=2)
    assert torch.autograd.gradcheck(with_lse(mask), (q, k, v), fast_mode=True)


def test_under_autocast():
    q, k, v, _ = qkv(dtype="float32")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = nt.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    given = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(out, nt.attention(*given))
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_float64_under_autocast():
    q, k, v, _ = (x.detach() for x in qkv())
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = nt.attention(q, k, v)
    assert torch.equal(out, nt.attention(q, k, v))


@pytest.mark.parametrize("learned", range(3), ids="qkv")
def test_one_input_alone_is_learned(learned):
    *given, dout = qkv()
    all_three = torch.autograd.grad(nt.attention(*given), given, dout)
    alone = [x.detach().requires_grad_(i == learned) for i, x in enumerate(given)]
    (got,) = torch.autograd.grad(nt.attention(*alone), alone[learned], dout)
    assert torch.equal(got, all_three[learned])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_to_one_graph(backend):
    q, k, v, dout = qkv()
    mask = masks.local(33, block=8)

    def layer(q, k, v):
        return torch.sin(nt.attention(2 * q, k, v, mask, dropout=0.25, seed=5))

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    got = torch.autograd.grad(compiled(q, k, v), (q, k, v), dout)
    want = torch.autograd.grad(layer(q, k, v), (q, k, v), dout)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_compiled_again_for_another_mask():
    q, k, v, _ = qkv()
    compiled = torch.compile(nt.attention, fullgraph=True, backend="eager")
    for mask in (masks.causal(33), masks.local(33, block=8), None):
        assert torch.equal(compiled(q, k, v, mask), nt.attention(q, k, v, mask))


def test_checkpointed():
    q, k, v, dout = qkv()

    def layer(q, k, v):
        return nt.attention(q, k, v, causal=True, dropout=0.5)

    torch.manual_seed(7)
    want = torch.autograd.grad(layer(q, k, v), (q, k, v), dout)
    torch.manual_seed(7)
    out = torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=False)
    torch.rand(3)
    assert all(map(torch.equal, torch.autograd.grad(out, (q, k, v), dout), want))


def test_of_functions():
    q, k, v, _ = qkv()
    loss = lambda q: nt.attention(q, k.detach(), v.detach()).sin().sum()
    got = torch.func.grad(loss)(q.detach())
    assert torch.equal(got, torch.autograd.grad(loss(q), q)[0])


def test_deterministic_as_torch_is():
    q, k, v, _ = qkv()
    torch.use_deterministic_algorithms(True)
    try:
        out = nt.attention(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.grad_fn.spec.deterministic
    assert not nt.attention(q, k, v).grad_fn.spec.deterministic


def test_mask_is_forgotten_but_not_before_its_backward_pass():
    q, k, v, _ = qkv(1, 8, 8, 1, 1, 8)
    out = nt.attention(q, k, v, masks.from_function(lambda i, j: i >= j, 8))
    spec = weakref.ref(out.grad_fn.spec)
    for scale in range(1, 300):
        nt.attention(q, k, v, scale=scale / 300)
    out.sum().backward()
    del out
    assert spec() is None


@pytest.mark.parametrize("causal", [False, True])
def test_varlen(causal):
    q, k, v, dout = qkv(1, 40, 55, 4, 2, 16)
    starts_q, starts_k = [0, 10, 10, 40], torch.tensor([0, 15, 20, 55])
    given = [x[0] for x in (q, k, v)]
    out, lse = nt.varlen_attention(*given, starts_q, starts_k, causal=causal, return_lse=True)
    mask = masks.documents_from_cu_seqlens(starts_q, starts_k.tolist(), causal=causal)
    got = (out[None], lse[None], *torch.autograd.grad(out, (q, k, v), dout[0]))
    assert_same_bits(got, of_core(q, k, v, dout, mask))


def test_merged_parts_of_the_keys():
    q, k, v, dout = qkv()
    parts = [nt.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(20), slice(20, 33))]
    merged = nt.merge(*parts[0], *parts[1])
    got = (*merged, *torch.autograd.grad(merged[0], (q, k, v), dout))
    want = of_torch(with_lse(), q, k, v, dout)
    assert_close(got, want)


def test_merge_of_empty_parts():
    q, k, v, _ = qkv()
    out, lse = nt.attention(
        q, k, v, masks.from_function(lambda i, j: i + j < 0, 33), return_lse=True
    )
    merged = nt.merge(out, lse, out, lse)
    assert torch.equal(merged[0], torch.zeros_like(out))
    assert torch.equal(merged[1], torch.full_like(lse, -torch.inf))
    (dq,) = torch.autograd.grad(merged[0].sum(), q)
    assert torch.equal(dq, torch.zeros_like(q))


@pytest.mark.parametrize("order", [1, -1])
def test_what_an_empty_part_holds_is_ignored(order):
    q, k, v, dout = qkv()
    part = nt.attention(q, k, v, return_lse=True)
    nothing = torch.full_like(part[0], torch.nan), torch.full_like(part[1], -torch.inf)
    for x in nothing:
        x.requires_grad_()
    merged = nt.merge(*itertools.chain(*(part, nothing)[::order]))
    assert torch.equal(merged[0], part[0])
    torch.testing.assert_close(merged[1], part[1], rtol=0, atol=0)
    got = torch.autograd.grad(merged, (*part, *nothing), (dout, part[1]), retain_graph=True)
    assert torch.equal(got[0], dout)
    assert all(x.isfinite().all() for x in got)
    assert not got[2].any()


def test_sink_has_its_gradient():
    q, k, v, dout = qkv()
    sink = torch.randn(4, dtype=q.dtype, requires_grad=True)
    out, lse = nt.attention(q, k, v, return_lse=True)
    with_sink, _ = nt.merge_sink(out, lse, sink)
    arrays = [as_numpy(x) for x in (out, lse, sink)]
    assert_close(with_sink.detach(), torch.tensor(nbflash.merge_sink(*arrays)[0]))
    got = torch.autograd.grad(with_sink, (out, lse, sink), dout, retain_graph=True)
    want = nbflash.merge_sink_backward(as_numpy(dout), *arrays)
    assert_close(got, tuple(map(torch.tensor, want)))
    assert torch.autograd.grad(with_sink, q, dout)[0].abs().max() > 0
