"""Union, intersection, complement and transpose of masks.

Tiles are decided from the operands' tile states wherever that is enough (FULL | x = FULL,
FULL & x = x, ...); only the rest is looked at cell by cell. An intersection visits the live tiles
of its sparsest operand alone, so ``butterfly & causal`` never lists the causal triangle.
"""

from functools import reduce

import numpy as np

from masks.base import Mask
from masks.tiles import ABSENT, FULL, INTERVAL, OPEN

# Patterns of an operand are told apart by a factor of the number of operands.
_MOST_PATTERNS = 1 << 48


class _Nary(Mask):
    """Operands in order of first appearance; equality ignores the order."""

    __slots__ = ("operands",)
    _fields = ("operands",)

    def __init__(self, operands):
        super().__init__(*operands[0].shape)
        self.operands = tuple(operands)

    def _parts(self):
        return (frozenset(self.operands),)

    def _at(self, q, kv):
        return reduce(self._combine, (m._at(q, kv) for m in self.operands))

    def _cells(self, grid, rows, cols):
        return reduce(self._combine, (m._cells(grid, rows, cols) for m in self.operands))

    def _counts(self, grid, rows, cols):
        """Those of one operand where all others are neutral."""
        counts = Mask._counts(self, grid, rows, cols)
        at = np.flatnonzero(counts < 0)
        states = np.stack([m._state(grid, rows[at], cols[at]) for m in self.operands])
        neutral = states == self._neutral
        alone = neutral.sum(0) == len(states) - 1
        for m, others in zip(self.operands, neutral, strict=True):
            own = at[alone & ~others]
            counts[own] = m._counts(grid, rows[own], cols[own])
        return counts

    def _patterns(self, grid, rows, cols):
        """Those of one operand where all others are neutral."""
        patterns = Mask._patterns(self, grid, rows, cols)
        states = np.stack([m._state(grid, rows, cols) for m in self.operands])
        neutral = states == self._neutral
        alone = neutral.sum(0) == len(states) - 1
        for i, (m, others) in enumerate(zip(self.operands, neutral, strict=True)):
            own = np.flatnonzero(alone & ~others)
            of_operand = m._patterns(grid, rows[own], cols[own])
            fits = (of_operand >= 0) & (of_operand < _MOST_PATTERNS)
            patterns[own[fits]] = of_operand[fits] * len(self.operands) + i
        return patterns

    def _transposed(self):
        return type(self).of([m.T for m in self.operands])

    def _complement(self):
        return self._dual().of([~m for m in self.operands])

    def _restricted(self, q, kv):
        return type(self).of([m._restricted(q, kv) for m in self.operands])

    def _hint(self):
        return self._cached("hint", self._make_hint)

    def _hints(self):
        """Those of the operands that have one."""
        return [hint for m in self.operands if (hint := m._hint()) is not None]


class Union(_Nary):
    """``a | b | ...``"""

    __slots__ = ()
    _combine = staticmethod(np.logical_or)
    _neutral = ABSENT

    @classmethod
    def of(cls, operands):
        return reduce(union, operands)

    @staticmethod
    def _dual():
        return Intersection

    def _make_hint(self):
        """Row by row the hull where the intervals touch, else the first operand's interval."""
        hints = self._hints()
        if not hints:
            return None
        lo, hi = hints[0]
        for other_lo, other_hi in hints[1:]:
            alone = lo == hi
            other = alone | ((other_lo < other_hi) & (other_lo <= hi) & (lo <= other_hi))
            lo, hi = (
                np.where(other, np.where(alone, other_lo, np.minimum(lo, other_lo)), lo),
                np.where(other, np.where(alone, other_hi, np.maximum(hi, other_hi)), hi),
            )
        return lo, hi

    def _live(self, grid):
        return reduce(np.union1d, (m._live(grid) for m in self.operands))

    def _size(self, grid):
        return sum(m._size(grid) for m in self.operands)

    def _state(self, grid, rows, cols):
        states = np.stack([m._state(grid, rows, cols) for m in self.operands])
        state = np.where((states == FULL).any(0), FULL, OPEN).astype(np.int8)
        present = (states != ABSENT).sum(0)
        state[present == 0] = ABSENT
        sole = len(self._hints()) == 1  # then it is this mask's own
        for m, own in zip(self.operands, states, strict=True):
            alone = np.flatnonzero((own == INTERVAL) & (present == 1))
            if sole:
                state[alone] = INTERVAL
                continue
            for chunk in grid.chunks(alone.size, grid.height):
                at = alone[chunk]
                bounds = grid.row_bounds(*m._hint(), rows[at], cols[at])
                state[at[_matches_hint(self, grid, rows[at], cols[at], bounds)]] = INTERVAL
        return state


