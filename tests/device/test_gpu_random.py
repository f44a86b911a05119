"""Seeded random problems, every tensor with its own layout, every block between NaN margins.

Run one again with ``-k seed-17``; NBFLASH_RANDOM_CASES sets how many there are.
"""

from dataclasses import dataclass

import cupy
import numpy as np
import pytest
from compile_ahead import SPECS, problem_of
from device_runs import (
    DTYPES,
    ON_HOPPER,
    ON_TENSOR_CORES,
    UNALIGNED,
    USUAL,
    Framed,
    Guarded,
    assert_close,
    bits,
    by_impl,
    count_from,
    expected,
    gallery,
    make_qkv,
    run,
)

from nbflash import testing

pytestmark = pytest.mark.usefixtures("one_pass")
COUNT = count_from("NBFLASH_RANDOM_CASES", 256)
NAMES = tuple(gallery(8, 8))
COMBINATIONS = {
    "simt": (
        *UNALIGNED,
        ("float32", 5),
        ("float32", 128),
        ("float16", 59),
        ("float16", 128),
        ("bfloat16", 17),
        ("bfloat16", 64),
        ("float64", 64),
    ),
    # Every head_dim, every other one of each 64 in bfloat16.
    "sm90": tuple((("float16", "bfloat16")[(d // 8 + d // 64) % 2], d) for d in range(8, 257, 8)),
}
COMBINATIONS["sm80"] = COMBINATIONS["sm90"][::3]  # a kernel takes 20 s to compile


@dataclass(frozen=True)
class Configuration:
    """One problem, drawn from a seed."""

    impl: str
    seed: int
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
    def draw(cls, impl, seed):
        rng = np.random.default_rng(seed)
        usable = [c for c in COMBINATIONS[impl] if c[0] in DTYPES]
        dtype, head_dim = usable[rng.integers(len(usable))]
        heads_kv, ratio = (int(n) for n in rng.integers(1, 5, 2))
        nq, nk = (int(n) for n in np.exp(rng.uniform(0, np.log(400), 2)))
        return cls(
            impl=impl,
            seed=seed,
            mask=NAMES[rng.integers(len(NAMES))],
            batch=int(rng.integers(1, 4)),
            nq=nq,
            nk=nk,
            heads=heads_kv * ratio,
            heads_kv=heads_kv,
            dtype=dtype,
            head_dim=head_dim,
            # elsewhere, what reads single elements is not there, or not compiled ahead
            aligned=impl != "simt" or (dtype, head_dim) not in UNALIGNED or bool(rng.integers(2)),
            deterministic=bool(rng.integers(2)),
            scale=float(rng.uniform(-1, 1) * 2 * head_dim**-0.5) * bool(rng.integers(16)),
        )

    def framed(self, inputs, rng):
        """q, k, v and dout with layouts of their own, as far as the implementation reads them."""
        quantum = 16 // inputs[0].itemsize if self.aligned else 1
        if self.impl == "simt":
            return [Framed(x, rng, quantum) for x in inputs]
        *qkv, dout = inputs
        quantum_of_dout = 1 if rng.random() < 0.5 else quantum  # it is copied where it has to be
        qkv = [Framed(x, rng, quantum, backwards=0) for x in qkv]
        return [*qkv, Framed(dout, rng, quantum_of_dout)]

    @property
    def drawn_mask(self):
        return gallery(self.nq, self.nk, batch=self.batch, heads=self.heads)[self.mask]


CASES = [
    pytest.param(Configuration.draw(impl, seed), id=f"{impl}-seed-{seed}", marks=marks)
    for impl, marks in (("simt", ()), ("sm80", ON_TENSOR_CORES), ("sm90", ON_HOPPER))
    for seed in range(COUNT)
]


def kernels(case=None, **_):
    """For `compile_ahead`."""
    if case:
        problem = problem_of(case.dtype, case.head_dim, case.aligned, case.scale)
        yield SPECS[case.impl], problem, None, 0.0, case.drawn_mask


@pytest.mark.parametrize("case", CASES)
def test_random_problem(case):
    print(case)
    mask = case.drawn_mask
    sizes = case.batch, case.nq, case.nk, case.heads, case.heads_kv, case.head_dim
    plain = make_qkv(*sizes, case.dtype, case.seed)
    rng = np.random.default_rng((case.seed, 1))
    framed = case.framed(plain, rng)
    nan = cupy.asarray(testing.poisoned(plain[0].shape, plain[0].dtype))
    target, guarded = Framed(nan, rng, int(rng.choice([1, 8]))), Guarded()
    with cupy.cuda.using_allocator(guarded):
        got = run(
            [f.x for f in framed],
            mask,
            scale=case.scale,
            deterministic=case.deterministic,
            out=target.x,
            impl=case.impl,
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


@by_impl
def test_layouts_give_the_bits_of_contiguous_arrays(impl):
    """Aligned layouts take the same kernels as contiguous arrays do."""
    mask, plain = gallery(150, 170)["causal"], make_qkv(2, 150, 170, 4, 2, 64, USUAL[impl])
    whole = bits(run(plain, mask, deterministic=True, impl=impl))
    for seed in range(8):
        rng, quantum = np.random.default_rng(seed), 16 // plain[0].itemsize
        moved = [Framed(x, rng, quantum, 0.2 * (impl == "simt")).x for x in plain]
        assert bits(run(moved, mask, deterministic=True, impl=impl)) == whole
