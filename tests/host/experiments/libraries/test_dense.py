"""The baseline is attention, where its scores fit."""

import numpy as np
import pytest

import masks
from experiments.harness.backends import open_backend
from experiments.libraries.dense import DenseBaseline, fits_in_memory
from nbflash import reference
from nbflash.testing import (
    assert_within_reference,
    low_precision,
    low_precision_backward,
    make_qkv,
)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dense_baseline_is_attention(dtype, chunk):
    q, k, v, dout = make_qkv(2, 33, 33, 4, 2, 8, dtype, seed=4)
    mask = masks.from_dense(np.random.default_rng(0).random((33, 33)) < 0.3).dense()
    mask[[0, 20]] = False
    baseline = DenseBaseline(open_backend("cpu"), q, k, v, dout, mask)
    baseline.chunk = chunk
    baseline.ds = np.empty((min(chunk, 8), 33, 33), dtype)
    for _ in range(2):
        (out,) = baseline.forward()
        dq, dk, dv = baseline.backward()
    dk, dv = (x.reshape(2, 33, 2, 2, 8).sum(axis=3) for x in (dk, dv))
    exact = (reference.attention(q, k, v, mask)[0],)
    exact += reference.attention_backward(dout, q, k, v, mask)
    low = (low_precision(q, k, v, mask)[0], *low_precision_backward(dout, q, k, v, mask))
    names = ("out", "dq", "dk", "dv")
    for name, got, x, y in zip(names, (out, dq, dk, dv), exact, low, strict=True):
        assert_within_reference(got, x, y, name)
    assert not out[:, [0, 20]].any()


def test_dense_baseline_is_left_out_where_its_scores_do_not_fit():
    backend = open_backend("cpu")
    assert fits_in_memory(backend, (1, 8192, 1, 64), np.dtype(np.float32))
    assert not fits_in_memory(backend, (1, 2**17, 1, 64), np.dtype(np.float32))
