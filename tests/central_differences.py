"""Gradients against central differences, which every differentiable function is held to."""

import numpy as np

EPS = np.finfo(np.float64).eps


def assert_central_differences(function, arrays, gradients, dout, dlse):
    """Raise unless ``gradients`` are those of ``(dout ∘ out).sum() + (dlse ∘ lse).sum()``.

    A step of eps^(1/3) leaves an error of about eps^(2/3) of the loss's magnitude: 4e-11.

    Parameters
    ----------
    function : callable
        ``function(*arrays)`` returns ``(out, lse)``.
    arrays, gradients : sequences of float64 arrays
        Elements of -inf (an lse where nothing is attended) stay, and their gradient is 0.
    dout, dlse : like out and lse
    """

    def loss_terms():
        out, lse = function(*arrays)
        finite = np.where(lse > -np.inf, lse, 0)
        return np.concatenate([(dout * out).ravel(), (dlse * finite).ravel()])

    step, magnitude = EPS ** (1 / 3), 2 * np.abs(loss_terms()).sum()
    for x, grad in zip(arrays, gradients, strict=True):
        assert grad.shape == x.shape
        for at in zip(*np.nonzero(x > -np.inf), strict=True):
            kept = x[at]
            x[at] = kept + step
            above = loss_terms()
            x[at] = kept - step
            below = loss_terms()
            x[at] = kept
            difference = (above - below).sum() / (2 * step)
            assert abs(difference - grad[at]) <= EPS ** (2 / 3) * magnitude
        assert not grad[np.isneginf(x)].any()
