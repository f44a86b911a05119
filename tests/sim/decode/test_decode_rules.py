"""Windows and scores of `decode` in the kernels without tensor cores and by mma."""

from functools import partial

import decode_runs
import decode_sm80_runs
import ml_dtypes
import numpy as np
import pytest
from decode_cases import DTYPES, check, check_scored, contiguous, hide, keep_of
from decode_rules import Kernel, before_the_first_key, scored, windowed

import masks
import nbflash
from nbflash import scores
from nbflash.definitions.quantised import dequantise, quantise


def on_simt(q, k, v, lengths, table, mask, **named):
    """8 slots and 16 keys a tile, of d=64."""
    how = {"warps": 2, "keys": 2, "queries": 2, "splits": 2}
    return decode_runs.decoded(q, k, v, lengths, block_table=table, mask=mask, **how, **named)


KERNELS = {
    "simt": Kernel(on_simt, 16, np.float32, head_dim=64),
    "sm80": Kernel(decode_sm80_runs.decoded, 32, np.float16, (6, 2)),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


@pytest.mark.parametrize("name", ["own", "edge", "before-an-edge", "last-tile", "long"])
@each_kernel
def test_windows(kernel, name):
    windowed(kernel, name)


@pytest.mark.parametrize("name", ["own", "last-tile", "both", "right"])
@each_kernel
def test_windows_of_masks(kernel, name):
    windowed(kernel, name, masked=True)


@each_kernel
def test_a_window_of_many_rows(kernel):
    """Of several blocks, whose tokens differ."""
    lengths, nq, window = np.array([70], np.int32), 20, (9, None)
    q, k, v = kernel.problem(nq, lengths, 80)
    keep = keep_of(lengths, nq, window)
    got = kernel.run(q, *hide(k, v, lengths, keep), lengths, None, None, window=window)
    check(got, q, k, v, lengths, keep)


@pytest.mark.parametrize("name", ["softcap", "alibi", "bias", "keys", "place"])
@each_kernel
def test_scores(kernel, name):
    scored(kernel, name)


@pytest.mark.parametrize(
    ("name", "window", "masked", "scale"),
    [("place", (4, 1), True, None), ("bias", None, True, -0.3), ("alibi", (4, None), False, 0.3)],
)
@each_kernel
def test_scores_with_windows_and_masks(kernel, name, window, masked, scale):
    """Tokens before the first key attend nothing, whatever the mask says."""
    scored(kernel, name, window=window, masked=masked, scale=scale)


@pytest.mark.design
@pytest.mark.parametrize("before", [1, 2])
@each_kernel
def test_tokens_before_the_first_key(kernel, before):
    """All of a block of them, or some."""
    before_the_first_key(kernel, before)


@pytest.mark.parametrize("stored", [np.int8, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("impl", ["simt", "sm80"])
def test_a_window_over_a_cache_of_8_bits(impl, stored):
    """Keys outside have scales that are NaN."""
    lengths = np.array([0, 2, 70], np.int32)
    q, k, v = contiguous(2, (4, 2), 32, np.float16, lengths, 72)
    (k, k_scale), (v, v_scale) = (quantise(np.nan_to_num(x), stored) for x in (k, v))
    real = [dequantise(*x, np.dtype(np.float32)) for x in ((k, k_scale), (v, v_scale))]
    keep = keep_of(lengths, 2, (7, None))
    k_scale, v_scale = hide(k_scale, v_scale, lengths, keep)
    how = {"k_scale": k_scale, "v_scale": v_scale, "window": (7, None), "impl": impl}
    got = nbflash.decode(q, k, v, lengths, return_lse=True, **how)
    check(got, q, *real, lengths, keep)
    how["score"] = scores.alibi([0.5, 0.1, 0.02, 0.3])
    got = nbflash.decode(q, k, v, lengths, return_lse=True, **how)
    check_scored(got, q, *real, lengths, lambda n: how["score"], keep)


@pytest.mark.parametrize("rules", [{}, {"window": (3, 0)}, {"score": scores.alibi(0.1)}])
@pytest.mark.parametrize("impl", ["simt", "sm80"])
def test_lengths_count_up_to_the_columns_of_a_mask(impl, rules):
    """In CUDA memory nobody checks lengths; positions, too, are those of sequences of so many."""
    q, k, v = contiguous(3, (2, 2), 16, DTYPES["f16"], np.array([64], np.int32), 64)
    run = partial(nbflash.decode, q, k, v, mask=masks.causal(3, 24), impl=impl, **rules)
    assert (run([40]) == run([24])).all()


@pytest.mark.parametrize("impl", ["simt", "sm80"])
def test_calls_with_and_without(impl):
    """Each has a plan of its own; the kernel of another window is the same one."""
    lengths = np.array([2, 33, 102], np.int32)
    q, k, v = contiguous(1, (2, 2), 16, DTYPES["f16"], lengths, 120)
    run = partial(nbflash.decode, q, k, v, lengths, impl=impl)
    plain, near = run(), run(window=(3, 0))
    assert (plain != near).any()
    assert (run(window=(120, None)) == plain).all()
    assert (run(score=scores.softcap(1.0)) != plain).any()
    assert (run(mask=masks.dense(1, 120), window=(3, 0)) == near).all()
