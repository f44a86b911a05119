"""More than 2³¹ elements, and strides that reach beyond 2³¹, held to exact results."""

import cupy
import numpy as np
import pytest
from device_runs import USUAL, bits, by_impl, by_mode, host, make_qkv, run

import masks
import nbflash
from nbflash.testing import code_word_oracle

pytestmark = pytest.mark.usefixtures("one_pass")
BEYOND = 2**31
STEP = 1 << 18  # rows that are looked at at a time


@pytest.fixture
def room():
    """Skip unless so many bytes are free; the pool's own free blocks count."""

    def need(nbytes):
        cupy.get_default_memory_pool().free_all_blocks()
        free, _ = cupy.cuda.runtime.memGetInfo()
        if free < nbytes:
            pytest.skip(f"{nbytes >> 30} GiB of device memory needed, {free >> 30} are free")

    # Poisoning would write each of these gigabytes once more.
    with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):
        yield need
    cupy.get_default_memory_pool().free_all_blocks()


@by_impl
@by_mode
def test_more_elements_than_31_bits_count(deterministic, impl, room):
    """2³¹ and some elements of q, out, dout and dq, every one of them checked.

    Code words: the output is a gather and only the last rows carry a gradient.
    """
    heads, head_dim, nk = 16, 64, 16
    nq = BEYOND // (heads * head_dim) + 5
    room(40 << 30)
    words = code_word_oracle(64, head_dim, nk, dtype=np.float16)
    pick = np.random.default_rng(0).integers(0, nk, 1009)
    k, v = (cupy.asarray(np.repeat(x, heads, axis=2)) for x in (words.k, words.v))
    q, dout = (cupy.empty((1, nq, heads, head_dim), np.float16) for _ in range(2))
    assert q.size > BEYOND
    target = cupy.asarray(pick[np.arange(nq) % len(pick)])
    for i in range(0, nq, STEP):
        rows = target[i : i + STEP]
        q[0, i : i + STEP] = 1024 * k[0, rows]
        dout[0, i : i + STEP] = 0
    dout[0, nq - 7 :] = 1
    options = {"scale": words.scale, "deterministic": deterministic, "impl": impl}
    out, lse, dq, dk, dv = run((q, k, v, dout), **options)
    for i in range(0, nq, STEP):
        rows = target[i : i + STEP]
        assert bool((out[0, i : i + STEP] == v[0, rows]).all()), i
        assert not bool(dq[0, i : i + STEP].any()), i
    assert bool((lse == np.float32(words.lse.max())).all())
    assert not bool(dk.any())
    counts = np.bincount(pick[np.arange(nq - 7, nq) % len(pick)], minlength=nk)
    np.testing.assert_array_equal(host(dv)[0, :, 0, 0], counts)
    assert bool((dv == dv[:, :, :1, :1]).all())


@by_impl
@by_mode
def test_more_keys_than_31_bits_count(deterministic, impl, room):
    """2³¹ and some elements of k, v, dk and dv: only the last keys are code words, the rest 0."""
    heads, head_dim, nq = 16, 64, 16
    nk = BEYOND // (heads * head_dim) + 5
    room(40 << 30)
    words = code_word_oracle(nq, head_dim, dtype=np.float16)
    k, v = (cupy.zeros((1, nk, heads, head_dim), np.float16) for _ in range(2))
    assert k.size > BEYOND
    k[0, nk - nq :], v[0, nk - nq :] = (cupy.asarray(x[0]) for x in (words.k, words.v))
    q, dout = (cupy.asarray(np.repeat(x, heads, axis=2)) for x in (words.q, words.dout))
    options = {"scale": words.scale, "deterministic": deterministic, "impl": impl}
    out, lse, dq, dk, dv = run((q, k, v, dout), **options)
    assert bool((out == cupy.asarray(words.out)).all())
    assert bool((lse == cupy.asarray(words.lse.astype(np.float32))).all())
    assert not bool(dq.any())
    for i in range(0, nk, STEP):
        assert not bool(dk[0, i : i + STEP].any()), i
        assert not bool(dv[0, i : min(i + STEP, nk - nq)].any()), i
    assert bool((dv[0, nk - nq :] == cupy.asarray(words.dv[0])).all())


@by_impl
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "tokens", "heads"])
@by_mode
def test_strides_beyond_31_bits(axis, deterministic, impl, room):
    """Small tensors whose second element along one axis lies more than 2³¹ elements further."""
    shape = [2, 1, 2, 64]
    shape[1] = 2 if axis == 1 else 130
    far, near = BEYOND + 4096, 1 << 16
    room(3 * far)
    options = {"deterministic": deterministic, "impl": impl}
    plain = make_qkv(shape[0], shape[1], shape[1], 2, 2, 64, "float16")
    whole = run(plain, **options)
    buffer, moved = cupy.empty(far + 5 * near, np.float16), []
    for i, x in enumerate((*plain, whole[0])):
        strides = [s // x.itemsize for s in x.strides]
        strides[axis] = far
        view = cupy.lib.stride_tricks.as_strided(
            buffer[i * near :], x.shape, [s * x.itemsize for s in strides]
        )
        view[...] = x
        moved.append(view)
    *inputs, out = moved
    out[...] = np.nan
    results = run(inputs, out=out, **options)
    same = [a == b for a, b in zip(bits(results), bits(whole), strict=True)]
    assert [same[i] for i in range(5) if deterministic or i != 2] == [True] * (4 + deterministic)


@by_impl
def test_a_long_sequence_under_a_butterfly(impl):
    """Half a million tokens, each attending 13 of 4096 blocks: a gather, exact everywhere."""
    n, block, head_dim = 1 << 19, 128, 64
    rng = np.random.default_rng(0)
    k = rng.choice(np.array([-1, 1], np.float32), (1, n, 1, head_dim))
    v = rng.integers(-3, 4, k.shape).astype(np.float32)
    stage = rng.integers(-1, (n // block).bit_length() - 1, n)
    other = np.arange(n) // block ^ np.where(stage < 0, 0, 1 << np.maximum(stage, 0))
    target = other * block + rng.integers(0, block, n)
    inputs = [cupy.asarray(x.astype(USUAL[impl])) for x in (1024 * k[:, target], k, v)]
    scale, exact = np.log(2.0), cupy.asarray(v[:, target])
    mask = masks.butterfly(n, block)
    out, lse = nbflash.attention(*inputs, mask, scale=scale, return_lse=True, impl=impl)
    assert bool((out == exact).all())
    assert bool((lse == np.float32(1024 * head_dim * scale)).all())


@by_impl
def test_many_planes(impl):
    """Plane numbers and row pointers far from zero: a mask of its own for every batch element."""
    rng, batch, n = np.random.default_rng(0), 300, 70
    planes = [masks.from_dense(rng.random((n, n)) < 0.3) for _ in range(batch)]
    inputs = make_qkv(batch, n, n, 2, 1, 64, USUAL[impl])
    options = {"deterministic": True, "impl": impl}
    results = run(inputs, masks.per_batch(planes), **options)
    for b in (0, 1, 150, batch - 1):
        alone = run([x[b : b + 1].copy() for x in inputs], planes[b], **options)
        assert bits(alone) == bits(x[b : b + 1] for x in results)
