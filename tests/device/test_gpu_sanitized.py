"""Small problems that reach every part of the kernels: what compute-sanitizer runs.

A tile or two, few heads. Part of the ordinary tier too; ``sanitize.py`` runs it under each tool.
Inputs come from the host and nothing but nbflash's own kernels computes on the device.
"""

import cupy
import numpy as np
import pytest
from device_runs import DTYPES, assert_close, gallery, run

from nbflash import config, reference, testing

CASES = [
    ("dense", (1, 1), 64, "float32", (1, 1)),
    ("causal", (70, 70), 64, "float32", (2, 1)),
    ("causal", (129, 130), 64, "float32", (1, 1)),
    ("dead-scattered", (65, 33), 5, "float32", (2, 2)),
    ("checkerboard", (40, 140), 64, "float16", (1, 1)),
    ("butterfly", (100, 100), 64, "bfloat16", (2, 1)),
    ("per-batch-per-head", (33, 40), 64, "float64", (2, 2)),
    ("padding", (20, 150), 128, "float32", (2, 1)),
    ("empty", (20, 20), 64, "float32", (1, 1)),
    ("window", (40, 40), 256, "float32", (1, 1)),
]


HOPPER = [
    ("causal", (130, 130), 64, "bfloat16", (2, 1)),
    ("window", (70, 200), 128, "float16", (1, 1)),
    ("dead-scattered", (65, 33), 72, "float16", (2, 2)),
    ("checkerboard", (40, 140), 64, "bfloat16", (1, 1)),
    ("dense", (300, 300), 128, "bfloat16", (1, 1)),
    ("padding", (20, 150), 256, "float16", (2, 1)),
    ("empty", (20, 20), 64, "float16", (1, 1)),
]

FORMS = pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])


def assert_within_budget(results, inputs, mask):
    q, k, v, dout = inputs
    ref = reference.attention(q, k, v, mask) + reference.attention_backward(dout, q, k, v, mask)
    low = testing.low_precision(q, k, v, mask)
    low += testing.low_precision_backward(dout, q, k, v, mask)
    assert_close(results, ref, low)


@FORMS
@pytest.mark.parametrize(("name", "shape", "head_dim", "dtype", "heads"), CASES)
def test_kernels(name, shape, head_dim, dtype, heads, deterministic):
    mask = gallery(*shape, heads=heads[0])[name]
    inputs = testing.make_qkv(mask.batch or 1, *shape, *heads, head_dim, DTYPES[dtype])
    results = run([cupy.asarray(x) for x in inputs], mask, deterministic=deterministic)
    assert_within_budget(results, inputs, mask)


@FORMS
@pytest.mark.skipif(bool(config.why_not_here("sm90")), reason="needs a Hopper GPU")
@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize(("name", "shape", "head_dim", "dtype", "heads"), HOPPER)
def test_hopper(name, shape, head_dim, dtype, heads, deterministic):
    mask = gallery(*shape, heads=heads[0])[name]
    inputs = testing.make_qkv(mask.batch or 1, *shape, *heads, head_dim, DTYPES[dtype])
    inputs_there = [cupy.asarray(x) for x in inputs]
    results = run(inputs_there, mask, impl="sm90", deterministic=deterministic)
    assert_within_budget(results, inputs, mask)


@FORMS
def test_rows_that_are_read_one_element_at_a_time(deterministic):
    mask = gallery(70, 40)["causal"]
    inputs = testing.make_qkv(1, 70, 40, 2, 1, 64, np.float32)
    moved = []
    for x in inputs:
        padded = np.pad(x, ((0, 0),) * 3 + ((1, 0),), constant_values=np.nan)
        moved.append(cupy.asarray(padded)[..., 1:])
    assert_within_budget(run(moved, mask, deterministic=deterministic), inputs, mask)


@FORMS
def test_garbage_between_the_keys(deterministic):
    """Of the threads of a warp, some find the NaN and some do not."""
    mask = gallery(70, 150)["dead-keys"]
    inputs = testing.make_qkv(1, 70, 150, 2, 1, 64, np.float32)
    dirty = [x.copy() for x in inputs]
    dead = ~mask.dense().any(axis=0)
    for x in dirty[1:3]:
        x[:, dead] = np.nan
    results = run([cupy.asarray(x) for x in dirty], mask, deterministic=deterministic)
    assert_within_budget(results, inputs, mask)
