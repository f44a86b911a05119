"""The mma kernels over a covering design of all axes, see `axes`; races; layouts."""

from dataclasses import replace
from functools import partial

import axes
import numpy as np
import pytest
from sm80_runs import DTYPES, Geometry, check, run

import masks
import nbflash
from nbflash import scores
from nbflash.cuda import simulator as sim
from nbflash.testing import make_qkv, mask_gallery, poisoned

AXES = axes.AXES | {
    "geometry": (
        Geometry(),
        Geometry(width=48),
        Geometry(m_tiles=2),
        Geometry(warps=2),
        Geometry(warps=2, m_tiles=2, width=32),
    ),
    "dtype": tuple(DTYPES),
    "head_dim": (8, 16, 24, 40),
    "stages": (2, 3, 4),
    "walk_stages": (1, 2, 3),
    "deterministic": (False, True),
    "vector_red": (False, True),
}
OPTIONS = ("stages", "walk_stages", "deterministic", "vector_red")
TURNS = 10_000  # of three heads by four tiles
CASES = axes.design(AXES, geometry=Geometry(), head_dim=8)


def label(case):
    return axes.label(case, case["dtype"], f"d{case['head_dim']}", case["geometry"])


@pytest.mark.design
@pytest.mark.parametrize("seed", [pytest.param(n, id=label(c)) for n, c in enumerate(CASES)])
def test_forward_and_backward(seed):
    case = CASES[seed]
    geometry = replace(case["geometry"], **{option: case[option] for option in OPTIONS})
    given = axes.problem(case, geometry.tile, case["head_dim"], DTYPES[case["dtype"]], seed)
    with sim.options(seed=seed, turns=TURNS):
        axes.check(partial(run, geometry), partial(check, geometry), case, geometry.tile[1], *given)


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


@pytest.mark.parametrize("which", ["dout", "out"])
def test_rows_off_whole_chunks_are_copied(which):
    """Of what comes with the backward: its columns begin 4 bytes off."""
    q, k, v, dout = make_qkv(1, 9, 12, 2, 1, 8, np.float16)
    out, lse = nbflash.attention(q, k, v, impl="sm80", return_lse=True)
    expected = nbflash.attention_backward(dout, q, k, v, out, lse, impl="sm80", deterministic=True)
    part = poisoned((1, 9, 2, 12), np.float16)[..., 2:10]
    part[...] = dout if which == "dout" else out
    dout, out = (part, out) if which == "dout" else (dout, part)
    got = nbflash.attention_backward(dout, q, k, v, out, lse, impl="sm80", deterministic=True)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
