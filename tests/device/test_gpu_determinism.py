"""Bitwise reproducibility over many runs, under load; and what is not reproducible differs."""

import cupy
import numpy as np
import pytest
from device_runs import bits, count_from, differing, gallery, make_qkv, run

import nbflash

RERUNS = count_from("NBFLASH_RERUNS", 100)
CONFIGURATIONS = (
    ("dense", "float32", 64, 2, (8, 8), 700),
    ("causal", "float32", 128, 1, (12, 4), 1000),
    ("butterfly", "float16", 64, 2, (4, 1), 1031),
    ("dead-scattered", "bfloat16", 128, 3, (6, 2), 333),
    ("per-batch-per-head", "float32", 64, 2, (6, 6), 515),
    ("window", "float64", 64, 1, (4, 4), 400),
    ("bigbird", "float16", 128, 1, (8, 2), 900),
    ("causal", "float32", 256, 1, (4, 4), 300),
)


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "batch", "heads", "n"),
    CONFIGURATIONS,
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_reruns_give_the_same_bits(name, dtype, head_dim, batch, heads, n):
    mask = gallery(n, n, batch=batch, heads=heads[0])[name]
    inputs = make_qkv(batch, n, n, *heads, head_dim, dtype)
    first = run(inputs, mask, deterministic=True)
    wrong = sum(differing(run(inputs, mask, deterministic=True), first) for _ in range(RERUNS))
    assert int(wrong) == 0


def test_only_dq_of_the_atomic_form_differs():
    """Otherwise the test above could not fail."""
    inputs = make_qkv(2, 4096, 4096, 8, 8, 64, "float32")
    first, runs = run(inputs), [run(inputs) for _ in range(20)]
    by_result = [int(sum(differing([x[i]], [first[i]]) for x in runs)) for i in range(len(first))]
    assert by_result[2] > 0
    assert [by_result[i] for i in (0, 1, 3, 4)] == [0] * 4


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_large_batches_under_memory_load(dtype):
    """Sixty batch elements while half of the free memory is written over and over."""
    inputs = make_qkv(60, 200, 239, 4, 2, 64, dtype)
    mask = gallery(200, 239)["causal"]
    first = run(inputs, mask, deterministic=True)
    load = cupy.empty(min(cupy.cuda.runtime.memGetInfo()[0] // 2, 8 << 30), np.uint8)
    beside, wrong = cupy.cuda.Stream(non_blocking=True), 0
    for i in range(RERUNS):
        with beside:
            load.fill(i)
        wrong = wrong + differing(run(inputs, mask, deterministic=True), first)
    beside.synchronize()
    assert int(wrong) == 0


def test_a_plan_gives_the_bits_of_the_function():
    q, k, v, dout = make_qkv(1, 300, 300, 4, 4, 64, "float32")
    mask = gallery(300, 300)["butterfly"]
    whole = run((q, k, v, dout), mask, deterministic=True)
    plan = nbflash.plan(q, k, v, mask, impl="simt")
    out, lse = plan(q, k, v)
    gradients = plan.backward(dout, q, k, v, out, lse, deterministic=True)
    assert bits((out, lse, *gradients)) == bits(whole)
