"""Functions of a score between Q Kᵀ and the softmax: softcap, ALiBi, relative biases, one's own.

    S' = score(scale · Q Kᵀ)      P = softmax(S' over the attended keys)

A `Score` is a chain of plain Python functions of one score and of where it is,

    fn(s, b, h, q_idx, kv_idx, *params) -> s'        grad(s, b, h, q_idx, kv_idx, *params) -> ∂s'/∂s

which Numba compiles into the kernels. ``b`` counts batch elements, ``h`` query heads, ``q_idx`` and
``kv_idx`` tokens, all from 0. What the mask leaves out stays out, whatever ``fn`` makes of it.
"""

import inspect
import math

import numpy as np

INDICES = ("s", "b", "h", "q_idx", "kv_idx")


class Score:
    """One function, or several one after the other; immutable, with a hash: part of a plan's key.

    Made by `softcap`, `alibi`, `relative`, `bias`, `custom` and `compose`.
    """

    def __init__(self, stages):
        self._stages = tuple(stages)

    def stages(self, nq, nk):
        """``(fn, grad, params)`` of every function, for a problem of nq queries and nk keys."""
        return [stage.at(nq, nk) for stage in self._stages]

    def check(self, problem):
        """Raise ValueError if a parameter does not fit the problem's sizes."""
        for stage in self._stages:
            stage.check(problem)

    def check_gradient(self):
        """Raise ValueError if there is a function without a gradient."""
        for stage in self._stages:
            if stage.grad is None:
                raise ValueError(f"{stage} has no gradient: pass grad= to scores.custom")

    def _key(self):
        return tuple(stage.key for stage in self._stages)

    def __eq__(self, other):
        return isinstance(other, Score) and self._key() == other._key()

    def __hash__(self):
        return hash(self._key())

    def __repr__(self):
        return f"Score({', '.join(map(str, self._stages))})"


class _Stage:
    """A function with its parameters; ``sizes`` says what their axes must be as long as."""

    def __init__(self, name, fn, grad, params, sizes=(), aligned=False):
        self._name, self._fn, self.grad, self._params = name, fn, grad, params
        self._sizes, self._aligned = sizes, aligned
        contents = tuple((x.shape, x.dtype.str, x.tobytes()) for x in params)
        self.key = fn, grad, contents

    def at(self, nq, nk):
        # The last query is aligned with the last key.
        aligned = (np.int64(nk - nq),) if self._aligned else ()
        return self._fn, self.grad, (*aligned, *self._params)

    def check(self, problem):
        real = {"batch": problem.batch, "heads": problem.heads, "nq": problem.nq, "nk": problem.nk}
        for x, axes in zip(self._params, self._sizes, strict=False):
            for n, axis in zip(x.shape, axes, strict=True):
                if n != real[axis] and not (n == 1 and len(axes) > 1):
                    raise ValueError(
                        f"score: {self._name} has {axis}={n}, got inputs with {axis}={real[axis]}"
                    )

    def __str__(self):
        return self._name


def compose(*scores):
    """The scores one after the other, the first one first."""
    for score in scores:
        if not isinstance(score, Score):
            raise TypeError(f"compose takes scores, got {type(score).__qualname__}")
    return Score(stage for score in scores for stage in score._stages)


def softcap(cap):
    """``cap · tanh(s / cap)``: scores within ±cap (Gemma 2).

    Parameters
    ----------
    cap : float
        Positive and finite.
    """
    cap = _number("cap", cap)
    if not 0 < cap < math.inf:
        raise ValueError(f"cap must be positive and finite, got {cap}")
    return Score([_Stage(f"softcap({cap:g})", _softcap, _softcap_slope, (np.float64(cap),))])


def alibi(slopes):
    """``s − slopes[h] · |q_idx + nk − nq − kv_idx|`` (arXiv 2108.12409).

    Parameters
    ----------
    slopes : float or array (heads,)
        The last query is aligned with the last key, as with ``causal=True``.
    """
    slopes = _array("slopes", slopes, 1)
    if slopes.size == 1:
        return Score([_Stage("alibi", _alibi_of_all, _one, (slopes[0],), aligned=True)])
    return Score([_Stage("alibi", _alibi, _one, (slopes,), (("heads",),), aligned=True)])


