"""Schedules and races: what may depend on the order of threads and blocks, and what may not."""

import numpy as np
import pytest
from simt_runs import DTYPES, Geometry, bits, check, expected, run

import masks
from nbflash.cuda import simulator as sim
from nbflash.testing import assert_within_reference, make_qkv, mask_gallery

SEEDS = range(4)
T = 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["causal", "dead-scattered", "per-head"])
def test_deterministic_form_does_not_depend_on_the_schedule(name, dtype):
    mask, geometry = mask_gallery(2 * T + 1)[name], Geometry(deterministic=True)
    inputs = make_qkv(1, 2 * T + 1, 2 * T + 1, 2, 1, 4, DTYPES[dtype])
    results = set()
    for seed in SEEDS:
        with sim.options(seed=seed):
            results.add(tuple(bits(run(geometry, mask, *inputs))))
    assert len(results) == 1


def test_only_dq_of_the_atomic_form_depends_on_the_schedule():
    """Otherwise the test above could not fail."""
    mask, inputs = mask_gallery(4 * T)["dense"], make_qkv(1, 4 * T, 4 * T, 1, 1, 4)
    results = []
    for seed in SEEDS:
        with sim.options(seed=seed):
            results.append(bits(run(Geometry(), mask, *inputs)))
    out, lse, dq, dk, dv = map(set, zip(*results, strict=True))
    assert [len(x) for x in (out, lse, dk, dv)] == [1] * 4
    assert len(dq) > 1


@pytest.mark.parametrize("name", ["causal", "butterfly"])
def test_batch_element_does_not_depend_on_its_batch(name):
    mask, geometry = mask_gallery(T + 3)[name], Geometry(deterministic=True)
    inputs = make_qkv(3, T + 3, T + 3, 2, 1, 8)
    whole = run(geometry, mask, *inputs)
    for b in range(3):
        alone = run(geometry, mask, *(x[b : b + 1] for x in inputs))
        assert bits(alone) == bits([np.ascontiguousarray(x[b : b + 1]) for x in whole])


RACES = {
    "atomic": Geometry(),
    "deterministic": Geometry(deterministic=True),
    "p_over_k": Geometry(rm=8, p_over_k=True, chunks=2),
    "vectors": Geometry(tx=4, vectors=True, vector_red=True),
    "send_v": Geometry(vectors=True, send_v=True),
    "vectors-deterministic": Geometry(tx=4, vectors=True, p_over_k=True, deterministic=True),
}


@pytest.mark.parametrize("form", RACES)
@pytest.mark.parametrize(
    ("name", "nq", "nk"),
    [
        ("dense", 2 * T + 1, T + 1),
        ("dead-scattered", T + 1, 2 * T + 1),
        ("per-head", T - 1, 2 * T),
        ("empty", T, T),
    ],
)
def test_no_races(name, nq, nk, form):
    mask, inputs = mask_gallery(nq, nk)[name], make_qkv(1, nq, nk, 2, 1, 8)
    with sim.options(race=True, seed=nq + nk):
        check(RACES[form], mask, *inputs)


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(tx=8, ty=8, vectors=True),
        Geometry(tx=8, ty=8, p_over_k=True, deterministic=True),
        Geometry(tx=16, ty=4, vectors=True, vector_red=True),
        Geometry(tx=8, ty=8, vectors=True, p_over_k=True, send_v=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["causal", "dead-scattered"])
def test_several_warps_do_not_race(name, geometry):
    """Two warps in the forward kernel and four in the backward; one tile whole, one ragged."""
    tile_m, tile_n = geometry.tile
    shape, head_dim = (tile_m + 1, tile_n + 1), 32 if geometry.send_v else 4
    with sim.options(race=True):
        check(geometry, mask_gallery(*shape)[name], *make_qkv(1, *shape, 1, 1, head_dim))


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("name", ["checkerboard", "causal", "dead-scattered"])
@pytest.mark.parametrize(
    "geometry", [Geometry(tx=4, ty=1, rn=12), Geometry(tx=8, ty=1, rn=8)], ids=str
)
def test_bit_tiles_of_two_words(geometry, name, deterministic):
    """Tiles of 48 and 64 keys: a row of a bit tile takes two words."""
    geometry = Geometry(geometry.tx, 1, 4, geometry.rn, deterministic=deterministic)
    shape = 5, geometry.tile[1] + 33
    check(geometry, mask_gallery(*shape)[name], *make_qkv(1, *shape, 1, 1, 4))


def test_lse_of_other_keys_gives_their_share_of_the_gradients():
    """With the LSE of all keys, gradients over two key sets add up to those of all keys."""
    n = 2 * T + 1
    inputs = make_qkv(1, n, n, 1, 1, 8, np.float64)
    whole, geometry = masks.dense(n, n), Geometry(deterministic=True)
    q, k, v, dout = inputs
    out, lse, *_ = run(geometry, whole, *inputs)
    total = [np.zeros_like(x) for x in (q, k, v)]
    for parity in (0, 1):
        half = masks.from_function(lambda q, kv, s=parity: (kv % 2 == s) & (q >= 0), n, n)
        part = [np.full_like(x, np.nan) for x in (q, k, v)]
        executor = geometry.executor(q, k, v, half)
        executor.backward(dout, q, k, v, out, lse, np.zeros_like(lse), *part, True)
        total = [a + b for a, b in zip(total, part, strict=True)]
    ref, low = expected(whole, *inputs)
    for got, exact, plain in zip(total, ref[2:], low[2:], strict=True):
        assert_within_reference(got, exact, plain, factor=3)
