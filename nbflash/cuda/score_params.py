"""What the CUDA kernels take of a `nbflash.scores.Score`: code to compile and parameters.

Kernels compute in float32, but those of float64 tensors: so parameters of floating point are of
that type, and integers by value are of 32 bits where they fit.
"""

import contextlib

import numpy as np

from nbflash.cuda import kernel_key
from nbflash.cuda.availability import cubin_dir
from nbflash.cuda.kinds import Kind, array, float32, float64, int32
from nbflash.cuda.ptx._asm import SIM, compile_errors, compiling_for, cuda, types
from nbflash.cuda.tile.score import ScoreCode
from nbflash.definitions import score_functions
from nbflash.disk_cache import sealed
from nbflash.inputs.arrays import on_cuda
from nbflash.inputs.score_functions import where

# The LSE of ALiBi's own form is within 2^-16 of the slope
# (`nbflash.backends.sm90.forward.alibi_gemm`), and so is P of the backward, from it: for steeper
# ones worse than float16.
STEEPEST = 32.0


def prepare(score, problem, compute_capability):
    """The ScoreCode of a score, and its parameters: (nq, nk) and a tuple for every function.

    None and () without functions.

    Raises
    ------
    TypeError
        If Numba cannot compile a function, with its reason and the line that defines it.
    """
    stages = score.stages(problem.nq, problem.nk) if score is not None else []
    if not stages:
        return None, ()
    real = "float64" if problem.dtype == "float64" else "float32"
    params = tuple(tuple(_fitted(x, np.dtype(real)) for x in given) for _, _, given in stages)
    kinds = tuple(tuple(map(_kind, given)) for given in params)
    functions = tuple((fn, grad) for fn, grad, _ in stages)
    forms = tuple(_form_of(fn, given[-1:], problem.scale) for fn, _, given in stages)
    code = ScoreCode(functions, kinds, forms)
    if not (code.own or SIM):
        _check(code, Kind(real), compute_capability)
    return code, ((np.int32(problem.nq), np.int32(problem.nk)), *params)


def part_functions(score, problem, compute_capability):
    """The functions of the parts of every function of a score.

    Raises
    ------
    TypeError
        As :func:`prepare`, also if one does not return an index and a number.
    """
    code, _ = prepare(score, problem, compute_capability)
    real = float64 if problem.dtype == "float64" else float32
    found = tuple(tuple(part.function for part in parts) for parts in score.parts)
    if not (code.own or SIM):
        for functions, kinds in zip(found, code.kinds, strict=True):
            for function in functions:
                if not score_functions.is_own(function):
                    signature = (real, *(int32,) * 4, *kinds)
                    _check_function(function, signature, compute_capability, _PAIR)
    return found


def _form_of(fn, last, scale):
    """Which form the kernels have for a function with these parameters, the last one given."""
    if fn is score_functions.softcap:
        return "softcap"
    if fn in (score_functions.alibi, score_functions.alibi_of_all) and scale > 0:
        (slopes,) = last
        fits = slopes.dtype.kind == "f" and np.all((slopes >= 0) & (slopes <= STEEPEST))
        return "alibi" if fits else None
    return None


def _fitted(x, real):
    if on_cuda(x):
        return x  # a check of the score has found it to fit
    dtype = x.dtype
    if dtype.kind == "f":
        dtype = real
    elif x.ndim == 0:
        # The smaller of int32 and int64 that holds it; beyond both, its own.
        fits = (
            np.dtype(t) for t in (np.int32, np.int64) if np.iinfo(t).min <= x <= np.iinfo(t).max
        )
        dtype = next(fits, dtype)
    return np.ascontiguousarray(x, dtype) if x.ndim else dtype.type(x)


def _kind(x):
    kind = Kind("boolean" if x.dtype.kind == "b" else x.dtype.name)
    return array(kind, x.ndim) if x.ndim else kind


def _check(code, real, compute_capability):
    """Compile the functions by themselves."""
    for functions, kinds in zip(code.functions, code.kinds, strict=True):
        for function in functions:
            if function is not None and not score_functions.is_own(function):
                signature = (real, *(int32,) * 4, *kinds)
                _check_function(function, signature, compute_capability)


_NUMBER, _PAIR = "a number", "an index and a number"


def _check_function(function, signature, compute_capability, returned=_NUMBER):
    """Compile a function by itself, once for all processes."""
    key = kernel_key.of_function(function, signature, compute_capability, returned)
    path = cubin_dir() / f"checked-{key}"
    if key and sealed.read(path) is not None:
        return
    target = {"cc": compute_capability, "device": True, "abi": "numba"}
    try:
        with compiling_for(compute_capability):
            given = tuple(kind.numba for kind in signature)
            _, result = cuda.compile_ptx(function, given, **target)
    except compile_errors() as error:
        raise TypeError(f"score: {where(function)} cannot be compiled: {error}") from error
    is_number = isinstance(result, types.Integer | types.Float | types.Boolean)
    if not (is_number if returned == _NUMBER else isinstance(result, types.BaseTuple)):
        raise TypeError(f"score: {where(function)} must return {returned}, got {result}")
    if key:
        with contextlib.suppress(OSError):  # who keeps the cubin says what is wrong
            sealed.write_private(path, b"")
