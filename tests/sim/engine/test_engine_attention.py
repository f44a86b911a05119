"""What the engine sees in a whole kernel: a small attention forward and seventeen faults.

The kernel is the plainest form of Algorithm 1 (16 × 16 threads, one thread per score), so
every fault here is one that a GPU might forgive on the day of the test.
"""

import math

import numpy as np
import pytest
from mutants import Mutant, rebuilt
from numba import cuda, float32

from nbflash import testing
from nbflash.cuda import simulator as sim
from nbflash.reference import attention

TILE = 16
NEG_INF = np.float32(-math.inf)


def forward(q, k, v, out, lse, scale, nk, causal):
    sQ = cuda.shared.array((TILE, TILE + 1), float32)
    sK = cuda.shared.array((TILE, TILE + 1), float32)
    sV = cuda.shared.array((TILE, TILE + 1), float32)
    sP = cuda.shared.array((TILE, TILE + 1), float32)
    row_max = cuda.shared.array(TILE, float32)
    row_sum = cuda.shared.array(TILE, float32)
    alpha = cuda.shared.array(TILE, float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row = cuda.blockIdx.x * TILE + ty
    zero = np.float32(0)
    sQ[ty, tx] = q[row, tx] if row < len(q) else zero
    if tx == 0:
        row_max[ty], row_sum[ty] = NEG_INF, zero
    acc = zero
    for n0 in range(0, nk, TILE):
        cuda.syncthreads()
        exists = n0 + ty < nk
        sK[ty, tx] = k[n0 + ty, tx] if exists else zero
        sV[ty, tx] = v[n0 + ty, tx] if exists else zero
        cuda.syncthreads()
        s = zero
        for i in range(TILE):
            s = cuda.fma(sQ[ty, i], sK[tx, i], s)
        s = s * scale
        if n0 + tx >= nk or (causal and n0 + tx > row):
            s = NEG_INF
        sP[ty, tx] = s
        cuda.syncthreads()
        if tx == 0:
            m, m_new = row_max[ty], row_max[ty]
            for j in range(TILE):
                m_new = max(m_new, sP[ty, j])
            a = np.exp(m - m_new)
            l = row_sum[ty] * a
            for j in range(TILE):
                p = np.exp(sP[ty, j] - m_new)
                sP[ty, j] = p
                l += p
            row_max[ty], row_sum[ty], alpha[ty] = m_new, l, a
        cuda.syncthreads()
        acc = acc * alpha[ty]
        for j in range(TILE):
            acc = cuda.fma(sP[ty, j], sV[j, tx], acc)
    if row < len(q):
        out[row, tx] = acc / row_sum[ty]
        if tx == 0:
            lse[row] = row_max[ty] + np.log(row_sum[ty])


SYNC = "        cuda.syncthreads()\n"
FAULTS = [
    *(
        Mutant(f"{what} the barrier", SYNC, "", which=which, count=4)
        for which, what in enumerate(
            ("V is overwritten without", "K is read without", "P without", "alpha without")
        )
    ),
    Mutant("keys past the end count", "n0 + tx >= nk or ", ""),
    Mutant("K is not zero filled", "k[n0 + ty, tx] if exists else zero", "k[n0 + ty, tx]"),
    Mutant(
        "V tail is stale",
        "v[n0 + ty, tx] if exists else zero",
        "v[n0 + ty, tx] if exists else sV[ty, tx]",
    ),
    Mutant("query tail is read", "q[row, tx] if row < len(q) else zero", "q[row, tx]"),
    Mutant("output tail is written", "    if row < len(q):\n", "    if True:\n"),
    Mutant(
        "the maximum starts at nothing",
        "row_max[ty], row_sum[ty] = NEG_INF, zero",
        "row_sum[ty] = zero",
    ),
    Mutant("O is not rescaled", "acc = acc * alpha[ty]", "acc = acc * 1"),
    Mutant("l is not rescaled", "l = row_sum[ty] * a", "l = row_sum[ty]"),
    Mutant("causal off by one", "n0 + tx > row", "n0 + tx >= row"),
    Mutant("K is read transposed", "sK[tx, i]", "sK[i, tx]"),
    Mutant("a negative index", "sP[ty, tx] = s\n", "sP[ty - TILE, tx] = s\n"),
    Mutant(
        "half the block at another barrier",
        SYNC + "        acc",
        "        if ty < 8:\n    " + SYNC + "        else:\n    " + SYNC + "        acc",
    ),
    Mutant(
        "half the block at no barrier",
        SYNC + "        acc",
        "        if ty < 8:\n    " + SYNC + "        acc",
    ),
]
SHAPES = {"8": (8, False), "20": (20, False), "33-causal": (33, True)}


def check(kernel, n, causal):
    """Run the kernel on ``n`` tokens; raise if it is wrong."""
    q, k, v, _ = testing.make_qkv(1, n, n, 1, 1, TILE, np.float32, seed=n)
    out = testing.poisoned((n, TILE), np.float32)
    lse = testing.poisoned((n,), np.float32)
    scale = np.float32(TILE**-0.5)
    heads = [x[0, :, 0] for x in (q, k, v)]
    cuda.jit(kernel)[-(-n // TILE), (TILE, TILE)](*heads, out, lse, scale, n, causal)
    mask = np.tri(n, dtype=bool)[None, None] if causal else None
    expected, expected_lse = attention(q, k, v, mask, float(scale))
    low, low_lse = testing.low_precision(q, k, v, mask, scale)
    testing.assert_within_reference(out[None, :, None], expected, low, name="out")
    testing.assert_within_reference(lse[None, None], expected_lse, low_lse, name="lse")


def check_all(kernel):
    for n, causal in SHAPES.values():
        check(kernel, n, causal)


@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("n", "causal"), SHAPES.values(), ids=SHAPES)
def test_correct_kernel(n, causal, seed, race):
    with sim.options(seed=seed, race=race):
        check(forward, n, causal)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault_is_caught(fault):
    kernel = rebuilt(forward, fault)
    with pytest.raises((sim.SimError, AssertionError)):
        check_all(kernel)
