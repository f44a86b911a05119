"""Parity with the reference: every mask of the gallery at every dtype and head_dim.

A covering design: lengths around the tile sizes, group sizes and signs of the scale are dealt out
over it. Each problem runs forward and both forms of the backward pass.
"""

import numpy as np
import pytest
from device_runs import (
    GRID,
    RESULTS,
    assert_close,
    bits,
    by_mode,
    check,
    count_from,
    expected,
    gallery,
    make_qkv,
    run,
)

NAMES = tuple(gallery(8, 8))
LENGTHS = (1, 2, 31, 63, 64, 65, 127, 128, 129, 255, 257)
HEADS = ((2, 2), (2, 1), (3, 1), (4, 1), (6, 2), (8, 1))
ROUNDS = count_from("NBFLASH_DEVICE_ROUNDS", 2)


def cases():
    for round_ in range(ROUNDS):
        for i, name in enumerate(NAMES):
            for j, (dtype, head_dim) in enumerate(GRID):
                nq = LENGTHS[(i + j + 3 * round_) % len(LENGTHS)]
                nk = LENGTHS[(2 * i + 3 * j + 5 * round_) % len(LENGTHS)]
                heads = HEADS[(i + 2 * j + round_) % len(HEADS)]
                scale = -0.5 * head_dim**-0.5 if (i + j) % 5 == 0 else None
                yield name, dtype, head_dim, nq, nk, *heads, scale


CASES = tuple(cases())


def label(case):
    name, dtype, head_dim, nq, nk, heads, heads_kv, scale = case
    sign = "-negative" if scale else ""
    return f"{name}-{dtype}-d{head_dim}-{nq}x{nk}-{heads}over{heads_kv}{sign}"


@pytest.mark.parametrize("seed", [pytest.param(n, id=label(c)) for n, c in enumerate(CASES)])
def test_forward_and_backward(seed):
    name, dtype, head_dim, nq, nk, heads, heads_kv, scale = CASES[seed]
    mask = gallery(nq, nk, heads=heads if name.startswith("per-") else 2)[name]
    inputs = make_qkv(mask.batch or 1, nq, nk, heads, heads_kv, head_dim, dtype, seed)
    yardsticks = expected(inputs, mask, scale)
    assert_close(run(inputs, mask, scale=scale), *yardsticks)
    two_passes = run(inputs, mask, scale=scale, deterministic=True)
    assert_close(two_passes, *yardsticks, only=RESULTS[2:])


@pytest.mark.parametrize("name", ["dense", "causal", "butterfly", "local", "bigbird", "window"])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 64), ("float16", 128)])
@by_mode
def test_longer_sequences(name, dtype, head_dim, deterministic):
    mask = gallery(1031, 1500)[name]
    inputs = make_qkv(1, 1031, 1500, 4, 2, head_dim, dtype)
    check(inputs, mask, deterministic=deterministic)


@pytest.mark.parametrize("heads", [(1, 1), (12, 12), (12, 4), (32, 1)])
def test_many_heads_and_batches(heads):
    inputs = make_qkv(7, 70, 90, *heads, 64, "float32")
    check(inputs, gallery(70, 90)["causal"])


@pytest.mark.parametrize("b", [0, 3, 6])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 64), ("bfloat16", 96)])
@pytest.mark.parametrize("name", ["causal", "dead-scattered"])
def test_batch_element_does_not_depend_on_its_batch(b, name, dtype, head_dim):
    mask, inputs = gallery(150, 130)[name], make_qkv(7, 150, 130, 4, 2, head_dim, dtype)
    whole = run(inputs, mask, deterministic=True)
    alone = run([x[b : b + 1].copy() for x in inputs], mask, deterministic=True)
    assert bits(alone) == bits(x[b : b + 1] for x in whole)


@pytest.mark.parametrize(
    ("q_shape", "kv_shape"),
    [
        ((1, 5, 2, 32), (1, 0, 2, 32)),
        ((1, 0, 2, 32), (1, 5, 1, 32)),
        ((0, 5, 2, 32), (0, 5, 2, 32)),
    ],
)
def test_sizes_of_zero(q_shape, kv_shape):
    import cupy

    import nbflash

    q, dout = (cupy.ones(q_shape, np.float32) for _ in range(2))
    k, v = (cupy.ones(kv_shape, np.float32) for _ in range(2))
    out, lse = nbflash.attention(q, k, v, impl="simt", return_lse=True)
    dq, dk, dv = nbflash.attention_backward(dout, q, k, v, out, lse, impl="simt")
    assert (out.shape, dq.shape, dk.shape, dv.shape) == (q_shape, q_shape, kv_shape, kv_shape)
    assert bool(cupy.isneginf(lse).all())
    assert not any(bool(x.any()) for x in (out, dq, dk, dv))
