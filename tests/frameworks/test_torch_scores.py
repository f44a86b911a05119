"""Score functions of tensors: gradients of their arrays, on top of what nbflash tests itself."""

import numpy as np
import pytest
import torch
from tensors import qkv, sdpa

import masks
import nbflash
from nbflash import torch as nt
from nbflash.torch.handles import handle_of

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
    torch.testing.assert_close(out, want)
    learned = q, k, v, table, bias
    got, want = (torch.autograd.grad(x, learned, dout) for x in (out, want))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert got[4].dtype == torch.float32
    assert torch.equal(nt.attention(q, k, v, MASK, score=made), out)


def shifted(s, b, h, q_idx, kv_idx, shift, factor):
    return s * factor + shift[h]


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
    torch.testing.assert_close((out, lse), want)
    got = torch.autograd.grad(lse.sum(), (shift, q))
    for a, b in zip(got, torch.autograd.grad(want[1].sum(), (shift, q)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("compose", [lambda x: x, nt.scores.compose], ids=["alone", "composed"])
def test_an_array_that_nobody_learns(compose):
    """Of a score of nbflash's own that says nothing of gradients."""
    q, k, v, dout = qkv()
    shift = np.arange(4.0)
    made = nbflash.scores.custom(shifted, shifted_grad, (shift, 0.5))
    out = nt.attention(q, k, v, MASK, score=compose(made))
    want = sdpa(q, k, v, ATTENDED, lambda s: 0.5 * s + torch.tensor(shift)[:, None, None])[0]
    torch.testing.assert_close(out, want)
    got, want = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, want))
    torch.testing.assert_close(got, want)


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
        torch.testing.assert_close(a, b)


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
    score = nt.scores.custom(shifted, shifted_grad, (learned_shift(), 0.5), (shifted_part, None))
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


@pytest.mark.parametrize("other", [3.0, np.int64(3)], ids=["float", "NumPy's"])
def test_numbers_of_other_types_are_others(other):
    """Equal ones: they are not compiled alike."""
    given = [nt.scores.custom(shifted, params=(0, n)).stages for n in (3, 3, other)]
    one, same, another = (
        handle_of(None, False, None, None, stages, 0.0, False, "auto") for stages in given
    )
    assert one == same != another
