"""Bitwise reproducibility over many runs, under load; and what is not reproducible differs."""

import cupy
import numpy as np
import pytest
from device_runs import (
    FACTORS,
    ON_HOPPER,
    ON_TENSOR_CORES,
    RESULTS,
    USUAL,
    bits,
    by_impl,
    count_from,
    differing,
    expected,
    gallery,
    host,
    make_qkv,
    run,
)
from reference import widened

import nbflash
from nbflash.backends.sm90.backward import choice
from nbflash.backends.sm90.backward.choice import in_two_passes
from nbflash.testing import assert_blocks_within_reference

RERUNS = count_from("NBFLASH_RERUNS", 100)
BLOCK = 64
DQ = RESULTS.index("dq")
SIMT = (
    ("dense", "float32", 64, 2, (8, 8), 700),
    ("causal", "float32", 128, 1, (12, 4), 1000),
    ("butterfly", "float16", 64, 2, (4, 1), 1031),
    ("dead-scattered", "bfloat16", 128, 3, (6, 2), 333),
    ("per-batch-per-head", "float32", 64, 2, (6, 6), 515),
    ("window", "float64", 64, 1, (4, 4), 400),
    ("bigbird", "float16", 128, 1, (8, 2), 900),
    ("causal", "float32", 256, 1, (4, 4), 300),
)
# What passes of tensor cores can do, each with a mask of whole tiles, of intervals, of bits or of
# rows that see nothing.
HALF = (
    ("dense", "bfloat16", 128, 2, (16, 16), 2048),
    ("causal", "float16", 64, 2, (16, 4), 1500),
    ("bigbird", "bfloat16", 128, 2, (8, 2), 1031),
    ("dead-scattered", "float16", 8, 3, (6, 2), 333),
    ("per-batch-per-head", "bfloat16", 64, 2, (6, 6), 515),
    ("window", "float16", 72, 1, (4, 1), 700),
    ("butterfly", "bfloat16", 96, 2, (4, 4), 1031),
    ("random", "float16", 128, 1, (8, 1), 900),
    ("dead-keys", "float16", 64, 2, (4, 2), 129),
    ("padding", "bfloat16", 128, 3, (3, 1), 257),
    ("checkerboard", "float16", 64, 1, (2, 2), 63),
    ("documents-causal", "bfloat16", 64, 40, (2, 1), 200),
)
WIDE = (
    ("dense", "bfloat16", 192, 2, (10, 10), 1031),
    ("causal", "bfloat16", 256, 2, (8, 2), 1031),
    ("bigbird", "float16", 192, 1, (8, 1), 900),
    ("dead-scattered", "float16", 256, 2, (4, 4), 700),
    ("per-batch-per-head", "bfloat16", 136, 2, (6, 3), 515),
    ("window", "bfloat16", 200, 1, (4, 2), 700),
    ("butterfly", "float16", 256, 2, (4, 1), 1031),
    ("random", "bfloat16", 256, 1, (8, 8), 900),
    ("padding", "float16", 192, 3, (3, 1), 129),
    ("checkerboard", "bfloat16", 192, 1, (2, 2), 65),
    ("dead-keys", "bfloat16", 256, 1, (4, 4), 257),
    ("documents-causal", "float16", 192, 40, (2, 1), 200),
)


COLUMNS = ("impl", "name", "dtype", "head_dim", "batch", "heads", "n")


def rows(impl, table, marks=()):
    return [
        pytest.param(impl, *x, id="-".join(map(str, (impl, *x[:3]))), marks=marks) for x in table
    ]


def rows_of_tensor_cores(table):
    return rows("sm80", table, ON_TENSOR_CORES) + rows("sm90", table, ON_HOPPER)


HALF_ROWS, WIDE_ROWS = map(rows_of_tensor_cores, (HALF, WIDE))


def others(results):
    """Without dQ."""
    return (*results[:DQ], *results[DQ + 1 :])


def problem(name, dtype, head_dim, batch, heads, n):
    mask = gallery(n, n, batch=batch, heads=heads[0])[name]
    return make_qkv(batch, n, n, *heads, head_dim, dtype), mask


