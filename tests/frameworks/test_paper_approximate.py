"""The approximate baselines: exact where nothing is left out, and blind to padding."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from experiments.papers import approximate
from experiments.papers.approximate import APPROXIMATE, attention_of
from nbflash import reference
from nbflash.testing import assert_within_reference, low_precision

BATCH, HEADS, N, D = 2, 2, 64, 8
LENGTHS = (64, 40)


def _qkv():
    return [torch.randn(BATCH, HEADS, N, D) for _ in range(3)]


def _public(*tensors):
    return [x.detach().transpose(1, 2).numpy() for x in tensors]


def _keep():
    return torch.arange(N) < torch.tensor(LENGTHS)[:, None]


def _assert_exact(got, q, k, v, mask=None, factor=2.0):
    public = _public(q, k, v)
    exact, _ = reference.attention(*public, mask)
    low, _ = low_precision(*public, mask)
    assert_within_reference(_public(got)[0], exact, low, "out", factor)


def test_linformer_without_compression():
    q, k, v = _qkv()
    module = approximate.Linformer(N, D, N)
    module.project_k.data = module.project_v.data = torch.eye(N)
    _assert_exact(module(q, k, v), q, k, v)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_one_cluster_of_smyrf(padded):
    q, k, v = _qkv()
    keep = _keep() if padded else None
    mask = None
    if padded:
        mask = np.broadcast_to(keep.numpy()[:, None, None], (BATCH, HEADS, N, N))
    _assert_exact(approximate.Smyrf(N, D, N)(q, k, v, keep), q, k, v, mask)


def test_one_chunk_of_reformer():
    """Queries are keys, of norm one; no token attends itself."""
    q, _, v = _qkv()
    mask = np.broadcast_to(~np.eye(N, dtype=bool), (BATCH, HEADS, N, N))
    got = approximate.Reformer(N, D, N)(q, q, v)
    _assert_exact(got, q, functional.normalize(q, dim=-1), v, mask)


def test_a_token_alone_attends_itself():
    q, _, v = (x[:, :, :1] for x in _qkv())
    assert torch.equal(approximate.Reformer(1, D, 1)(q, q, v), v)


def test_nystrom_of_all_tokens():
    """S S⁺ S = S; the error falls as the iteration converges, to that of float32."""
    q, k, v = _qkv()
    exact = approximate.attend(*(x.double() for x in (q, k, v)))
    error = [
        (approximate.Nystromformer(N, D, N, iterations=i)(q, k, v) - exact).abs().max().item()
        for i in (6, 12, 24)
    ]
    assert error[2] < error[1] / 10 < error[0] / 100
    inner = (q @ k.transpose(-1, -2) * D**-0.5).softmax(dim=-1)
    inverse = approximate.pseudo_inverse(inner, 24)
    plain = torch.linalg.pinv(inner)
    of_plain, own = (
        (inner.double() @ x.double() @ inner.double() - inner) for x in (plain, inverse)
    )
    assert own.abs().max() <= 8 * of_plain.abs().max()


@pytest.mark.parametrize("name", ["linear", "performer"])
def test_kernels_are_their_quadratic_form(name):
    q, k, v = _qkv()
    module = attention_of(name, N, D)
    if name == "linear":
        features = lambda x, is_query: functional.elu(x) + 1
    else:
        features = module.features
    weights = features(q, True).double() @ features(k, False).double().transpose(-1, -2)
    exact = (weights / weights.sum(dim=-1, keepdim=True)) @ v.double()
    low = ((weights.float() / weights.float().sum(dim=-1, keepdim=True)) @ v).numpy()
    assert_within_reference(module(q, k, v).numpy(), exact.numpy(), low, name, 4.0)


def test_random_features_are_unbiased():
    """The mean of φ(q) · φ(k) over draws is exp(q · k / √d): five standard errors."""
    q, k = torch.randn(2, 1, 1, 1, D) / 2
    found = []
    for _ in range(400):
        module = approximate.Performer(N, D, D)
        exponents = [  # without the factors that are taken off
            (x * D**-0.25) @ module.directions.T - x.square().sum() * D**-0.5 / 2 for x in (q, k)
        ]
        found.append((exponents[0].exp() * exponents[1].exp()).mean())
        scaled = module.features(q, True) * module.features(k, False)
        largest = sum(x.amax() for x in exponents)
        assert torch.isclose(scaled.sum() * largest.exp(), found[-1])
    found = torch.stack(found)
    error = found.mean() - (q * k * D**-0.5).sum().exp()
    assert error.abs() < 5 * found.std() / len(found) ** 0.5


def test_directions_are_orthogonal_and_uniform():
    directions = approximate.orthogonal(3 * D, D)
    for group in functional.normalize(directions, dim=1).split(D):
        error = (group @ group.T - torch.eye(D)).abs().max()
        assert error < D * torch.finfo(torch.float32).eps
    first = approximate.orthogonal(512 * D, D)[::D, 0]
    assert first.mean().abs() < 5 * first.std() / 512**0.5


@pytest.mark.parametrize("name", APPROXIMATE)
def test_padding_changes_nothing(name):
    q, k, v = _qkv()
    keep, module = _keep(), attention_of(name, N, D)
    first = module(q, k, v, keep)
    others = [x.clone() for x in (q, k, v)]
    for x in others[0 if name == "reformer" else 1 :]:
        x[1, :, LENGTHS[1] :] = 3 - 2 * x[1, :, LENGTHS[1] :]
    again = module(*others, keep)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1, :, : LENGTHS[1]], again[1, :, : LENGTHS[1]])
    assert not torch.equal(first, module(q, k, v))


@pytest.mark.parametrize("name", APPROXIMATE)
def test_gradients_dropout_and_seeds(name):
    q, k, v = (x.requires_grad_() for x in _qkv())
    module = attention_of(name, N, D)
    assert torch.equal(module(q, k, v), attention_of(name, N, D)(q, k, v))
    module(q, k, v).square().sum().backward()
    used = (q, v) if name == "reformer" else (q, k, v)
    assert all(x.grad.isfinite().all() and x.grad.abs().max() > 0 for x in used)
    assert not torch.equal(module(q, k, v, dropout=0.5), module(q, k, v))
