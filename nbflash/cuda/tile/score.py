"""Score functions on fragments of scores: see :mod:`nbflash.scores`.

    S' = score(S · factor) · unit = x · rest · unit        (factor: scale, unit: log2 e)

What all scores are multiplied with is left to whoever takes them, who multiplies and adds in one
instruction. One's own functions are compiled by Numba as they are and called once a score. Those of
`nbflash.scores` that matter most have a form of their own, which knows that a score's place is its
fragment's place and a constant:

    softcap    x = tanh(S · (factor / c))                          rest = c         ∂ = 1 − x²
    ALiBi      x = S − |slope / factor · (q − kv + (nk − nq))|     rest = factor    ∂ = 1
    others     x = fn(S · factor, …)                               rest = 1         ∂ = grad(…)
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from nbflash.cuda.kinds import int32, several
from nbflash.cuda.ptx._asm import inlined
from nbflash.cuda.tile.score_math import (
    absolute,
    approximate_tanh,
    call,
    tanh,
    tanh_of_exponent,
    to_float,
    to_int32,
)
from nbflash.cuda.tile.tracing import equal, fma, load, opaque_value, reciprocal, select, unrolled
from nbflash.cuda.tile.warp_math import approximate_reciprocal
from nbflash.definitions import score_functions
from nbflash.definitions.constants import LOG2_E


@dataclass(frozen=True)
class ScoreCode:
    """What a kernel is compiled with of a `nbflash.scores.Score`; its parameters are arguments.

    Attributes
    ----------
    functions : tuple of (callable, callable)
        ``fn`` and ``grad`` of every function, the first one first.
    kinds : tuple of tuple of Kind
        Of their parameters.
    forms : tuple of {"softcap", "alibi", None}
        Which have a form of their own; that of ALiBi is for numbers above 0.
    """

    functions: tuple
    kinds: tuple
    forms: tuple

    @property
    def signature(self):
        """Type of the kernel's argument: (nq, nk), then a tuple for every function."""
        return several((several((int32, int32)), *map(several, self.kinds)))

    @property
    def has_slope(self):
        """Whether the derivative is anything but 1."""
        return any(grad is not score_functions.one for _, grad in self.functions)

    @property
    def slope_of_score(self):
        """Whether it follows from x: tanh comes last, and what is before has the slope 1."""
        *before, (_, last) = zip(self.functions, self.forms, strict=True)
        return last == "softcap" and all(grad is score_functions.one for (_, grad), _ in before)

    @property
    def capped(self):
        """Whether softcap is all there is."""
        return self.forms == ("softcap",)

    @property
    def by_place(self):
        """Whether what a score becomes may depend on where it is."""
        return any(form != "softcap" for form in self.forms)

    @property
    def adds(self):
        """Whether S' is the sum of S and of what its place determines, with which S may begin."""
        return self.forms == ("alibi",)

    @property
    def own(self):
        """Whether all functions are of `nbflash.scores`, whose source is known."""
        return all(score_functions.is_own(fn) for fn, _ in self.functions)

    def __repr__(self):
        names = [fn.__qualname__ for fn, _ in self.functions]
        return f"ScoreCode({names}, {self.kinds}, {self.forms})"


def score_signature(code):
    """Type of the kernel's argument that holds the parameters: () without score functions."""
    return several(()) if code is None else code.signature


class _Place:
    """Where a score is: ``q + dq`` and ``kv + dkv``, of which the second parts are constants."""

    def __init__(self, at, sizes, offset):
        self.b, self.h, self.q, self.kv = at
        self.nq, self.nk = sizes
        self.dq, self.dkv = offset

    def indices(self):
        """Those of a function's arguments; past the end they repeat the last."""
        q, kv, last_q, last_kv = self.q + self.dq, self.kv + self.dkv, self.nq - 1, self.nk - 1
        return self.b, self.h, select(q < last_q, q, last_q), select(kv < last_kv, kv, last_kv)

    def distance(self, aligned, model):
        """From the key to the query: that of the fragment, converted once, and the constant."""
        return to_float(self.q + aligned - self.kv, model), float(self.dq - self.dkv)


# By what P is rounded to, 2^-9 and 2^-12 of it, and what tanh takes its argument times. With the
# approximate one P is off by |S'| 2^-11 of itself: within its rounding for scores up to 4, and like
# flash-attn's beyond. An exact one would be two MUFU, the time of a product.
_TANH = {
    "bfloat16": (approximate_tanh, 1.0),
    "float16": (tanh_of_exponent, 2 * LOG2_E),
    None: (tanh, 1.0),
}


class _Softcap:
    holds = True

    def __init__(self, dtype):
        self._tanh, self._times = _TANH[dtype]
        self._inverse = approximate_reciprocal if dtype else reciprocal

    def hold(self, h, params, factor):
        """Where it is asked for, again and again: a register is dearer."""
        (cap,) = params
        return self._inverse(opaque_value(cap)) * factor * self._times

    def apply(self, s, place, held, params, factor):
        t = self._tanh(s * held)
        return t, lambda: fma(t, t * -1.0, 1.0)

    def rest(self, params, factor):
        return params[0]


