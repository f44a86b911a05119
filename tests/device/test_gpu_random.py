"""Seeded random problems, every tensor with its own layout, every block between NaN margins.

Run one again with ``-k seed-17``; NBFLASH_RANDOM_CASES sets how many there are.
"""

from dataclasses import dataclass

import cupy
import numpy as np
import pytest
from device_runs import (
    DTYPES,
    UNALIGNED,
    Framed,
    Guarded,
    assert_close,
    bits,
    count_from,
    expected,
    gallery,
    make_qkv,
    run,
)

from nbflash import testing

COUNT = count_from("NBFLASH_RANDOM_CASES", 256)
NAMES = tuple(gallery(8, 8))
COMBINATIONS = (
    *UNALIGNED,
    ("float32", 5),
    ("float32", 128),
    ("float16", 59),
    ("float16", 128),
    ("bfloat16", 17),
    ("bfloat16", 64),
    ("float64", 64),
)


@dataclass(frozen=True)
class Configuration:
    """One problem, drawn from a seed."""

    mask: str
    batch: int
    nq: int
    nk: int
    heads: int
    heads_kv: int
    dtype: str
    head_dim: int
    aligned: bool
    deterministic: bool
    scale: float

    @classmethod
    def draw(cls, rng):
        usable = [c for c in COMBINATIONS if c[0] in DTYPES]
        dtype, head_dim = usable[rng.integers(len(usable))]
        heads_kv, ratio = (int(n) for n in rng.integers(1, 5, 2))
        nq, nk = (int(n) for n in np.exp(rng.uniform(0, np.log(400), 2)))
        return cls(
            mask=NAMES[rng.integers(len(NAMES))],
            batch=int(rng.integers(1, 4)),
            nq=nq,
            nk=nk,
            heads=heads_kv * ratio,
            heads_kv=heads_kv,
            dtype=dtype,
            head_dim=head_dim,
            # elsewhere, what reads single elements is not compiled ahead
            aligned=(dtype, head_dim) not in UNALIGNED or bool(rng.integers(2)),
            deterministic=bool(rng.integers(2)),
            scale=float(rng.uniform(-1, 1) * 2 * head_dim**-0.5),
        )


@pytest.mark.parametrize("seed", [pytest.param(n, id=f"seed-{n}") for n in range(COUNT)])
def test_random_problem(seed):
    rng = np.random.default_rng(seed)
    case = Configuration.draw(rng)
    print(case)
    mask = gallery(case.nq, case.nk, batch=case.batch, heads=case.heads)[case.mask]
    plain = make_qkv(
        *(case.batch, case.nq, case.nk, case.heads, case.heads_kv, case.head_dim),
        case.dtype,
        seed,
    )
    quantum = 16 // plain[0].itemsize if case.aligned else 1
    framed = [Framed(x, rng, quantum) for x in plain]
    nan = cupy.asarray(testing.poisoned(plain[0].shape, plain[0].dtype))
    target, guarded = Framed(nan, rng), Guarded()
    with cupy.cuda.using_allocator(guarded):
        got = run(
            [f.x for f in framed],
            mask,
            scale=case.scale,
            deterministic=case.deterministic,
            out=target.x,
        )
    guarded.assert_margins_untouched()
    for each in (*framed, target):
        each.assert_gaps_untouched()
    assert bits(f.x for f in framed) == bits(plain), "an input has changed"
    assert_close(got, *expected(plain, mask, case.scale))


def test_margins_that_are_written_are_noticed():
    guarded = Guarded()
    with cupy.cuda.using_allocator(guarded):
        block = cupy.empty(4, np.float32)
    guarded.assert_margins_untouched()
    beyond = cupy.ndarray((5,), np.float32, block.data)
    beyond[4] = 0
    with pytest.raises(AssertionError, match="written outside a block"):
        guarded.assert_margins_untouched()


def test_gaps_that_are_written_are_noticed():
    framed = Framed(cupy.ones((2, 3, 2, 4), np.float32), np.random.default_rng(0))
    framed.assert_gaps_untouched()
    framed._buffer[0] = 0
    with pytest.raises(AssertionError, match="written between the rows"):
        framed.assert_gaps_untouched()


def test_layouts_give_the_bits_of_contiguous_arrays():
    """Aligned layouts take the same kernels as contiguous arrays do."""
    mask, plain = gallery(150, 170)["causal"], make_qkv(2, 150, 170, 4, 2, 64, "float32")
    whole = bits(run(plain, mask, deterministic=True))
    for seed in range(8):
        rng = np.random.default_rng(seed)
        moved = [Framed(x, rng, 4).x for x in plain]
        assert bits(run(moved, mask, deterministic=True)) == whole