class Intersection(_Nary):
    """``a & b & ...``"""

    __slots__ = ()
    _combine = staticmethod(np.logical_and)
    _neutral = FULL

    @classmethod
    def of(cls, operands):
        return reduce(intersection, operands)

    @staticmethod
    def _dual():
        return Union

    def _make_hint(self):
        hints = self._hints()
        if not hints:
            return None
        lo = reduce(np.maximum, (hint[0] for hint in hints))
        hi = reduce(np.minimum, (hint[1] for hint in hints))
        live = lo < hi
        return lo * live, hi * live

    def _live(self, grid):
        return min(self.operands, key=lambda m: m._size(grid))._live(grid)

    def _size(self, grid):
        return min(m._size(grid) for m in self.operands)

    def _state(self, grid, rows, cols):
        """Operands in order of size, each asked only about the tiles that still live."""
        state = np.full(rows.size, FULL, np.int8)
        pending = np.arange(rows.size)
        found = []
        for m in sorted(self.operands, key=lambda m: m._size(grid)):
            own = m._state(grid, rows[pending], cols[pending])
            state[pending[own == ABSENT]] = ABSENT
            state[pending[own == OPEN]] = OPEN
            bounded = pending[own == INTERVAL]
            state[bounded[state[bounded] == FULL]] = INTERVAL
            found.append((m, bounded))
            pending = pending[own != ABSENT]
        if len(self._hints()) > 1:  # else the only one is this mask's own
            self._settle_intervals(grid, rows, cols, state, found)
        return state

    def _settle_intervals(self, grid, rows, cols, state, found):
        """INTERVAL where the operands' intervals meet in this mask's own hint, else OPEN."""
        at = np.flatnonzero(state == INTERVAL)
        for chunk in grid.chunks(at.size, grid.height):
            part = at[chunk]
            lo = np.zeros((part.size, grid.height), np.int64)
            hi = np.full((part.size, grid.height), grid.nk)
            for m, bounded in found:
                here = np.flatnonzero(np.isin(part, bounded, assume_unique=True))
                if here.size:
                    bounds = grid.row_bounds(*m._hint(), rows[part[here]], cols[part[here]])
                    lo[here] = np.maximum(lo[here], bounds[0])
                    hi[here] = np.minimum(hi[here], bounds[1])
            live = lo < hi
            same = _matches_hint(self, grid, rows[part], cols[part], (lo * live, hi * live))
            state[part] = np.where(same, INTERVAL, OPEN)
            state[part[~live.any(1)]] = ABSENT


