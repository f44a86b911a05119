"""Every mistake in the arguments of merge and merge_sink raises a sentence that names it."""

import numpy as np
import pytest
from bad_input_cases import DTYPE, CudaInterface, misaligned, zeros

import nbflash

BATCH, NQ, HEADS, D = 2, 6, 4, 8
OUT_SHAPE, LSE_SHAPE = (BATCH, NQ, HEADS, D), (BATCH, HEADS, NQ)
F64, INT = np.float64, np.int32

OUT_A = {
    "list": ([0.0], TypeError, "out_a must be a NumPy or CuPy array, .* got list"),
    "axes": (zeros(NQ, HEADS, D), ValueError, r"out_a must have 4 axes .*got shape \(6, 4, 8\)"),
    "dtype": (zeros(*OUT_SHAPE, dtype=INT), TypeError, f"out_a {DTYPE} int32"),
    "wide": (
        zeros(*OUT_SHAPE, dtype=F64),
        TypeError,
        "lse_a must have dtype float64, got float32",
    ),
    "misaligned": (misaligned(OUT_SHAPE), ValueError, "out_a must be aligned"),
}


def like_out(name, first):
    return {
        "none": (None, TypeError, f"{name} must be a NumPy or CuPy array, .* got NoneType"),
        "on-cuda": (CudaInterface(), TypeError, f"{name} is a .* in CUDA memory but {first} is"),
        "axes": (zeros(NQ, HEADS, D), ValueError, f"{name} must have 4 axes"),
        "shape": (
            zeros(BATCH, NQ, 1, D),
            ValueError,
            rf"{name} must have shape .* = \(2, 6, 4, 8\), got \(2, 6, 1, 8\)",
        ),
        "dtype": (
            zeros(*OUT_SHAPE, dtype=np.float16),
            TypeError,
            f"{name} must have dtype float32, got float16",
        ),
        "misaligned": (misaligned(OUT_SHAPE), ValueError, f"{name} must be aligned"),
    }


def like_lse(name, first):
    return {
        "number": (1.0, TypeError, f"{name} must be a NumPy or CuPy array, .* got float"),
        "on-cuda": (CudaInterface(), TypeError, f"{name} is a .* in CUDA memory but {first} is"),
        "axes": (zeros(*OUT_SHAPE), ValueError, rf"{name} must have 3 axes .*\(2, 6, 4, 8\)"),
        "heads-last": (
            zeros(BATCH, NQ, HEADS),
            ValueError,
            rf"{name} must have shape \(batch, heads, seqlen_q\) = \(2, 4, 6\), got \(2, 6, 4\)",
        ),
        "dtype": (
            zeros(*LSE_SHAPE, dtype=F64),
            TypeError,
            f"{name} must have dtype float32, got float64",
        ),
        "misaligned": (misaligned(LSE_SHAPE), ValueError, f"{name} must be aligned"),
    }


SINK = {
    "number": (0.0, TypeError, "sink must be a NumPy or CuPy array, .* got float"),
    "on-cuda": (CudaInterface(), TypeError, "sink is a .* in CUDA memory but out is"),
    "axes": (zeros(1, HEADS), ValueError, r"sink must have 1 axes \(heads,\), got shape \(1, 4\)"),
    "shape": (zeros(2), ValueError, r"sink must have shape \(heads,\) = \(4,\), got \(2,\)"),
    "dtype": (zeros(HEADS, dtype=np.float16), TypeError, "sink must have dtype float32, got fl"),
}
# Which function, which argument, and what may be wrong with it.
ARGUMENTS = [
    ("merge", "out_a", OUT_A),
    ("merge", "lse_a", like_lse("lse_a", "out_a")),
    ("merge", "out_b", like_out("out_b", "out_a")),
    ("merge", "lse_b", like_lse("lse_b", "out_a")),
    ("merge_backward", "out_a", OUT_A),
    ("merge_backward", "dout", like_out("dout", "out_a")),
    ("merge_backward", "out_b", like_out("out_b", "out_a")),
    ("merge_backward", "dlse", like_lse("dlse", "out_a")),
    ("merge_sink", "lse", like_lse("lse", "out")),
    ("merge_sink", "sink", SINK),
    ("merge_sink_backward", "dout", like_out("dout", "out")),
    ("merge_sink_backward", "sink", SINK),
    ("merge_sink_backward", "dlse", like_lse("dlse", "out")),
]
CASES = [
    pytest.param(function, name, *case, id=f"{function}-{name}-{mistake}")
    for function, name, cases in ARGUMENTS
    for mistake, case in cases.items()
]


def arguments_of(function):
    part = {"out": zeros(*OUT_SHAPE), "lse": zeros(*LSE_SHAPE)}
    if "sink" in function:
        arguments = part | {"sink": zeros(HEADS)}
    else:
        arguments = {f"{name}_{which}": x for which in "ab" for name, x in part.items()}
    if "backward" in function:
        arguments |= {"dout": zeros(*OUT_SHAPE), "dlse": zeros(*LSE_SHAPE)}
    return arguments


@pytest.mark.parametrize(("function", "name", "value", "error", "match"), CASES)
def test_a_mistake_is_named(function, name, value, error, match):
    arguments = arguments_of(function)
    assert name in arguments
    with pytest.raises(error, match=match):
        getattr(nbflash, function)(**(arguments | {name: value}))


@pytest.mark.parametrize("function", ["merge", "merge_backward", "merge_sink"])
def test_another_byte_order(function):
    arguments = arguments_of(function)
    first = next(iter(arguments))
    arguments[first] = arguments[first].astype(np.dtype(np.float32).newbyteorder())
    with pytest.raises(TypeError, match=f"{first} {DTYPE} [<>]f4"):
        getattr(nbflash, function)(**arguments)
