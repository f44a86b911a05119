"""Functions of a score between Q Kᵀ and the softmax: softcap, ALiBi, relative biases, one's own.

    S' = score(scale · Q Kᵀ)      P = softmax(S' over the attended keys)

A `Score` is a chain of plain Python functions of one score and of where it is::

    fn(s, b, h, q_idx, kv_idx, *params) -> s'        grad(s, b, h, q_idx, kv_idx, *params) -> ∂s'/∂s

which Numba compiles into the kernels. ``b`` counts batch elements, ``h`` query heads, ``q_idx`` and
``kv_idx`` tokens, all from 0. What the mask leaves out stays out, whatever ``fn`` makes of it.

An array among the parameters has a gradient (`nbflash.score_backward`) by a third function, which
says the element that the score is made with, and how much it changes the score::

    part(s, b, h, q_idx, kv_idx, *params) -> (index, ∂s'/∂array[index])

Arrays of host memory are copied. One of CUDA memory is not (``nbflash.inputs.score_arrays``):
C-contiguous, of float32 (float64 for float64 inputs) or integers, it is read whenever a kernel
runs, in a CUDA graph at every replay. Training changes it in place, with one plan and one score for
all steps.
"""

import hashlib
import math
from typing import NamedTuple, SupportsFloat

import numpy as np

from nbflash.definitions import score_functions as own
from nbflash.definitions.types import Array, Function, Functions
from nbflash.inputs.arrays import on_cuda
from nbflash.inputs.score_arrays import check_place, key_of, parameter
from nbflash.inputs.score_functions import check_signature, of_arrays, where


class Part(NamedTuple):
    """An array with a gradient: its function, its shape, and what its first axes count.

    ``given`` is the shape that its caller knows, without axes of length 1 in front.
    """

    function: object
    shape: tuple
    axes: tuple = ()
    given: tuple | None = None

    def follows(self, axis, problem):
        """Whether scores apart along ``axis`` are made with different elements."""
        size = {"batch": problem.batch, "heads": problem.heads, "nq": problem.nq, "nk": problem.nk}
        return size[axis] == 1 or (axis in self.axes and self.shape[self.axes.index(axis)] > 1)

    def alone(self, problem):
        """Whether every score has an element of its own."""
        return all(self.follows(axis, problem) for axis in ("batch", "heads", "nq", "nk"))


class Score:
    """Functions, one after the other; immutable, with a hash: part of a plan's key."""

    def __init__(self, stages):
        self._stages = tuple(stages)
        self._key = tuple(stage.key for stage in self._stages)

    def stages(self, nq, nk):
        """``(fn, grad, params)`` of every function, for a problem of nq queries and nk keys."""
        return [stage.at(nq, nk) for stage in self._stages]

    def map(self, change):
        """The score of ``change(stage)`` for every stage."""
        return Score(map(change, self._stages))

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        return sum(x.nbytes for stage in self._stages for x in stage.params)

    @property
    def parts(self):
        """A tuple of `Part` for every function."""
        return [stage.parts for stage in self._stages]

    @property
    def summary(self):
        """What it is called, and a digest of its parameters.

        Those in CUDA memory are not read, nor what one's own functions capture.
        """
        given = [key_of(x) for stage in self._stages for x in stage.params]
        # Of CUDA memory the content is a place, which is another one on every rank.
        given = [(*form, x if isinstance(x, bytes) else None) for *form, x in given]
        return f"{self} of {hashlib.blake2b(repr(given).encode(), digest_size=8).hexdigest()}"

    def check(self, problem):
        """Raise ValueError if a parameter does not fit the problem's sizes."""
        for stage in self._stages:
            stage.check(problem)

    def check_gradient(self):
        """Raise ValueError if there is a function without a gradient."""
        for stage in self._stages:
            if stage.grad is None:
                raise ValueError(f"{stage} has no gradient: pass grad= to scores.custom")

    def check_parts(self, problem):
        """Raise ValueError if an array has no gradient and nobody said so, or if there is none.

        Also if one has no element that a score of the problem can be made with.
        """
        for stage in self._stages:
            if stage.parts is None:
                raise ValueError(
                    f"{stage} has arrays without gradients: pass param_grads= to scores.custom, "
                    f"with None for those that are constants"
                )
        if not any(self.parts):
            raise ValueError(f"{self} has no array with a gradient")
        for part in (part for parts in self.parts for part in parts):
            if 0 in part.shape and not problem.empty:
                raise ValueError(
                    f"{self} has an array of shape {part.shape} with a gradient, and no element"
                )

    def __eq__(self, other):
        return isinstance(other, Score) and self._key == other._key

    def __hash__(self):
        return hash(self._key)

    def __reduce__(self):
        return Score, (self._stages,)  # the key is made anew: it may hold addresses

    def __repr__(self):
        return f"Score({', '.join(map(str, self._stages))})"


