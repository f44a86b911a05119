"""Calls and array layouts that the tests of the API share."""

import numpy as np
import pytest

import nbflash
from nbflash.testing import poisoned

IMPLS = ("cpu", "reference")
by_impl = pytest.mark.parametrize("impl", IMPLS)


def attend(impl, q, k, v, mask=None, **options):
    return nbflash.attention(q, k, v, mask, return_lse=True, impl=impl, **options)


def run_all(impl, q, k, v, dout, mask=None, **options):
    out, lse = attend(impl, q, k, v, mask, **options)
    gradients = nbflash.attention_backward(dout, q, k, v, out, lse, mask, impl=impl, **options)
    return out, lse, *gradients


def heads_first(x):
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def padded(x):
    wide = poisoned((*x.shape[:3], x.shape[3] + 3), x.dtype)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


def backwards(x):
    return np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]


def every_other(x):
    wide = poisoned((x.shape[0], 2 * x.shape[1], *x.shape[2:]), x.dtype)
    wide[:, ::2] = x
    return wide[:, ::2]


LAYOUTS = (heads_first, padded, backwards, every_other)
