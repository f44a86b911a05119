"""Forward and backward kernels over a covering design: every mask, length, dtype and option.

Every mask of the gallery meets seven query lengths and seven key lengths around the tile size;
the other factors are dealt out evenly, so that every two levels of two of them meet somewhere.
"""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
from simt_runs import DTYPES, Geometry, check

from nbflash.cuda import simulator as sim
from nbflash.testing import make_qkv, mask_gallery

NAMES = tuple(mask_gallery(8))
LENGTHS = (
    lambda t: 1,
    lambda t: 2,
    lambda t: t - 1,
    lambda t: t,
    lambda t: t + 1,
    lambda t: 2 * t - 1,
    lambda t: 2 * t + 1,
)
FACTORS = {
    "geometry": (
        Geometry(),  # 8 × 8
        Geometry(tx=4),  # 8 × 16
        Geometry(rm=8),  # 16 × 8
        Geometry(ty=1, rm=8, rn=8),  # 8 × 16
        Geometry(),
    ),
    "dtype": tuple(DTYPES),
    "head_dim": (1, 3, 8, 17, 32),
    "heads": ((2, 2), (2, 1), (3, 1), (4, 1)),
    "vectors": (False, True),
    "p_over_k": (False, True),
    "chunks": (1, 2),
    "unroll": (1, 4),
    "deterministic": (False, True),
    "vector_red": (False, True),
    "send_v": (False, True),
    "negative_scale": (False, False, True),
}
OPTIONS = ("vectors", "p_over_k", "chunks", "unroll", "deterministic", "vector_red", "send_v")


@functools.cache
def gallery(nq, nk, heads):
    return mask_gallery(nq, nk, batch=2, heads=heads)


def design():
    """The cases: (mask name, index of nq, index of nk, level of every factor)."""
    rng = np.random.default_rng(20)
    places = [
        (name, i, (i + shift) % len(LENGTHS))
        for shift, name in enumerate(NAMES)
        for i in range(len(LENGTHS))
    ]
    columns = {
        factor: rng.permutation(np.resize(np.arange(len(levels)), len(places)))
        for factor, levels in FACTORS.items()
    }
    for n, (name, i, j) in enumerate(places):
        yield name, i, j, {factor: FACTORS[factor][column[n]] for factor, column in columns.items()}


CASES = tuple(design())


def test_any_two_levels_meet():
    for one, other in itertools.combinations(FACTORS, 2):
        met = {(levels[one], levels[other]) for *_, levels in CASES}
        assert met == set(itertools.product(FACTORS[one], FACTORS[other])), (one, other)


def test_every_mask_meets_every_length():
    rows, columns = ({(name, at[axis]) for name, *at, _ in CASES} for axis in (0, 1))
    assert rows == columns == set(itertools.product(NAMES, range(len(LENGTHS))))


def label(case):
    name, i, j, levels = case
    heads = "over".join(map(str, levels["heads"]))
    return f"{name}-{i}x{j}-{levels['dtype']}-d{levels['head_dim']}-{heads}-{levels['geometry']}"


@pytest.mark.parametrize("seed", [pytest.param(n, id=label(c)) for n, c in enumerate(CASES)])
def test_forward_and_backward(seed):
    name, i, j, levels = CASES[seed]
    geometry = replace(levels["geometry"], **{option: levels[option] for option in OPTIONS})
    tile_m, tile_n = geometry.tile
    nq, nk, (heads, heads_kv) = LENGTHS[i](tile_m), LENGTHS[j](tile_n), levels["heads"]
    mask, head_dim = gallery(nq, nk, heads)[name], levels["head_dim"]
    batch = mask.batch or 1
    inputs = make_qkv(batch, nq, nk, heads, heads_kv, head_dim, DTYPES[levels["dtype"]], seed)
    scale = -0.4 if levels["negative_scale"] else None
    with sim.options(seed=seed):
        check(geometry, mask, *inputs, scale=scale)
