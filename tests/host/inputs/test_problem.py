"""Problem: what the arrays state, and how mask, causal and window become one mask."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import masks
from nbflash.inputs.dropout import check_dropout
from nbflash.inputs.problem import Problem, check_forward, check_mask, check_window
from nbflash.testing import make_qkv

NQ, NK = 6, 9


def problem_of(**changed):
    q, k, v, _ = make_qkv(2, NQ, NK, 4, 2, 16)
    return check_forward(**{"q": q, "k": k, "v": v, **changed})


def test_problem_states_shapes_dtype_scale_and_device():
    problem = problem_of()
    assert problem == Problem(
        batch=2,
        nq=NQ,
        nk=NK,
        heads=4,
        heads_kv=2,
        head_dim=16,
        dtype="float32",
        scale=0.25,
        strides=((384, 64, 16, 1), (288, 32, 16, 1), (288, 32, 16, 1)),
        device="cpu",
        device_id=0,
        alignment=4,
    )
    assert problem.group == 2
    assert problem.q_shape == (2, NQ, 4, 16)
    assert problem.kv_shape == (2, NK, 2, 16)
    assert problem.lse_shape == (2, 4, NQ)
    assert not problem.empty
    assert str(problem) == "q (2, 6, 4, 16), k and v (2, 9, 2, 16), float32, scale 0.25, cpu"


def test_equal_problems_are_one_key():
    assert len({problem_of(), problem_of(), problem_of(scale=0.25), problem_of(scale=1)}) == 2


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=lambda t: t.__name__
)
def test_dtypes_by_name(dtype):
    problem = check_forward(*make_qkv(1, 2, 3, 1, 1, 4, dtype)[:3])
    assert problem.dtype == np.dtype(dtype).name
    assert problem.alignment == np.dtype(dtype).itemsize


def test_strides_count_elements_with_sign_and_ignore_axes_of_length_one():
    q, k, v, _ = make_qkv(1, NQ, NK, 4, 4, 16, np.float16)
    q = np.lib.stride_tricks.as_strided(q, q.shape, (99999, *q.strides[1:]))
    k, v = np.broadcast_to(k[:, :1, :2], (1, NK, 2, 16)), v[:, :, ::2]
    problem = check_forward(q[:, ::-1], k, v)
    assert problem.strides[0] == (0, -64, 16, 1)
    assert problem.strides[1] == (0, 0, 16, 1)
    assert problem.strides[2] == (0, 64, 32, 1)


@pytest.mark.parametrize(
    "scale", [0, -1.5, np.float32(0.5), np.int64(2), 3, 1e30], ids=lambda scale: repr(scale)
)
def test_any_finite_scale_is_taken(scale):
    problem = problem_of(scale=scale)
    assert problem.scale == float(scale)
    assert type(problem.scale) is float


def test_float64_takes_a_scale_beyond_float32():
    q, k, v, _ = make_qkv(1, 2, 3, 1, 1, 4, np.float64)
    assert check_forward(q, k, v, 1e39).scale == 1e39


@pytest.mark.parametrize(("batch", "nq", "nk"), [(0, 2, 3), (2, 0, 3), (2, 2, 0), (0, 0, 0)])
def test_empty_problems_are_problems(batch, nq, nk):
    problem = check_forward(*make_qkv(batch, nq, nk, 2, 1, 4)[:3])
    assert problem.empty
    assert (problem.batch, problem.nq, problem.nk) == (batch, nq, nk)


JOINS = {
    "nothing": ({}, masks.dense(NQ, NK)),
    "causal": ({"causal": True}, masks.causal(NQ, NK)),
    "window": ({"window": (2, 1)}, masks.window(NQ, NK, left=2, right=1)),
    "unbounded-window": ({"window": (None, None)}, masks.dense(NQ, NK)),
    "window-beyond-int32": ({"window": (2**31, 0)}, masks.causal(NQ, NK)),
    "window-beyond-int64": ({"window": (0, 2**64)}, masks.window(NQ, NK, left=0)),
    "causal-window": (
        {"causal": True, "window": (2, 1)},
        masks.causal(NQ, NK) & masks.window(NQ, NK, left=2, right=1),
    ),
}
BASES = {
    "mask": masks.from_dense(np.random.default_rng(0).random((NQ, NK)) < 0.5),
    "per-head": masks.per_head([masks.dense(NQ, NK), masks.causal(NQ, NK)] * 2),
    "per-batch": masks.per_batch([masks.causal(NQ, NK), masks.dense(NQ, NK)]),
}


@pytest.mark.parametrize(("options", "expected"), JOINS.values(), ids=JOINS)
def test_causal_and_window_become_a_mask(options, expected):
    mask = check_mask(None, problem_of(), **options)
    np.testing.assert_array_equal(mask.dense(), expected.dense())


@pytest.mark.parametrize(("options", "limits"), JOINS.values(), ids=JOINS)
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_masks_are_joined_by_and(base, options, limits):
    mask = check_mask(base, problem_of(), **options)
    np.testing.assert_array_equal(mask.dense(), base.dense() & limits.dense())
    assert (mask.batch, mask.heads) == (base.batch, base.heads)
    if not options:
        assert mask is base


@pytest.mark.parametrize(
    ("window", "expected"),
    [((1, 2), (1, 2)), ([0, None], (0, None)), ((np.int64(3), 0), (3, 0))],
    ids=["tuple", "list", "numpy"],
)
def test_window_is_normalised(window, expected):
    sides = check_window(window)
    assert sides == expected
    assert all(side is None or type(side) is int for side in sides)


@pytest.mark.parametrize("half", [Fraction(1, 2), np.float16(0.5), np.float64(0.5)])
def test_dropout_is_a_number_of_python_whatever_is_given(half):
    """A plan is remembered by it."""
    found = check_dropout(half)
    assert (found, type(found)) == (0.5, float)
