"""The mma kernels over a covering design: masks, lengths, dtypes and forms; races; layouts.

As in test_simt_grid every mask of the gallery meets several lengths around the tile's; the other
factors are dealt out evenly.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from sm80_runs import DTYPES, Geometry, check, run

import masks
from nbflash import scores
from nbflash.cuda import simulator as sim
from nbflash.testing import make_qkv, mask_gallery

NAMES = tuple(mask_gallery(16))
LENGTHS = (lambda t: 1, lambda t: t - 1, lambda t: t, lambda t: t + 1, lambda t: 2 * t + 1)
FACTORS = {
    "geometry": (
        Geometry(),
        Geometry(width=48),
        Geometry(m_tiles=2),
        Geometry(warps=2),
        Geometry(warps=2, m_tiles=2, width=32),
    ),
    "dtype": tuple(DTYPES),
    "head_dim": (8, 16, 24, 40),
    "heads": ((2, 2), (2, 1), (4, 2)),
    "stages": (2, 3, 4),
    "walk_stages": (1, 2, 3),
    "deterministic": (False, True),
    "vector_red": (False, True),
    "negative_scale": (False, False, True),
}
OPTIONS = ("stages", "walk_stages", "deterministic", "vector_red")


@functools.cache
def gallery(nq, nk, heads):
    return mask_gallery(nq, nk, batch=2, heads=heads)


def design():
    """The cases: (mask name, index of nq, index of nk, level of every factor)."""
    rng = np.random.default_rng(80)
    places = [
        (name, i, (i + shift) % len(LENGTHS))
        for shift, name in enumerate(NAMES)
        for i in range(len(LENGTHS))
        if (i + shift) % 2 == 0
    ]
    columns = {
        factor: rng.permutation(np.resize(np.arange(len(levels)), len(places)))
        for factor, levels in FACTORS.items()
    }
    for n, (name, i, j) in enumerate(places):
        yield name, i, j, {factor: FACTORS[factor][column[n]] for factor, column in columns.items()}


CASES = tuple(design())


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


FORMS = {
    "one-pass": Geometry(warps=2, width=32),
    "two-passes": Geometry(warps=2, width=32, deterministic=True),
    "one-stage": Geometry(m_tiles=2, walk_stages=1, stages=3, vector_red=True),
}
forms = pytest.mark.parametrize("form", FORMS)


@forms
@pytest.mark.parametrize("name", ["causal", "checkerboard", "dead-scattered"])
def test_no_races(name, form):
    """Copies, barriers and both uses of a kept tile's memory are ordered."""
    mask = mask_gallery(33, 40)[name]
    with sim.options(race=True):
        check(FORMS[form], mask, *make_qkv(1, *mask.shape, 2, 1, 24, np.float16))


@pytest.mark.parametrize("form", ["one-pass", "two-passes"])
def test_wide_heads_take_passes_for_dk_and_dv(form):
    mask = mask_gallery(20, 24)["causal"]
    check(replace(FORMS[form], width=16), mask, *make_qkv(1, *mask.shape, 1, 1, 136, np.float16))


@forms
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout(p, form):
    """The same numbers as everywhere, at every place of a tile."""
    mask, geometry = mask_gallery(35, 70, batch=2, heads=2)["per-batch-per-head"], FORMS[form]
    inputs = make_qkv(2, *mask.shape, 2, 1, 16, np.float16)
    geometry = replace(geometry, width=64 if p == 0.5 else 32)
    check(geometry, mask, *inputs, dropout=p, seed=(3, 2**40 + 5))


@forms
@pytest.mark.parametrize("score", [scores.softcap(5.0), scores.alibi(2)], ids=["softcap", "alibi"])
def test_scores(score, form):
    mask, geometry = mask_gallery(33, 40)["strided"], FORMS[form]
    for dtype in DTYPES.values():
        check(geometry, mask, *make_qkv(1, *mask.shape, 2, 2, 16, dtype), score=score)


@forms
def test_gradient_of_the_lse(form):
    """dLSE adds P to the gradient of the scores."""
    mask = mask_gallery(33, 40)["causal"]
    q, k, v, dout = make_qkv(1, *mask.shape, 2, 1, 16, np.float16)
    dlse = np.random.default_rng(5).standard_normal((1, 2, 33)).astype(np.float32)
    from nbflash import reference, testing

    got = run(FORMS[form], mask, q, k, v, dout, dlse=dlse)
    ref = reference.attention_backward(dout, q, k, v, mask, dlse=dlse)
    low = testing.low_precision_backward(dout, q, k, v, mask, dlse=dlse)
    for name, x, *values in zip(("dq", "dk", "dv"), got[2:], ref, low, strict=True):
        testing.assert_within_reference(x, *values, name=name, factor=3)


@forms
def test_strides(form):
    """Rows, heads and batch in any order, with gaps, as long as rows are whole chunks."""
    mask = masks.causal(33, 40)
    packed = [
        np.ascontiguousarray(x.swapaxes(1, 2)) for x in make_qkv(2, 33, 40, 2, 1, 16, np.float16)
    ]
    check(FORMS[form], mask, *(x.swapaxes(1, 2) for x in packed))
