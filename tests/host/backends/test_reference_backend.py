"""The specification as an implementation: every argument arrives at `nbflash.reference`."""

import numpy as np
import pytest

import masks
import nbflash
from nbflash import reference, scores
from nbflash.testing import make_qkv

N = 24
Q, K, V, DOUT = make_qkv(1, N, N, 2, 1, 8, np.float64)
MASK = masks.window(N, left=9, right=2)
SCORE = scores.bias(np.random.default_rng(0).standard_normal((1, 2, 1, N)))
DLSE = np.random.default_rng(1).standard_normal((1, 2, N))
OPTIONS = {"scale": 0.2, "score": SCORE, "dropout": 0.25, "seed": (3, 5)}
OUT, LSE = reference.attention(Q, K, V, MASK, **OPTIONS)


def forward(module, mask, how, **more):
    how.pop("dlse")
    if module is nbflash:
        more |= {"return_lse": True}
    return module.attention(Q, K, V, mask, **how, **more)


def backward(module, mask, how, **more):
    results = (OUT, LSE) if module is nbflash else ()
    return module.attention_backward(DOUT, Q, K, V, *results, mask, **how, **more)


def of_score(module, mask, how, **more):
    results = (OUT, LSE) if module is nbflash else ()
    return module.score_backward(DOUT, Q, K, V, *results, mask, **how, **more)


@pytest.mark.parametrize("call", [forward, backward, of_score])
def test_every_argument_arrives(call):
    """All together, and each one changes what another one would return."""
    given = OPTIONS | {"dlse": DLSE}
    got = call(nbflash, MASK, dict(given), impl="reference")
    for x, want in zip(got, call(reference, MASK, dict(given)), strict=True):
        np.testing.assert_array_equal(x, want)
    others = {"mask": masks.causal(N), "scale": 0.3, "dropout": 0.5, "seed": (4, 5), "dlse": -DLSE}
    others |= {"score": scores.bias(np.zeros((1, 2, 1, N)))}
    for name in others.keys() - ({"dlse"} if call is forward else set()):
        how = {"mask": MASK} | given | {name: others[name]}
        changed = call(reference, how.pop("mask"), how)
        assert any((a != b).any() for a, b in zip(got, changed, strict=True)), name
