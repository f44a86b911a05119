"""Score functions of tensors: gradients of their arrays, on top of what nbflash tests itself."""

import numpy as np
import pytest
import torch
from tensors import DEVICE, as_array, assert_close, on_host, qkv, sdpa

import masks
import nbflash
from nbflash import torch as nt
from nbflash.torch.handles import Spec, handle_of

OPS = torch.ops.nbflash

MASK = masks.causal(33)
ATTENDED = torch.tensor(MASK.dense())


def distances(reach):
    return (torch.arange(33) - torch.arange(33)[:, None] + reach).clamp(0, 2 * reach)


def test_learned_arrays_of_composed_scores():
    """A table, softcap, a bias in another dtype, and a constant bias of nbflash's own."""
    q, k, v, dout = qkv()
    table = torch.randn(4, 9, dtype=q.dtype, requires_grad=True)
    bias = torch.randn(2, 1, 33, 33, dtype=torch.float32, requires_grad=True)
    constant = np.random.default_rng(0).standard_normal((1, 4, 1, 33))

    def score(s):
        s = 3 * torch.tanh((s + table[:, distances(4)]) / 3)
        return s + bias + torch.tensor(constant)

    made = nt.scores.compose(
        nt.scores.relative(table),
        nt.scores.softcap(3),
        nt.scores.bias(bias),
        nbflash.scores.bias(constant),
    )
    out = nt.attention(q, k, v, MASK, score=made)
    want = sdpa(q, k, v, ATTENDED, score)[0]
    assert_close(out, want)
    learned = q, k, v, table, bias
    got, want = (torch.autograd.grad(x, learned, dout) for x in (out, want))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)
    assert got[4].dtype == torch.float32
    assert torch.equal(nt.attention(q, k, v, MASK, score=made), out)


def shifted(s, b, h, q_idx, kv_idx, shift, factor):
    return s * factor + shift[h]


def scaled(s, b, h, q_idx, kv_idx, factor):
    return s * factor


def shifted_grad(s, b, h, q_idx, kv_idx, shift, factor):
    return factor


def shifted_part(s, b, h, q_idx, kv_idx, shift, factor):
    return h, 1


def test_custom_score_learns_its_tensor_only():
    q, k, v, _ = qkv()
    shift = learned_shift()
    made = nt.scores.custom(shifted, shifted_grad, (shift, 0.5), (shifted_part, None))
    out, lse = nt.attention(q, k, v, MASK, score=made, return_lse=True)
    want = sdpa(q, k, v, ATTENDED, lambda s: 0.5 * s + shift[:, None, None])
    assert_close((out, lse), want)
    got = torch.autograd.grad(lse.sum(), (shift, q))
    for a, b in zip(got, torch.autograd.grad(want[1].sum(), (shift, q)), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("compose", [lambda x: x, nt.scores.compose], ids=["alone", "composed"])
def test_an_array_that_nobody_learns(compose):
    """Of a score of nbflash's own that says nothing of gradients."""
    q, k, v, dout = qkv()
    shift = np.arange(4.0)
    made = nbflash.scores.custom(shifted, shifted_grad, (shift, 0.5))
    out = nt.attention(q, k, v, MASK, score=compose(made))
    want = sdpa(q, k, v, ATTENDED, lambda s: 0.5 * s + torch.tensor(shift)[:, None, None])[0]
    assert_close(out, want)
    got, want = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, want))
    assert_close(got, want)


def learned_shift():
    return torch.randn(4, dtype=torch.float64, requires_grad=True)


def test_compiles_to_one_graph():
    q, k, v, dout = qkv()
    shift = learned_shift()

    def layer(q, k, v):
        score = nt.scores.custom(shifted, shifted_grad, (shift, 0.5), (shifted_part, None))
        return torch.sin(nt.attention(2 * q, k, v, MASK, score=score))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(q, k, v), (q, k, v, shift), dout)
    want = torch.autograd.grad(layer(q, k, v), (q, k, v, shift), dout)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_a_number_that_changes():
    q, k, v, _ = qkv()

    def layer(factor):
        score = nt.scores.custom(shifted, shifted_grad, (shift, factor), (shifted_part, None))
        return nt.attention(q, k, v, MASK, score=score)

    shift, run = learned_shift(), torch.compile(layer, fullgraph=True, backend="aot_eager")
    for factor in (0.5, 0.25, 2, 3):
        assert torch.equal(run(factor), layer(factor))


def test_passes_opcheck():
    q, k, v, dout = qkv()
    shift = learned_shift().detach().float().requires_grad_()
    score = nt.scores.custom(shifted, shifted_grad, (shift, 0.5), (shifted_part, None))
    handle = handle_of(MASK, False, None, None, score.stages, 0.0, False, "auto")
    given = q, k, v, list(score.tensors), None, handle
    torch.library.opcheck(OPS.attention.default, given)
    out, lse = OPS.attention.default(*given)
    arrays = [x.detach() for x in score.tensors]
    given = dout, *(x.detach() for x in (q, k, v, out, lse)), None, arrays, None, handle
    torch.library.opcheck(OPS.score_backward.default, given)
    (made,) = OPS.score_backward.default(dout, q, *given[2:])
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        made.sum().backward()