class _Stage:
    """A function with its parameters; ``sizes`` says what their first axes must be as long as.

    ``parts`` are those of its arrays; None where nobody has said whether they have gradients.
    """

    def __init__(self, name, fn, grad, params, sizes=(), aligned=False, parts=()):
        self._name, self._fn, self.grad, self.params = name, fn, grad, params
        self._sizes, self._aligned, self.parts = sizes, aligned, parts
        for x in params:
            if isinstance(x, np.ndarray):
                x.flags.writeable = False  # unpickled, it would be writeable
        self.key = fn, grad, parts, tuple(map(key_of, params))

    def __reduce__(self):
        how = self._sizes, self._aligned, self.parts
        return _Stage, (self._name, self._fn, self.grad, self.params, *how)

    def at(self, nq, nk):
        # The last query is aligned with the last key.
        aligned = (np.int64(nk - nq),) if self._aligned else ()
        return self._fn, self.grad, (*aligned, *self.params)

    def check(self, problem):
        real = {"batch": problem.batch, "heads": problem.heads, "nq": problem.nq, "nk": problem.nk}
        for x in self.params:
            check_place(self._name, x, problem)
        for x, axes in zip(self.params, self._sizes, strict=False):
            for n, axis in zip(x.shape, axes, strict=False):
                if n != real[axis] and not (n == 1 and len(axes) > 1):
                    raise ValueError(
                        f"score: {self._name} has {axis}={n}, got inputs with {axis}={real[axis]}"
                    )

    def __str__(self):
        return self._name


def check_score(score, problem):
    """Raise unless ``score`` is None or a Score that fits the problem."""
    if score is None:
        return
    if not isinstance(score, Score):
        raise TypeError(f"score must be made by nbflash.scores, got {type(score).__qualname__}")
    score.check(problem)


def compose(*scores: Score) -> Score:
    """The scores one after the other, the first one first."""
    for score in scores:
        if not isinstance(score, Score):
            raise TypeError(f"compose takes scores, got {type(score).__qualname__}")
    return Score(stage for score in scores for stage in score._stages)


def softcap(cap: SupportsFloat) -> Score:
    """``cap · tanh(s / cap)``: scores within ±cap (Gemma 2).

    Parameters
    ----------
    cap : float
        Positive and finite.

    Notes
    -----
    On ``sm90`` and ``sm80`` in bfloat16 tanh is the hardware's, within 2^-11: a score near 40 may
    be off by 0.02, and its weight by 2 %, where a rounded weight is off by 0.4 %. In float16 there
    scores are within ``cap · 2^-22``: a cap of 1e6 is as good as none, and worse.
    """
    cap = _number("cap", cap)
    if not 0 < cap < math.inf:
        raise ValueError(f"cap must be positive and finite, got {cap}")
    return Score([_Stage(f"softcap({cap:g})", own.softcap, own.softcap_slope, (np.float64(cap),))])


def alibi(slopes: Array) -> Score:
    """``s − slopes[h] · |q_idx + nk − nq − kv_idx|`` (arXiv 2108.12409).

    Parameters
    ----------
    slopes : float or array (heads,)
        Finite. The last query is aligned with the last key, as with ``causal=True``. An array has
        a gradient, a number is a constant. In host memory: the kernel follows from them.
    """
    if on_cuda(slopes):
        raise TypeError("slopes must be in host memory, got an array of CUDA memory; copy it there")
    given, axes = slopes, ("heads",)
    slopes = parameter("slopes", slopes, "(heads,)", 1)
    learned = np.ndim(given) > 0
    if not np.isfinite(slopes).all():
        raise ValueError(f"slopes must be finite, got {slopes}")
    if slopes.size == 1:
        fn, part, params, sizes = own.alibi_of_all, own.alibi_of_all_part, (slopes[0],), ()
    else:
        fn, part, params, sizes = own.alibi, own.alibi_part, (slopes,), (axes,)
    parts = (Part(part, slopes.shape, axes),) if learned else ()
    return Score([_Stage("alibi", fn, own.one, params, sizes, aligned=True, parts=parts)])