def relative(table):
    """``s + table[h, clip(kv_idx − q_idx − (nk − nq) + reach, 0, 2 reach)]`` (T5, Shaw et al.).

    Parameters
    ----------
    table : array (heads, 2 reach + 1)
        The middle column is that of the query's own position.
    """
    table = _array("table", table, 2)
    if table.shape[1] % 2 == 0:
        raise ValueError(f"table must have an odd number of columns, got shape {table.shape}")
    return Score([_Relative("relative", _relative, _one, (table,), aligned=True)])


class _Relative(_Stage):
    def check(self, problem):
        heads = self._params[0].shape[0]
        if heads != problem.heads:
            raise ValueError(
                f"score: relative has heads={heads}, got inputs with heads={problem.heads}"
            )


def bias(array):
    """``s + array[b, h, q_idx, kv_idx]``. Its own gradient is not computed.

    Parameters
    ----------
    array : array (batch or 1, heads or 1, nq or 1, nk or 1)
    """
    array = _array("array", array, 4)
    sizes = (("batch", "heads", "nq", "nk"),)
    return Score([_Stage("bias", _bias, _one, (array,), sizes)])


def custom(fn, grad=None, params=()):
    """A function of one's own.

    Parameters
    ----------
    fn : callable
        ``fn(s, b, h, q_idx, kv_idx, *params) -> s'``, of scalars; Python that Numba compiles.
    grad : callable, optional
        ``∂s'/∂s`` of the same arguments; without it there is no backward pass.
    params : tuple of float or array
        Copied; of float64 unless they are arrays of another type.

    Raises
    ------
    TypeError
        If a function does not take these arguments, with the line that defines it.
    """
    params = tuple(_array(f"params[{i}]", x, None) for i, x in enumerate(params))
    for given, function in (("fn", fn), ("grad", grad)):
        if function is not None:
            _check_signature(given, function, len(params))
    return Score([_Stage(f"custom({where(fn)})", fn, grad, tuple(map(_scalar, params)))])


def where(fn):
    """Name, file and line of a function."""
    code = fn.__code__
    return f"{fn.__qualname__}, {code.co_filename}:{code.co_firstlineno}"


def _check_signature(given, fn, n_params):
    if not inspect.isfunction(fn):
        raise TypeError(f"{given} must be a Python function, got {type(fn).__qualname__}")
    expected = [*INDICES, *(f"params[{i}]" for i in range(n_params))]
    try:
        inspect.signature(fn).bind(*expected)
    except TypeError as error:
        raise TypeError(
            f"{given} must take ({', '.join(expected)}), {error}: {where(fn)}"
        ) from error


def _number(name, x):
    try:
        return float(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, got {x!r}") from error


def _array(name, x, ndim):
    """A read-only copy; numbers and lists become float64."""
    x = np.array(x, dtype=None if isinstance(x, np.ndarray) else np.float64)
    x = x.reshape(1) if x.ndim == 0 and ndim == 1 else x
    if ndim is not None and x.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, got shape {x.shape}")
    if x.dtype.kind not in "fiub" or x.dtype.itemsize == 2:
        raise TypeError(f"{name} must be an array of float32, float64 or integers, got {x.dtype}")
    x.flags.writeable = False
    return x


def _scalar(x):
    return x[()] if x.ndim == 0 else x


def _one(s, b, h, q_idx, kv_idx, *params):
    return 1.0


def _softcap(s, b, h, q_idx, kv_idx, cap):
    return cap * math.tanh(s / cap)


def _softcap_slope(s, b, h, q_idx, kv_idx, cap):
    t = math.tanh(s / cap)
    return 1 - t * t


def _alibi(s, b, h, q_idx, kv_idx, aligned, slopes):
    return s - slopes[h] * abs(q_idx + aligned - kv_idx)


def _alibi_of_all(s, b, h, q_idx, kv_idx, aligned, slope):
    return s - slope * abs(q_idx + aligned - kv_idx)


def _relative(s, b, h, q_idx, kv_idx, aligned, table):
    reach = table.shape[1] // 2
    return s + table[h, min(max(kv_idx - q_idx - aligned + reach, 0), 2 * reach)]


def _bias(s, b, h, q_idx, kv_idx, array):
    n0, n1, n2, n3 = array.shape
    return s + array[min(b, n0 - 1), min(h, n1 - 1), min(q_idx, n2 - 1), min(kv_idx, n3 - 1)]
