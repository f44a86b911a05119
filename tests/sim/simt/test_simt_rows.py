"""The kernels around the backward pass: delta, and dQ rounded to its storage type."""

import ml_dtypes
import numpy as np
import pytest
from simt_runs import DTYPES

from nbflash.backends.simt.convert_dq import convert_dq_simt_spec
from nbflash.backends.simt.row_statistics import RowConfig, blocks_for, delta_simt_spec
from nbflash.cuda.launch import simulate

WIDE = {"float16": np.float32, "bfloat16": np.float32, "float32": np.float32, "float64": np.float64}


def stored(x):
    """As the kernels get it: flat, bfloat16 as its bits."""
    x = np.ascontiguousarray(x).reshape(-1)
    return x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x


def strides(x):
    return tuple(s // x.itemsize for s in x.strides[:3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 3, 3, 7), (1, 5, 2, 32), (2, 1, 2, 33), (1, 3, 1, 70)]
)
def test_delta_is_the_row_sum_of_dout_and_out_without_dlse(shape, dtype):
    """Integers: exact whatever the order. The layouts differ, and rows do not fill the blocks."""
    batch, nq, heads, head_dim = shape
    rng, wide = np.random.default_rng(head_dim), WIDE[dtype]
    dout, out = (rng.integers(-3, 4, shape).astype(DTYPES[dtype]) for _ in range(2))
    out_t = np.ascontiguousarray(out.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3)
    dlse = rng.integers(-9, 9, (nq, batch, heads)).astype(wide).transpose(1, 2, 0)
    delta = np.full(batch * heads * nq + 1, np.nan, wide)
    flat = stored(dout), stored(out_t.transpose(1, 0, 2, 3)), stored(dlse.transpose(2, 0, 1)), delta
    rows = batch * nq * heads
    arguments = (*flat, strides(dout), strides(out_t), strides(dlse), nq, heads, rows)
    simulate(delta_simt_spec(RowConfig(dtype, head_dim)), blocks_for(rows), arguments)
    exact = (dout.astype(np.float64) * out.astype(np.float64)).sum(axis=-1).transpose(0, 2, 1)
    np.testing.assert_array_equal(delta[:-1].reshape(exact.shape), exact - dlse)
    assert np.isnan(delta[-1])


TIES = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-9, 2**-25, 1.5 * 2**-25, 65520]
NEAR_TIES = [1 + 2**-11 + 2**-20, 1 + 2**-9 + 2**-20, 65519.99, 1e-8]
RANGE = [0.0, -0.0, 1.0, 65504, -7e4, 2**-24, 3e38, 3.4e38, 1e-40, -1e-45, np.inf, -np.inf, np.nan]
HARD = np.array([*TIES, *NEAR_TIES, *RANGE], np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 8, 40])
def test_rounding_is_that_of_numpy(head_dim, dtype):
    """To nearest, ties to even: ties, overflow, subnormals, infinities and NaN."""
    rng, wide = np.random.default_rng(head_dim), WIDE[dtype]
    shape = (2, 3, 2, head_dim)
    source = np.resize(HARD, shape).astype(wide)
    source[1] = rng.standard_normal(shape[1:]).astype(wide)
    target = np.full(int(np.prod(shape)) + 3, np.nan, DTYPES[dtype])
    moved = (head_dim * 2, head_dim * 4, head_dim)  # (queries, batch, heads) in memory
    arguments = (stored(source), stored(target), strides(source), moved, 3, 2, 12)
    simulate(convert_dq_simt_spec(RowConfig(dtype, head_dim)), blocks_for(12), arguments)
    with np.errstate(over="ignore"):
        exact = source.astype(DTYPES[dtype]).transpose(1, 0, 2, 3)
    got = target[:-3].reshape(exact.shape)
    nan = np.isnan(exact.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), nan)
    assert got[~nan].tobytes() == exact[~nan].tobytes()
    assert np.isnan(target[-3:].astype(np.float64)).all()
