"""The operators as torch sees them, dropout's random numbers, and what is refused."""

import gc
import weakref

import numpy as np
import pytest
import torch
from tensors import as_array, as_numpy, assert_same_bits, decoded_by_core, of_core, of_torch, qkv

import masks
import nbflash
from nbflash import scores
from nbflash import torch as nt
from nbflash.torch import handles
from nbflash.torch.attention import _seed_tensor
from nbflash.torch.handles import handle_of

OPS = torch.ops.nbflash


def handle(mask=None):
    return handle_of(mask, False, None, None, None, 0.0, False, "auto")


def test_attention_passes_opcheck():
    q, k, v, dout = qkv(1, 9, 9, 2, 1, 8)
    given = q, k, v, [], None, handle(masks.causal(9))
    torch.library.opcheck(OPS.attention.default, given)
    out, lse = (x.detach() for x in OPS.attention.default(*given))
    given = dout, *(x.detach() for x in (q, k, v)), out, lse, torch.ones_like(lse), *given[3:]
    torch.library.opcheck(OPS.attention_backward.default, given)


def test_decode_passes_opcheck():
    q, k, v, _ = (x.detach() for x in qkv(2, 1, 9))
    given = q, k, v, torch.tensor([9, 4], dtype=torch.int32), None, None, None, [], handle()
    torch.library.opcheck(OPS.decode.default, given)


def with_dropout(**options):
    return lambda q, k, v: nt.attention(q, k, v, dropout=0.25, return_lse=True, **options)


@pytest.mark.parametrize("seed", [5, (2**64 - 1, 3), (2**63, 2**63 - 1)], ids=str)
def test_given_seed_is_that_of_nbflash(seed):
    q, k, v, dout = qkv()
    got = of_torch(with_dropout(seed=seed), q, k, v, dout)
    assert_same_bits(got, of_core(q, k, v, dout, dropout=0.25, seed=seed))


def test_seed_of_a_tensor():
    q, k, v, dout = qkv()
    got = of_torch(with_dropout(seed=torch.tensor([5, -1])), q, k, v, dout)
    assert_same_bits(got, of_core(q, k, v, dout, dropout=0.25, seed=(5, 2**64 - 1)))