class Complement(Mask):
    """``~m`` of a leaf whose complement has no closed form of its own."""

    __slots__ = ("inner",)
    _fields = ("inner",)

    def __init__(self, inner):
        super().__init__(*inner.shape)
        self.inner = inner

    def _parts(self):
        return (self.inner,)

    def _at(self, q, kv):
        return ~self.inner._at(q, kv)

    def _cells(self, grid, rows, cols):
        return ~self.inner._cells(grid, rows, cols)

    def _complement(self):
        return self.inner

    def _transposed(self):
        return ~self.inner.T

    def _restricted(self, q, kv):
        return ~self.inner._restricted(q, kv)

    def _join(self, other):
        folded = _fold(self.inner, other.inner, "_meet")
        return None if folded is None else ~folded

    def _meet(self, other):
        folded = _fold(self.inner, other.inner, "_join")
        return None if folded is None else ~folded

    def _live(self, grid):
        return np.arange(grid.n_row * grid.n_col)

    def _size(self, grid):
        return grid.n_row * grid.n_col

    def _state(self, grid, rows, cols):
        inner = self.inner._state(grid, rows, cols)
        return np.choose(inner, [FULL, OPEN, ABSENT, OPEN]).astype(np.int8)

    def _counts(self, grid, rows, cols):
        inner = self.inner._counts(grid, rows, cols)
        return np.where(inner < 0, -1, grid.area(rows, cols) - inner)


class Transposed(Mask):
    """``m.T`` of a leaf whose transpose has no closed form of its own."""

    __slots__ = ("inner",)
    _fields = ("inner",)

    def __init__(self, inner):
        super().__init__(*inner.shape[::-1])
        self.inner = inner

    def _parts(self):
        return (self.inner,)

    def _at(self, q, kv):
        return self.inner._at(kv, q)

    def _cells(self, grid, rows, cols):
        return self.inner._cells(grid.T, cols, rows).swapaxes(1, 2)

    def _transposed(self):
        return self.inner

    def _restricted(self, q, kv):
        return self.inner._restricted(kv, q).T

    def _live(self, grid):
        row, col = np.divmod(self.inner._live(grid.T), max(grid.n_row, 1))
        return np.sort(col * grid.n_col + row)

    def _size(self, grid):
        return self.inner._size(grid.T)

    def _state(self, grid, rows, cols):
        state = self.inner._state(grid.T, cols, rows)
        return np.where(state == INTERVAL, OPEN, state).astype(np.int8)

    def _counts(self, grid, rows, cols):
        return self.inner._counts(grid.T, cols, rows)


def _matches_hint(mask, grid, rows, cols, bounds):
    """Whether row bounds equal the mask's own hint inside each tile, bool ``(t,)``."""
    lo, hi = grid.row_bounds(*mask._hint(), rows, cols)
    return ((lo == bounds[0]) & (hi == bounds[1])).all(1)


def union(a, b):
    """``a | b``; intervals and block masks fold into one leaf where the result is one."""
    return _combine(a, b, Union, "_join")


def intersection(a, b):
    """``a & b``; intervals and block masks fold into one leaf."""
    return _combine(a, b, Intersection, "_meet")


def _combine(a, b, node, fold):
    if a.shape != b.shape:
        raise ValueError(f"masks of shapes {a.shape} and {b.shape} do not combine")
    if not (a.is_plain and b.is_plain):
        from masks.planes import combine

        return combine(a, b, union if node is Union else intersection)
    ours, theirs = (m.operands if isinstance(m, node) else (m,) for m in (a, b))
    operands = _folded(ours, theirs, fold)
    return operands[0] if len(operands) == 1 else node(operands)


def _fold(a, b, fold):
    """One leaf for the union ("_join") or intersection ("_meet") of two alike, or None."""
    return getattr(a, fold, lambda _: None)(b) if type(a) is type(b) else None


def _folded(ours, theirs, fold):
    """All operands, folded two by two where the leaves know how.

    Of several folds the one of the smallest hashes comes first: the order of operands does not
    decide what the result is made of.
    """
    operands = [*ours, *(m for m in theirs if m not in ours)]
    pairs = [(a, b) for a in ours for b in theirs if a != b]  # two of one side do not fold
    while True:
        folds = [(a, b, m) for a, b in pairs if (m := _fold(a, b, fold)) is not None]
        if not folds:
            return operands
        a, b, folded = min(folds, key=lambda x: sorted((hash(x[0]), hash(x[1]))))
        operands = [m for m in operands if m not in (a, b, folded)]
        pairs = [pair for pair in pairs if a not in pair and b not in pair]
        pairs += [(m, folded) for m in operands]
        operands.append(folded)