def test_numbers_among_params_stay_numbers():
    shift = learned_shift()
    made = nt.scores.custom(shifted, shifted_grad, (shift, 0.5), (shifted_part, None))
    assert [x is shift for x in made.tensors] == [True]


def test_score_without_a_gradient_is_named():
    q, k, v, _ = qkv()
    shift = torch.randn(4, dtype=q.dtype, requires_grad=True)
    made = nt.scores.custom(shifted, shifted_grad, (shift, 1.0))
    out = nt.attention(q.detach(), k.detach(), v.detach(), score=made)
    with pytest.raises(ValueError, match="param_grads="):
        out.sum().backward()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nt.scores.bias(np.zeros((1, 1, 1, 1))), "array must be a torch.Tensor"),
        (lambda: nt.scores.compose(3), "score must be made by"),
        (lambda: nt.scores.custom(shifted, params=3), "params must be a tuple"),
    ],
)
def test_bad_scores(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.skipif(DEVICE != "cpu", reason="slopes of q on a GPU are numbers")
@pytest.mark.parametrize("in_graph", [False, True])
def test_slopes_are_learned(in_graph):
    q, k, v, dout = qkv()
    slopes = torch.rand(4, dtype=q.dtype, requires_grad=True)
    away = torch.arange(33) - torch.arange(33)[:, None]
    call = lambda slopes: nt.attention(q, k, v, MASK, score=nt.scores.alibi(slopes))
    run = torch.compile(call, fullgraph=True, backend="aot_eager") if in_graph else call
    out = run(slopes)
    want = sdpa(q, k, v, ATTENDED, lambda s: s + slopes[:, None, None] * away)[0]
    assert_close(out, want)
    got, want = (torch.autograd.grad(x, (slopes, q), dout) for x in (out, want))
    assert_close(got, want)


def test_slopes_are_in_host_memory(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    with pytest.raises(ValueError, match="slopes must be in host memory, got a tensor on cpu"):
        nt.scores.alibi(torch.ones(4, device="cpu"))


def several(s, b, h, q_idx, kv_idx, shift, factor, places, constant, column):
    return s * factor + shift[h] + constant[h] + column[places[kv_idx]]


def several_grad(s, b, h, q_idx, kv_idx, shift, factor, places, constant, column):
    return factor


def of_shift(s, b, h, q_idx, kv_idx, shift, factor, places, constant, column):
    return h, 1


def of_column(s, b, h, q_idx, kv_idx, shift, factor, places, constant, column):
    return places[kv_idx], 1


@pytest.mark.parametrize("kind", [list, tuple])
def test_parameters_of_all_kinds(kind):
    """Learned tensors, a number, integers, and an array of NumPy that is learned by nobody."""
    q, k, v, dout = qkv()
    shift, column = learned_shift(), torch.randn(7, dtype=torch.float32, requires_grad=True)
    places, constant = torch.randint(7, (33,)), np.arange(4.0)
    made = nt.scores.custom(
        several,
        several_grad,
        kind([shift, 0.5, places, constant, column]),
        kind([of_shift, None, None, of_shift, of_column]),
    )
    assert [x.dtype for x in made.tensors] == [
        *(torch.float64, torch.int64, torch.float64, torch.float32)
    ]
    out = nt.attention(q, k, v, MASK, score=nt.scores.compose(nt.scores.softcap(2.0), made))
    moved = lambda: (shift + torch.tensor(constant))[:, None, None] + column[places].double()
    want = sdpa(q, k, v, ATTENDED, lambda s: torch.tanh(s / 2) + moved())[0]
    assert_close(out, want)
    got, want = (torch.autograd.grad(x, (shift, column, k), dout) for x in (out, want))
    assert_close(got, want)


def twice_shifted(s, b, h, q_idx, kv_idx, constant, shift):
    return s + constant[h] + 2 * shift[h]


def one(s, b, h, q_idx, kv_idx, constant, shift):
    return 1


def of_constant(s, b, h, q_idx, kv_idx, constant, shift):
    return h, 1


def of_learned(s, b, h, q_idx, kv_idx, constant, shift):
    return h, 2


def test_a_tuple_among_the_parameters_is_learned_by_nobody():
    q, k, v, dout = qkv()
    shift = learned_shift()
    given = (0.0, 1.0, 2.0, 3.0), shift
    made = nt.scores.custom(twice_shifted, one, given, (of_constant, of_learned))
    out = nt.attention(q, k, v, MASK, score=nt.scores.compose(made, nt.scores.softcap(2.0)))
    by_head = lambda: (torch.arange(4) + 2 * shift)[:, None, None]
    want = sdpa(q, k, v, ATTENDED, lambda s: 2 * torch.tanh((s + by_head()) / 2))[0]
    assert_close(out, want)
    got, want = (torch.autograd.grad(x, (shift, k), dout) for x in (out, want))
    assert_close(got, want)


def test_a_constant_score_of_several_arrays_beside_a_learned_one():
    """Gradients of nbflash's own arrays are nobody's."""
    q, k, v, dout = qkv()
    own = nbflash.scores.compose(
        nbflash.scores.bias(np.arange(4.0).reshape(1, 4, 1, 1)),
        nbflash.scores.custom(shifted, shifted_grad, (np.arange(4.0), 0.5), (shifted_part, None)),
    )
    bias = torch.randn(1, 1, 1, 33, dtype=q.dtype, requires_grad=True)
    out = nt.attention(q, k, v, MASK, score=nt.scores.compose(own, nt.scores.bias(bias)))
    by_head = torch.arange(4)[:, None, None]
    want = sdpa(q, k, v, ATTENDED, lambda s: (s + by_head) / 2 + by_head + bias)[0]
    assert_close(out, want)
    got, want = (torch.autograd.grad(x, (bias, q), dout) for x in (out, want))
    assert_close(got, want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_arrays_of_other_strides_and_dtypes(dtype):
    q, k, v, dout = qkv(dtype=dtype)
    bias = torch.randn(33, 33, 4, 1).permute(3, 2, 1, 0).requires_grad_()
    table = torch.randn(4, 10)[:, ::2].requires_grad_()
    score = nt.scores.compose(nt.scores.bias(bias), nt.scores.relative(table))
    out = nt.attention(q, k, v, MASK, score=score, deterministic=True)
    arrays = [x.detach().contiguous() for x in (bias, table)]
    again = [x.requires_grad_() for x in arrays]
    score = nt.scores.compose(nt.scores.bias(again[0]), nt.scores.relative(again[1]))
    same = nt.attention(q, k, v, MASK, score=score, deterministic=True)
    assert torch.equal(out, same)
    got = torch.autograd.grad(out, (bias, table), dout)
    want = torch.autograd.grad(same, again, dout)
    assert_close(got, want)
    assert DEVICE != "cpu" or all(map(torch.equal, got, want))  # on a GPU sums are by atomics
    core = nbflash.scores.compose(
        nbflash.scores.bias(as_array(again[0])), nbflash.scores.relative(as_array(again[1]))
    )
    want = nbflash.attention(*map(as_array, (q, k, v)), MASK, score=core)
    assert np.array_equal(*map(on_host, (as_array(out), want)))


def test_arrays_are_those_of_the_dtype_of_q(monkeypatch):
    """In CUDA memory each dtype has its own: forward, backward, and of decode."""
    q, k, v, dout = qkv(1, 9, 9, dtype="bfloat16")
    seen, made = [], Spec.score
    noted = lambda spec, tensors, dtype: seen.append(dtype) or made(spec, tensors, dtype)
    monkeypatch.setattr(Spec, "score", noted)
    table = torch.randn(4, 5, requires_grad=True)
    score = nt.scores.relative(table)
    torch.autograd.grad(nt.attention(q, k, v, score=score), (q, table), dout)
    lengths = torch.tensor([9], dtype=torch.int32)
    nt.decode(*(x.detach() for x in (q, k, v)), lengths, score=score)
    assert seen == [torch.bfloat16] * 4


def test_an_array_that_torch_has_negated():
    """It is a view whose numbers only torch knows."""
    q, k, v, _ = (x.detach() for x in qkv())
    bias = torch.randn(1, 4, 1, 33, dtype=torch.complex128).conj().imag
    assert bias.is_neg()
    got, want = (nt.attention(q, k, v, score=nt.scores.bias(x)) for x in (bias, bias.resolve_neg()))
    assert torch.equal(got, want)
    assert not torch.equal(got, nt.attention(q, k, v))


def test_text():
    made = nt.scores.compose(nt.scores.bias(torch.ones(1, 1, 1, 1)), nt.scores.softcap(2.0))
    assert repr(made) == "TensorScore(bias, compose)"
    assert nt.scores.compose(None, made).stages == made.stages


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_of_scores_that_are_made_outside_of_a_graph(dynamic):
    """torch.compile makes a symbol of one that changes, or of every one at once."""
    q, k, v, _ = qkv(1, 9, 9)
    torch.compiler.reset()
    call = lambda score: nt.attention(q, k, v, score=score)
    run = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
    shift = torch.arange(4.0, dtype=q.dtype)
    for number in (1, 2, 0.5, 0.25):
        for fn, params in ((shifted, (shift, number)), (scaled, (number,))):
            score = nt.scores.custom(fn, params=params)
            assert_close(run(score), call(score))


@pytest.mark.parametrize(
    ("number", "other"),
    [(3, 3.0), (3, np.int64(3)), (0.0, -0.0), (np.float32(0), np.float32(-0.0))],
    ids=["float", "NumPy's", "sign", "sign of NumPy's"],
)
def test_equal_numbers_that_are_others(number, other):
    """They are not compiled alike."""
    given = [nt.scores.custom(shifted, params=(0, n)).stages for n in (number, number, other)]
    one, same, another = (
        handle_of(None, False, None, None, stages, 0.0, False, "auto") for stages in given
    )
    assert one == same != another