def test_seed_comes_from_the_generator():
    q, k, v, _ = qkv()
    torch.manual_seed(3)
    first, second = (with_dropout()(q, k, v)[0] for _ in range(2))
    torch.manual_seed(3)
    again = with_dropout()(q, k, v)[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_given_seeds_are_in_host_memory_and_drawn_ones_where_they_are_read():
    place = torch.device("meta")
    with place:  # which torch.set_default_device does for all that follows
        assert _seed_tensor(5, 0.5, place).device.type == "cpu"
    assert _seed_tensor(None, 0.5, place).device.type == "meta"
    assert _seed_tensor(None, 0.5, place).dtype == torch.int64
    assert _seed_tensor(None, 0.0, place) is None


def test_decode_takes_a_block_map_of_groups():
    q, k, v, _ = (x.detach() for x in qkv(2, 3, 20))
    lengths = torch.tensor([20, 12], dtype=torch.int32)
    chosen = nbflash.BlockMap(torch.randint(0, 3, (2, 2, 1, 2)), shape=(3, 20), block=(3, 8))
    want, _ = decoded_by_core(q, k, v, lengths, mask=chosen.to_mask(4))
    assert np.array_equal(as_numpy(nt.decode(q, k, v, lengths, mask=chosen)), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_is_that_of_nbflash(dtype):
    q, k, v, _ = (x.detach() for x in qkv(2, 3, 20, dtype=dtype))
    lengths = torch.tensor([20, 7], dtype=torch.int32)
    got = nt.decode(q, k, v, lengths, return_lse=True)
    for a, b in zip(got, decoded_by_core(q, k, v, lengths), strict=True):
        assert np.array_equal(as_numpy(a), b)


@pytest.mark.parametrize("compiled", [False, True])
def test_decode_takes_windows_and_scores(compiled):
    """Of constants and of tensors, whose axis of keys has the length of the capacity."""
    q, k, v, _ = (x.detach() for x in qkv(2, 3, 20, dtype="float32"))
    lengths = torch.tensor([20, 2], dtype=torch.int32)
    bias = torch.randn(1, q.shape[2], 1, 20)

    def call(bias):
        score = nt.scores.compose(nt.scores.softcap(2.0), nt.scores.bias(bias))
        return nt.decode(q, k, v, lengths, window=(4, None), score=score, return_lse=True)

    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    for each in (bias, -bias):
        score = scores.compose(scores.softcap(2.0), scores.bias(as_array(each)))
        want = decoded_by_core(q, k, v, lengths, window=(4, None), score=score)
        for a, b in zip(call(each), want, strict=True):
            assert np.array_equal(as_numpy(a), b)


def test_decode_of_pages_and_scales():
    q, k, v, _ = (x.detach() for x in qkv(2, 1, 16, dtype="float32"))
    pages = [x.reshape(8, 4, 2, 16) for x in (k, v)]
    scale = torch.tensor([2.0, 4.0])
    table = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    lengths = torch.tensor([16, 5], dtype=torch.int32)
    whole = nt.decode(q, *(x.round() * scale[:, None] for x in (k, v)), lengths)
    eight_bits = [x.round().to(torch.int8) for x in pages]
    scales = {"k_scale": scale, "v_scale": scale}
    assert torch.equal(nt.decode(q, *eight_bits, lengths, block_table=table, **scales), whole)


def test_decode_has_no_gradient():
    q, k, v, _ = qkv(1, 1, 9)
    out = nt.decode(q, k, v, torch.tensor([9], dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="decode has no gradient"):
        out.sum().backward()


def test_module():
    q, k, v, dout = qkv()
    layer = nt.Attention(causal=True, dropout=0.5, sinks=4, layout="bhsd").double()
    assert torch.equal(layer.sink, torch.zeros(4, dtype=q.dtype))
    given = [x.transpose(1, 2) for x in (q, k, v)]
    assert not torch.equal(layer(*given), layer(*given))
    layer.eval()
    out = layer(*given)
    want = nt.merge_sink(*nt.attention(q, k, v, causal=True, return_lse=True), layer.sink)[0]
    assert torch.equal(out.transpose(1, 2), want)
    out.backward(dout.transpose(1, 2))
    assert layer.sink.grad.abs().min() > 0
    assert "causal=True" in repr(layer)


def test_second_derivatives_are_refused():
    q, k, v, _ = qkv()
    (dq,) = torch.autograd.grad(nt.attention(q, k, v).sin().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        dq.sum().backward()


@pytest.mark.parametrize("transform", [lambda f: f, torch.func.grad], ids=["plain", "of grad"])
def test_vmap_is_refused(transform):
    q, k, v, _ = qkv()
    mapped = torch.func.vmap(transform(lambda q: nt.attention(q, k.detach(), v.detach()).sum()))
    with pytest.raises(NotImplementedError, match="fold the mapped axis into the batch"):
        mapped(q.detach()[None])


X = torch.zeros(1, 4, 2, 8)
NUMBERS, META = as_numpy(X), X.to("meta")
FOUR = torch.tensor([4], dtype=torch.int32)
REFUSED = {
    "array": (lambda: nt.attention(NUMBERS, X, X), TypeError, "q must be a torch.Tensor"),
    "list": (lambda: nt.attention([1], X, X), TypeError, "q must be a torch.Tensor, got list"),
    "axes": (lambda: nt.attention(X, X[0], X), ValueError, "k must have 4 axes"),
    "device": (
        lambda: nt.attention(X, X, META),
        ValueError,
        f"v must be on the device of q, {X.device}, got meta",
    ),
    "dtype": (lambda: nt.attention(X, X.half(), X), TypeError, "k must have the dtype of q"),
    "integers": (lambda: nt.attention(X.int(), X.int(), X.int()), TypeError, "q must have dtype"),
    "shape": (lambda: nt.attention(X, X[..., :4], X), ValueError, "k must have head_dim=8"),
    "mask": (lambda: nt.attention(X, X, X, masks.causal(5)), ValueError, "mask must have shape"),
    "layout": (lambda: nt.attention(X, X, X, layout="bnsd"), ValueError, "layout must be one of"),
    "flag": (lambda: nt.attention(X, X, X, causal=1), TypeError, "causal must be True or False"),
    "lse": (lambda: nt.attention(X, X, X, return_lse=1), TypeError, "return_lse must be True"),
    "deterministic": (
        lambda: nt.attention(X, X, X, deterministic=1),
        TypeError,
        "deterministic must be True",
    ),
    "dropout": (lambda: nt.attention(X, X, X, dropout=1.5), ValueError, "dropout must be at least"),
    "seed": (
        lambda: nt.attention(X, X, X, dropout=0.5, seed=2.5),
        TypeError,
        "seed must be an integer",
    ),
    "score": (lambda: nt.attention(X, X, X, score=3), TypeError, "score must be made by"),
    "place of a score": (
        lambda: nt.attention(X, X, X, score=nt.scores.bias(META)),
        ValueError,
        "score has a tensor on meta",
    ),
    "keys that are no tensor": (
        lambda: nt.attention(X, NUMBERS, X),
        TypeError,
        "k must be a torch.Tensor, got ndarray",
    ),
    "values that are no tensor": (
        lambda: nt.varlen_attention(X[0], X[0], NUMBERS[0], [0, 4]),
        TypeError,
        "v must be a torch.Tensor, got ndarray",
    ),
    "varlen axes": (lambda: nt.varlen_attention(X, X, X, [0, 4]), ValueError, "q must have 3 axes"),
    "varlen starts": (
        lambda: nt.varlen_attention(X[0], X[0], X[0], ["a"]),
        TypeError,
        "cu_seqlens_q must be integers",
    ),
    "varlen starts of keys": (
        lambda: nt.varlen_attention(X[0], X[0], X[0], [0, 4], [0.5, 4]),
        TypeError,
        r"cu_seqlens_k must be integers, got \[0.5, 4\]",
    ),
    **{
        f"varlen {name}": (
            lambda name=name: nt.varlen_attention(X[0], X[0], X[0], [0, 4], **{name: None}),
            TypeError,
            f"varlen_attention takes no {name}",
        )
        for name in ("layout", "mask", "window")
    },
    "varlen flag": (
        lambda: nt.varlen_attention(X[0], X[0], X[0], [0, 4], causal=1),
        TypeError,
        "causal must be True or False, got 1",
    ),
    "values of three axes": (lambda: nt.attention(X, X, X[0]), ValueError, "v must have 4 axes"),
    **{
        f"seed of {dtype}": (
            lambda seed=seed: nt.attention(X, X, X, dropout=0.5, seed=seed),
            TypeError,
            f"seed must be an integer, a pair .* got an array of {dtype}",
        )
        for dtype, seed in (
            ("int32", FOUR.expand(4).contiguous()),
            ("float64", torch.ones(2).double()),
        )
    },
    "decode q": (lambda: nt.decode(NUMBERS, X, X, FOUR), TypeError, "q must be a torch.Tensor"),
    "decode": (lambda: nt.decode(X, X, X, [4]), TypeError, "lengths must be a torch.Tensor"),
    "decode window": (lambda: nt.decode(X, X, X, FOUR, window=3), TypeError, "window must be"),
    "decode score": (lambda: nt.decode(X, X, X, FOUR, score=3), TypeError, "score must be made by"),
    "decode flag": (
        lambda: nt.decode(X, X, X, FOUR, return_lse=1),
        TypeError,
        "return_lse must be True",
    ),
    **{
        f"decode {name}": (
            lambda name=name: nt.decode(X, X, X, FOUR, **{name: np.ones(1)}),
            TypeError,
            f"{name} must be a torch.Tensor, got ndarray",
        )
        for name in ("block_table", "k_scale", "v_scale")
    },
    **{
        f"{name} that has no hash": (
            lambda name=name, x=x: nt.attention(X, X, X, **{name: x}),
            TypeError,
            message,
        )
        for name, x, message in (
            ("mask", np.ones((4, 4), bool), r"use masks.from_dense\(mask\)"),
            ("causal", [True], "causal must be True or False"),
            ("window", np.array([1, 0]), r"window must be \(left, right\)"),
            ("scale", np.array(0.5), "scale must be a real number or None"),
            ("dropout", [0.5], "dropout must be a real number"),
            ("impl", ["cpu"], "impl must be a string"),
        )
    },
    "decode axes": (
        lambda: nt.decode(X[0], X, X, FOUR),
        ValueError,
        r"q must have 4 axes, got shape \(4, 2, 8\)",
    ),
    "decode device": (
        lambda: nt.decode(X, X, X, torch.tensor([4], device="meta")),
        ValueError,
        f"lengths must be on the device of q, {X.device}, got meta",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_shapes_without_data():
    """On the meta device, as models are made before they are loaded."""
    q = META.expand(2, 4, 2, 8)
    out, lse = nt.attention(q, q, q, causal=True, return_lse=True)
    assert (out.shape, out.device.type, lse.shape) == (q.shape, "meta", (2, 2, 4))
    half = q.bfloat16()
    out, lse = nt.attention(half, half, half, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_import_of_nbflash_brings_no_framework():
    import subprocess
    import sys

    script = (
        "import sys, nbflash, masks; "
        "print([x for x in ('torch', 'jax', 'transformers') if x in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def test_clear_cache_lets_masks_go():
    mask = masks.from_dense(np.random.default_rng(0).random((12, 12)) < 0.5)
    held = weakref.ref(mask)
    nt.attention(*torch.randn(3, 1, 12, 2, 8), mask)
    del mask
    nbflash.clear_cache()
    gc.collect()
    assert held() is None


@pytest.mark.parametrize(("given", "kept"), [("float64", "float32"), ("int32", "int32")])
def test_arrays_of_a_score_have_room_on_their_device(given, kept):
    x = torch.empty(3, dtype=getattr(torch, given), device="meta")
    room = handles._room_for(x, torch.float16)
    assert (room.shape, room.dtype, room.device) == (x.shape, getattr(torch, kept), x.device)
