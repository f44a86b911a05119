"""Score functions in the CPU kernels: one's own Python as a `TileFunction`.

S <- score(scale · S) · log2(e)      slope <- ∂score/∂S
"""

import functools
import math

import numpy as np
from numba import carray, from_dtype, typeof, types
from numba.core.errors import NumbaError
from numba.core.registry import cpu_target

from nbflash.backends.cpu.compiling import inlined
from nbflash.backends.cpu.intrinsics import pointer, read
from nbflash.backends.cpu.tile_function import ABSENT, bind, compile_tile_function, kind_of
from nbflash.definitions.constants import LOG2_E
from nbflash.inputs.score_functions import where

NUMBER = (types.Integer, types.Float, types.Boolean), "a number"

# As CUDA divides: 1 / 0 where a pair is hidden is no error.
jitted = functools.partial(inlined, error_model="numpy")


@inlined
def factor(operands, score):
    """What Q Kᵀ is multiplied with: a score function sees natural units."""
    return operands.scale_log2 if score.address == 0 else operands.scale


@inlined
def times_slope(score, ds, slope):
    """dS <- dS ∘ ∂score/∂S, exactly 0 where dS is."""
    if score.address != 0:
        for j in range(ds.size):
            if ds[j] != 0:
                ds[j] *= slope[j]


def prepare(score, nq, nk, real):
    """A `Score` as a bound `TileFunction`; `ABSENT` of None.

    Raises
    ------
    TypeError
        If Numba cannot compile a function, with its reason and the line that defines it.
    """
    if score is None:
        return ABSENT
    stages = score.stages(nq, nk)
    params = contiguous(params for _, _, params in stages)
    functions = tuple((fn, grad) for fn, grad, _ in stages)
    return bind(_compiled(functions, kind_of(params), real), params)


def contiguous(params):
    """The parameters of every function, as records hold them."""
    return tuple(tuple(_contiguous(x) for x in own) for own in params)


def _contiguous(x):
    if x.ndim and not x.flags.c_contiguous:
        x = np.ascontiguousarray(x)
        x.flags.writeable = False
    return x


@functools.lru_cache(maxsize=128)
def _compiled(functions, kinds, real):
    make = functools.partial(_tile_function, functions, kinds, real)
    return compile_tile_function(make, "score", functions, str(kinds), real)


def _tile_function(functions, kinds, real):
    stages = [(jitted(fn), jitted(grad or _no_slope)) for fn, grad in functions]
    check_stages(stages, kinds, real)
    values, with_slopes, params_at = _values(stages), _with_slopes(stages), read(kinds)

    @inlined
    def tile(s, slope, step, rows, columns, b, h, q0, kv0, record):
        params = params_at(record)
        for i in range(rows):
            x = carray(pointer(s + i * step, real), (columns,))
            if slope == 0:
                for j in range(columns):
                    x[j] = values(x[j], b, h, q0 + i, kv0 + j, params) * LOG2_E
            else:
                derivatives = carray(pointer(slope + i * step, real), (columns,))
                for j in range(columns):
                    value, derivative = with_slopes(x[j], b, h, q0 + i, kv0 + j, params)
                    x[j] = value * LOG2_E
                    derivatives[j] = derivative

    return tile


def _values(stages):
    """One function for those of ``(fn, grad)`` one after the other."""
    if not stages:
        return inlined(lambda s, b, h, q_idx, kv_idx, params: s)
    (first, _), *others = stages
    rest = _values(others)

    @inlined
    def run(s, b, h, q_idx, kv_idx, params):
        s = first(s, b, h, q_idx, kv_idx, *params[0])
        return rest(s, b, h, q_idx, kv_idx, params[1:])

    return run


def _with_slopes(stages):
    """As `_values`, with the derivative."""
    if not stages:
        return inlined(lambda s, b, h, q_idx, kv_idx, params: (s, 1.0))
    (first, slope), *others = stages
    rest = _with_slopes(others)

    @inlined
    def run(s, b, h, q_idx, kv_idx, params):
        own = slope(s, b, h, q_idx, kv_idx, *params[0])
        x = first(s, b, h, q_idx, kv_idx, *params[0])
        x, others = rest(x, b, h, q_idx, kv_idx, params[1:])
        return x, own * others

    return run


def _no_slope(s, b, h, q_idx, kv_idx, *params):
    """Of a function without a gradient, which has no backward pass."""
    return math.nan


def check_stages(stages, kinds, real):
    """Compile the functions of ``(fn, grad)`` as they follow each other.

    Raises
    ------
    TypeError
        If Numba cannot compile one, or it returns no number.
    """
    s = from_dtype(np.dtype(real))
    for functions, params in zip(stages, kinds, strict=True):
        s, _ = (result_of(function, s, params, *NUMBER) for function in functions)


def result_of(function, s, params, kind, what):
    """The type that a jitted function returns for a score of type ``s`` and its parameters."""
    name = where(function.py_func)
    arguments = s, *(types.int64,) * 4, *params
    try:
        signature = typeof(function).get_call_type(cpu_target.typing_context, arguments, {})
    except NumbaError as error:
        raise TypeError(f"score: {name} cannot be compiled: {error}") from error
    result = signature.return_type
    if not isinstance(result.type if isinstance(result, types.Optional) else result, kind):
        raise TypeError(f"score: {name} must return {what}, got {result}")
    return result