def relative(table: Array) -> Score:
    """``s + table[h, clip(kv_idx − q_idx − (nk − nq) + reach, 0, 2 reach)]`` (T5, Shaw et al.).

    Parameters
    ----------
    table : array (heads, 2 reach + 1)
        The middle column is that of the query's own position.
    """
    table = parameter("table", table, "(heads, 2 reach + 1)", 2)
    if table.shape[1] % 2 == 0:
        raise ValueError(f"table must have an odd number of columns, got shape {table.shape}")
    axes = ("heads",)
    parts = (Part(own.relative_part, table.shape, axes),)
    return Score([_Stage("relative", own.relative, own.one, (table,), (axes,), True, parts)])


def bias(array: Array) -> Score:
    """``s + array[b, h, q_idx, kv_idx]``.

    Parameters
    ----------
    array : array (batch or 1, heads or 1, nq or 1, nk or 1)
        Or its last 3 or 2 axes. Booleans are refused: they are no mask here. -inf excludes a pair,
        which costs as much as an attended one, if no function follows and nothing of the pair is
        NaN. A mask also hides NaN, and saves the tiles that it excludes.
    """
    array = parameter("array", array)
    if not 2 <= array.ndim <= 4:
        wanted = "(batch or 1, heads or 1, nq or 1, nk or 1), its last 3 axes or 2"
        raise ValueError(f"array must have shape {wanted}, got {array.shape}")
    if array.dtype == bool:
        raise TypeError("array is added to the scores, got bool; masks.from_dense makes a mask")
    axes = ("batch", "heads", "nq", "nk")
    given = array.shape
    if array.ndim < 4:
        array = array.reshape((1,) * (4 - array.ndim) + given)
    parts = (Part(own.bias_part, array.shape, axes, given),)
    return Score([_Stage("bias", own.bias, own.one, (array,), (axes,), parts=parts)])


def custom(
    fn: Function, grad: Function | None = None, params: Array = (), param_grads: Functions = None
) -> Score:
    """A function of one's own.

    Parameters
    ----------
    fn : callable
        ``fn(s, b, h, q_idx, kv_idx, *params) -> s'``, of scalars; Python that Numba compiles:
        ``a if q_idx > 3 else b`` and ``math``, not ``numpy.where``. -inf is as in `bias`. Kernels
        call it for hidden pairs, too, and divide by 0 as NumPy does; the reference does neither.
    grad : callable, optional
        ``∂s'/∂s`` of the same arguments; without it there is no backward pass.
    params : tuple of float or array
        Copied, except arrays in CUDA memory. Numbers and lists of Python become float64; NumPy's
        scalars and arrays keep their type, but float16 and bfloat16 become float32:
        ``numpy.int64(3)`` is an integer in ``fn``, to count with or to index an array by.
    param_grads : tuple of callable or None, optional
        One for each of ``params``: of the same arguments, it returns ``(index, ∂s'/∂param[index])``
        for the only element of the array that this score depends on; ``index`` is an integer or,
        for several axes, a tuple of integers; negative ones count from the end. None for constants.
        Only `score_backward` needs it: it raises IndexError for an index outside the array, but on
        CUDA arrays it ignores the element and makes the first one of the gradient NaN.

    Raises
    ------
    TypeError, ValueError
        If a function does not take these arguments, with the line that defines it, or if there is
        one for a number.

    Notes
    -----
    Make it once and keep it: another function, even an equal lambda, is planned again, and compiled
    unless one that computes the same is found on disk. Globals and variables of an enclosing
    function keep the values that they have when it is compiled: pass what changes in ``params``.
    Indices with which ``fn`` reads an array are not checked: they must be within it.
    """
    if not isinstance(params, (tuple, list)):
        raise TypeError(f"params must be a tuple, got {type(params).__qualname__}")
    params = tuple(parameter(f"params[{i}]", x) for i, x in enumerate(params))
    functions = {"fn": fn, "grad": grad}
    parts = None if any(x.ndim for x in params) else ()
    if param_grads is not None:
        functions |= of_arrays(param_grads, params)
        pairs = zip(param_grads, params, strict=True)
        parts = tuple(Part(part, x.shape) for part, x in pairs if part is not None)
    for given, function in functions.items():
        if function is not None or given == "fn":
            check_signature(given, function, len(params))
    name = f"custom({where(fn)})"
    return Score([_Stage(name, fn, grad, tuple(map(_scalar, params)), parts=parts)])


def _number(name, x):
    try:
        return float(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, got {x!r}") from error


def _scalar(x):
    return x[()] if x.ndim == 0 else x