class _Alibi:
    holds = True

    def __init__(self, by_head):
        self._by_head = by_head

    def hold(self, h, params, factor):
        """The slope, read long before the scores are there."""
        _, slopes = params
        slope = load(slopes, h) if self._by_head else slopes
        return slope if factor == 1 else slope * reciprocal(factor)

    def apply(self, s, place, held, params, factor):
        start, more = place.distance(params[0], s)
        return s - absolute(fma(held, more, start * held)), None

    def rest(self, params, factor):
        return factor


class _Function:
    """One's own."""

    holds = False

    def __init__(self, fn, grad):
        self._fn = inlined(fn)
        self._grad = None if grad in (None, score_functions.one) else inlined(grad)

    def apply(self, s, place, held, params, factor):
        s, where = s * factor, place.indices()
        x = call(self._fn, s, s, *where, *params)
        if self._grad is None:
            return x, None
        return x, lambda: call(self._grad, s, s, *where, *params)

    def rest(self, params, factor):
        return 1.0


@functools.lru_cache(maxsize=64)
def _form(name, fn, grad, kinds, dtype):
    if name == "softcap":
        return _Softcap(dtype)
    if name == "alibi":
        return _Alibi(kinds[-1].ndim > 0)
    return _Function(fn, grad)


class ScoreSteps(NamedTuple):
    """What `make_score` returns; without functions each is None.

    hold(h, params, factor)                  what of the parameters is read and divided ahead
    apply(s, held, at, params, factor)       x of a fragment at (b, h, query, key)
    apply_with_slope(s, held, at, …)         x with what `slope_at` needs
    rest(params, factor, unit)               what x must be multiplied with, which is positive
    """

    hold: Callable | None = None
    apply: Callable | None = None
    apply_with_slope: Callable | None = None
    rest: Callable | None = None


def make_score(code, offsets, dtype=None):
    """`ScoreSteps` of fragments whose elements are at ``offsets``, (query, key) from their first.

    ``dtype``: of P, than which tanh need not be better.
    """
    if code is None:
        return ScoreSteps()
    parts = zip(code.forms, code.functions, code.kinds, strict=True)
    forms = [_form(name, *functions, kinds, dtype) for name, functions, kinds in parts]

    def factors(params, factor):
        """What the scores are multiplied with before each function, and after the last."""
        yield factor
        for form, own in zip(forms, params[1:], strict=True):
            factor = form.rest(own, factor)
            yield factor

    def run(s, held, place, params, factor):
        """One score, and the derivatives of its functions, not computed yet."""
        slopes, held = [], iter(held)
        for form, own, before in zip(forms, params[1:], factors(params, factor), strict=False):
            s, slope = form.apply(s, place, next(held) if form.holds else None, own, before)
            if slope is not None:
                slopes.append(slope)
        return s, slopes

    @unrolled
    def hold(h, params, factor):
        kept = zip(forms, params[1:], factors(params, factor), strict=False)
        return tuple(form.hold(h, own, before) for form, own, before in kept if form.holds)

    @inlined
    def hold_nothing(h, params, factor):
        return ()

    def places(at, params):
        at = tuple(map(to_int32, at))
        return [_Place(at, params[0], offset) for offset in offsets]

    @unrolled
    def apply(s, held, at, params, factor):
        pairs = zip(s, places(at, params), strict=True)
        return tuple(run(x, held, place, params, factor)[0] for x, place in pairs)

    @unrolled
    def apply_with_slope(s, held, at, params, factor):
        values, derivatives = [], []
        for x, place in zip(s, places(at, params), strict=True):
            value, slopes = run(x, held, place, params, factor)
            values.append(value)
            derivatives.append(math.prod(slope() for slope in slopes))
        return (*values, *derivatives)

    @unrolled
    def rest(params, factor, unit):
        *_, last = factors(params, factor)
        return unit * last

    if code.slope_of_score:
        apply_with_slope = apply
    if not any(form.holds for form in forms):
        hold = hold_nothing
    return ScoreSteps(hold, apply, apply_with_slope, rest)


def slope_at(code, x, i):
    """∂S'/∂S of element ``i``: of a fragment with slopes behind the scores, or of the score."""
    if code.slope_of_score:
        return fma(x[i], x[i] * -1.0, 1.0)
    return x[len(x) // 2 + i]


def weighed(p, slope, hidden):
    """P ∘ ∂S'/∂S of one score; if it may be ``hidden``, 0 where P is: the slope may be NaN."""
    return select(equal(p, 0.0), 0.0, p * slope) if hidden else p * slope


@unrolled
def scaled(x, factor):
    """A fragment, multiplied."""
    return tuple(v * factor for v in x)