@pytest.mark.parametrize(COLUMNS, rows("simt", SIMT) + HALF_ROWS + WIDE_ROWS)
def test_reruns_give_the_same_bits(impl, name, dtype, head_dim, batch, heads, n):
    inputs, mask = problem(name, dtype, head_dim, batch, heads, n)
    options = {"deterministic": True, "impl": impl}
    first = run(inputs, mask, **options)
    wrong = sum(differing(run(inputs, mask, **options), first) for _ in range(RERUNS))
    assert int(wrong) == 0


@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize(COLUMNS, HALF_ROWS)
def test_races_in_one_pass(impl, name, dtype, head_dim, batch, heads, n):
    """dQ is a sum in the order of arrival: the worst of it, element by element, is in its budget.

    Everything else has the same bits in every one of the runs.
    """
    inputs, mask = problem(name, dtype, head_dim, batch, heads, n)
    first = run(inputs, mask, impl=impl)
    exact, low = (x[DQ] for x in expected(inputs, mask))
    there, worst, wrong = cupy.asarray(exact), cupy.zeros(exact.shape), 0
    for _ in range(10 * RERUNS):
        again = run(inputs, mask, impl=impl)
        wrong = wrong + differing(others(again), others(first))
        worst = cupy.maximum(worst, abs(widened(again[DQ], np.float64) - there))
    assert int(wrong) == 0
    values = exact + host(worst), exact, low
    assert_blocks_within_reference(*values, BLOCK, name="dq", factor=FACTORS[DQ])


@pytest.mark.usefixtures("one_pass")
@by_impl
def test_only_dq_of_the_atomic_form_differs(impl):
    """Otherwise the tests above could not fail."""
    inputs = make_qkv(2, 4096, 4096, 8, 8, 64, USUAL[impl])
    first, runs = run(inputs, impl=impl), [run(inputs, impl=impl) for _ in range(20)]
    assert int(sum(differing([x[DQ]], [first[DQ]]) for x in runs)) > 0
    assert int(sum(differing(others(x), others(first)) for x in runs)) == 0


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [
        ("simt", "float32"),
        ("simt", "float16"),
        pytest.param("sm80", "float16", marks=ON_TENSOR_CORES),
        pytest.param("sm90", "float16", marks=ON_HOPPER),
        pytest.param("sm90", "bfloat16", marks=ON_HOPPER),
    ],
)
def test_large_batches_under_memory_load(impl, dtype):
    """Sixty batch elements while half of the free memory is written over and over."""
    inputs = make_qkv(60, 200, 239, 4, 2, 64, dtype)
    mask, options = gallery(200, 239)["causal"], {"deterministic": True, "impl": impl}
    first = run(inputs, mask, **options)
    load = cupy.empty(min(cupy.cuda.runtime.memGetInfo()[0] // 2, 8 << 30), np.uint8)
    beside, wrong = cupy.cuda.Stream(non_blocking=True), 0
    for i in range(RERUNS):
        with beside:
            load.fill(i)
        wrong = wrong + differing(run(inputs, mask, **options), first)
    beside.synchronize()
    assert int(wrong) == 0


@ON_HOPPER
@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_short_rows_take_two_passes_on_hopper(head_dim, monkeypatch):
    """Unasked, where two are faster: the bits are those of the deterministic mode."""
    monkeypatch.setattr(choice, "in_two_passes", in_two_passes)
    inputs, mask = make_qkv(1, 1024, 1024, 2, 2, head_dim, "float16"), gallery(1024, 1024)["local"]
    default, asked = (run(inputs, mask, impl="sm90", deterministic=x) for x in (False, True))
    assert bits(default) == bits(asked)


@by_impl
def test_a_plan_gives_the_bits_of_the_function(impl):
    q, k, v, dout = make_qkv(1, 300, 300, 4, 4, 64, USUAL[impl])
    mask = gallery(300, 300)["butterfly"]
    whole = run((q, k, v, dout), mask, deterministic=True, impl=impl)
    plan = nbflash.plan(q, k, v, mask, impl=impl)
    out, lse = plan(q, k, v)
    gradients = plan.backward(dout, q, k, v, out, lse, deterministic=True)
    assert bits((out, lse, *gradients)) == bits(whole)
