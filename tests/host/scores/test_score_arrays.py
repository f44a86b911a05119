"""Arrays of CUDA memory as parameters of score functions, on a machine without a GPU."""

import numpy as np
import pytest
from cuda_arrays import SHAPE, DeviceArray, Foreign, ForeignByDLPack, device_arrays

import nbflash
from nbflash import scores
from nbflash.cuda import score_params
from nbflash.inputs import arrays
from nbflash.planning import plan as planning


def scores_of(array, table):
    """A score function of every kind that takes an array."""
    return (
        scores.bias(array),
        scores.relative(table),
        scores.custom(add_first, params=(2, array)),
        scores.compose(scores.softcap(2), scores.bias(array)),
    )


def add_first(s, b, h, q_idx, kv_idx, factor, array):
    return s + factor * array[0, h, 0, 0]


def test_a_score_of_cuda_memory_is_read_where_it_is(executor, monkeypatch):
    """What changes in place has one plan; another array of the same form has another."""
    prepared = []
    monkeypatch.setattr(planning, "prepare", lambda *what: prepared.append(what) or executor)
    q, k, v = device_arrays(3)
    array, table = DeviceArray((1, 4, 6, 6)), DeviceArray((4, 5))
    kinds = scores_of(array, table)
    for wrap in (lambda x: x, Foreign, ForeignByDLPack):
        for score in scores_of(wrap(array), wrap(table)):
            nbflash.attention(q, k, v, score=score)
    assert [spec.score for _, spec in prepared] == list(kinds)
    others = scores_of(DeviceArray((1, 4, 6, 6)), DeviceArray((4, 5)))
    assert not set(others) & set(kinds)
    for score, given in zip(kinds, (array, table, array, array), strict=True):
        problem = nbflash.plan(q, k, v, score=score).problem
        _, params = score_params.prepare(score, problem, (9, 0))
        assert arrays.resident_params(params)[-1][-1] is given
        assert score.nbytes >= given.nbytes


def test_an_array_of_the_host_goes_to_the_device(executor):
    """As the type that kernels read; numbers are passed."""
    score = scores.custom(add_first, params=(2, np.ones((1, 4, 6, 6))))
    problem = nbflash.plan(*device_arrays(3), score=score).problem
    *_, (factor, held) = arrays.resident_params(score_params.prepare(score, problem, (9, 0))[1])
    assert (factor, type(held), held.dtype) == (2, DeviceArray, np.float32)


def test_scores_that_kernels_cannot_read_where_they_are(executor):
    q, k, v = device_arrays(3)
    for array, error, match in (
        (DeviceArray((1, 4, 6, 6), device_id=1), ValueError, "bias has an array on CUDA device 1"),
        (DeviceArray((1, 4, 6, 6), np.float64), TypeError, "bias has an .* convert it to float32"),
        (DeviceArray((1, 4, 6, 7)), ValueError, "bias has nk=7, got inputs with nk=6"),
    ):
        with pytest.raises(error, match=match):
            nbflash.attention(q, k, v, score=scores.bias(array))
    wide = device_arrays(3, dtype=np.float64)
    nbflash.attention(*wide, score=scores.bias(DeviceArray((1, 4, 6, 6), np.float64)))
    with pytest.raises(TypeError, match=r"bias has an .* convert it to float64"):
        nbflash.attention(*wide, score=scores.bias(DeviceArray((1, 4, 6, 6))))
    with pytest.raises(ValueError, match="bias has an array on CUDA device 0 but q is in cpu memo"):
        nbflash.attention(*np.ones((3, *SHAPE), "f4"), score=scores.bias(DeviceArray((1, 4, 6, 6))))
    assert len(executor.calls) == 1


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, bool])
def test_what_is_no_float_is_read_whatever_q_is(executor, dtype):
    table = DeviceArray((4,), dtype)
    for of_q in (np.float16, np.float32, np.float64):
        for wrap in (lambda x: x, Foreign, ForeignByDLPack):
            score = scores.custom(_first, None, (wrap(table),))
            nbflash.attention(*device_arrays(3, dtype=of_q), score=score)
    assert len(executor.calls) == 9


def _first(s, b, h, q_idx, kv_idx, x):
    return s + x[0]


@pytest.mark.parametrize(
    ("make", "given", "error", "match"),
    [
        (scores.relative, DeviceArray((4, 5), strides=(4, 16)), ValueError, r"C-cont.* \(4, 16\)"),
        (
            lambda x: scores.custom(_first, None, (x,)),
            DeviceArray((4,), strides=(8,)),
            ValueError,
            r"C-cont.* \(8,\)",
        ),
        (scores.bias, DeviceArray((1, 4, 6, 6), np.float16), TypeError, "float32, .* got float16"),
        (lambda x: scores.custom(_first, None, (x,)), DeviceArray(()), ValueError, "have an axis"),
        (scores.alibi, DeviceArray((4,)), TypeError, "slopes must be in host memory"),
    ],
)
def test_arrays_that_no_score_takes(cupy, make, given, error, match):
    for wrap in (lambda x: x, Foreign, ForeignByDLPack):
        with pytest.raises(error, match=match):
            make(wrap(given))
