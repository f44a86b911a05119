"""What kernels are given of a score: sizes, parameters in their types, and forms of their own."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from numba import types

from nbflash import scores
from nbflash.cuda import score_params
from nbflash.cuda.kinds import array, float32, float64, int32, int64, uint64
from nbflash.definitions import score_functions
from nbflash.planning.kernels import cuda_problem

PROBLEM = cuda_problem("float16", 64, 40, 50)
WIDE = replace(PROBLEM, dtype="float64")
ALIBI, OF_ALL = score_functions.alibi, score_functions.alibi_of_all


def test_without_functions_there_is_nothing():
    assert score_params.prepare(None, PROBLEM, (9, 0)) == (None, ())
    assert score_params.prepare(scores.compose(), PROBLEM, (9, 0)) == (None, ())


@pytest.mark.parametrize(("problem", "real"), [(PROBLEM, float32), (WIDE, float64)])
def test_parameters_have_the_type_of_what_is_computed(problem, real):
    bias = np.arange(2000.0).reshape(1, 1, 40, 50)
    score = scores.compose(scores.softcap(3), scores.bias(bias.astype(np.float32)))
    code, (sizes, (cap,), given) = score_params.prepare(score, problem, (9, 0))
    assert ([*sizes], {type(n) for n in sizes}) == ([40, 50], {np.int32})
    assert (cap, type(cap).__name__) == (3, real.name)
    assert given[-1].dtype.name == real.name
    np.testing.assert_array_equal(given[-1], bias)
    assert code.kinds == ((real,), (*[int32] * (len(given) - 1), array(real, 4)))
    assert code.forms == ("softcap", None)
    assert [fn for fn, _ in code.functions] == [score_functions.softcap, score_functions.bias]
    assert all(grad is not None for _, grad in code.functions)


@pytest.mark.parametrize(
    ("value", "expected", "kind"),
    [
        (np.float64(0.5), np.float32, float32),
        (np.int64(-7), np.int32, int32),
        (np.uint8(7), np.int32, int32),
        (np.int64(70000), np.int32, int32),
        (np.int64(2**31 - 1), np.int32, int32),
        (np.int64(-(2**31)), np.int32, int32),
        (np.uint32(2**31), np.int64, int64),
        (np.uint64(2**64 - 1), np.uint64, uint64),
        (np.True_, np.int32, int32),
        (np.int64(2**31), np.int64, int64),
        (np.int64(-(2**31) - 1), np.int64, int64),
        (np.arange(6.0).reshape(2, 3).T, np.float32, array(float32, 2)),
        (np.arange(3), np.int64, array(int64, 1)),
    ],
)
def test_numbers_and_arrays_as_kernels_take_them(value, expected, kind):
    """Integers of 32 bits where they fit; arrays of integers as they are, and contiguous."""
    found = score_params._fitted(np.asarray(value), np.dtype(np.float32))
    assert found.dtype == expected
    np.testing.assert_array_equal(found, value)
    assert found.ndim == 0 or found.flags.c_contiguous
    assert score_params._kind(found) == kind
    assert score_params._kind(np.zeros(2, bool)).parts[0].name == "boolean"


@pytest.mark.parametrize("fn", [ALIBI, OF_ALL])
@pytest.mark.parametrize(
    ("slopes", "scale", "form"),
    [
        ([0.5, 0.25], 0.125, "alibi"),
        ([0.0, 32.0], 0.125, "alibi"),
        ([0.5, -1e-9], 0.125, None),
        ([0.5, np.nextafter(np.float32(32), np.float32(33))], 0.125, None),
        ([0.5], 0.0, None),
        ([0.5], -0.125, None),
        ([np.nan], 0.125, None),
        ([1], 0.125, None),
    ],
)
def test_slopes_that_kernels_have_a_form_for(fn, slopes, scale, form):
    """From 0 to 32, as numbers of floating point, with scores that grow with q · k."""
    assert score_params._form_of(fn, (np.array(slopes),), scale) == form
    assert score_params._form_of(score_functions.bias, (np.array(slopes),), scale) is None
    assert score_params._form_of(score_functions.softcap, (), scale) == "softcap"


def test_parts_are_functions_of_every_stage():
    arrays = {"slopes": np.array([0.5]), "bias": np.zeros((1, 1, 40, 50), np.float32)}
    score = scores.compose(scores.alibi(arrays["slopes"]), scores.bias(arrays["bias"]))
    found = score_params.part_functions(score, PROBLEM, (9, 0))
    assert found == tuple(tuple(x.function for x in parts) for parts in score.parts)
    assert [len(x) for x in found] == [1, 1]


def own(s, b, h, q_idx, kv_idx, weight):
    return s * weight


def slope(s, b, h, q_idx, kv_idx, weight):
    return weight


def part(s, b, h, q_idx, kv_idx, weight):
    return 0, s


def test_functions_of_a_user_are_compiled_by_themselves(monkeypatch):
    """With all their arguments, and what they have to return; ours are not."""
    checked = []
    monkeypatch.setattr(score_params, "_check_function", lambda *given: checked.append(given))
    weight = np.ones(1)
    mine = scores.custom(own, params=(weight,), grad=slope, param_grads=(part,))
    score = scores.compose(scores.softcap(2.0), mine, scores.alibi(weight))
    for problem, real in ((PROBLEM, float32), (WIDE, float64)):
        signature = (real, *(int32,) * 4, array(real, 1))
        score_params.prepare(score, problem, (8, 0))
        number = [(fn, signature, (8, 0)) for fn in (own, slope)]
        assert checked == number
        checked.clear()
        score_params.part_functions(scores.compose(mine, scores.alibi(weight)), problem, (8, 0))
        assert checked == [*number, (part, signature, (8, 0), "an index and a number")]
        checked.clear()


BIAS = (3, 4, 40, 50)


@pytest.mark.parametrize(
    ("make", "shape", "names"),
    [
        (scores.bias, BIAS, ("batch", "heads", "nq", "nk")),
        (scores.relative, (4, 5), ("heads",)),
        (scores.alibi, (4,), ("heads",)),
    ],
)
def test_arrays_have_the_sizes_of_inputs_or_are_the_same_for_all(make, shape, names):
    """Each axis alone: a bias may have one of each, and one slope is that of all heads."""
    problem = replace(PROBLEM, batch=3, heads=4, heads_kv=2)
    make(np.ones(shape)).check(problem)
    for axis, name in enumerate(names):
        for n in (1, 2, shape[axis] + 1):
            score = make(np.ones((*shape[:axis], n, *shape[axis + 1 :])))
            if n == 1 and make is not scores.relative:
                score.check(problem)
            else:
                said = f"has {name}={n}, got inputs with {name}={shape[axis]}"
                with pytest.raises(ValueError, match=said):
                    score.check(problem)


@pytest.mark.parametrize(
    ("result", "number"),
    [
        *((types.int64, True), (types.float32, True), (types.boolean, True), (types.none, False)),
        *((types.complex64, False), (types.UniTuple(types.int32, 2), False)),
    ],
)
def test_what_a_function_returns_is_a_number(result, number, monkeypatch, tmp_path):
    """Or, of other functions, a pair; what was right once is not compiled again."""
    compiled = []

    def compile_ptx(function, given, cc, **how):
        compiled.append((function, cc))
        return "", result

    monkeypatch.setattr(score_params, "cuda", SimpleNamespace(compile_ptx=compile_ptx))
    monkeypatch.setattr(score_params, "compiling_for", contextlib.nullcontext)
    monkeypatch.setattr(score_params, "cubin_dir", lambda: tmp_path / "kept")
    signature = (float32, *(int32,) * 4)
    pair = isinstance(result, types.BaseTuple)
    for returned, right in ((score_params._NUMBER, number), (score_params._PAIR, pair)):
        compiled.clear()
        for _ in range(2):
            given = function_of_scores, signature, (9, 0), returned
            if right:
                score_params._check_function(*given)
            else:
                with pytest.raises(TypeError, match=f"must return {returned}, got "):
                    score_params._check_function(*given)
        assert compiled == [(function_of_scores, (9, 0))] * (1 if right else 2)


def function_of_scores(s, b, h, q_idx, kv_idx):
    return s + q_idx
