"""The immutable `Mask`: definition, algebra, equality, tiles."""

from __future__ import annotations

import hashlib
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from masks import _check, tiles

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from masks.stats import MaskStats


class Mask:
    """Which keys each query may attend to: an immutable boolean function of ``(q, kv)``.

    A *plain* mask is one ``(nq, nk)`` pattern. A multi-plane mask (`per_head`, `per_batch`) holds
    several plain ones and says which applies to each (batch, head).

    Masks combine with ``|``, ``&``, ``^``, ``-`` and ``~``; ``m.T`` swaps queries and keys;
    ``numpy.asarray(m)`` is ``m.dense()``. ``==`` and ``hash``
    compare structure: equal masks have equal cells, while two masks with equal cells that were
    built in different ways may compare unequal.

    Attributes
    ----------
    shape : (int, int)
        ``(nq, nk)``, numbers of queries and of keys.
    batch, heads : int or None
        Number of batch entries and heads the mask distinguishes; None broadcasts.
    planes : tuple of Mask
        The distinct plain masks; ``(self,)`` for a plain mask.
    plane_index : ndarray
        int32 ``(batch or 1, heads or 1)``, the index into ``planes``.
    """

    __slots__ = ("__weakref__", "_digest", "_hash", "_memo", "_shape")

    batch = None
    heads = None
    #: What a class is called with, as attributes of its masks; nq and nk are those of the shape.
    _fields = ()
    __array_ufunc__ = None  # NumPy would combine the mask with every element of an array

    def __init__(self, nq: SupportsIndex, nk: SupportsIndex) -> None:
        self._shape = (int(nq), int(nk))
        self._memo = {}
        self._digest = self._hash = None

    # What a plain mask implements. `grid` is a tiles.Grid, `rows`, `cols` are int64 tile indices.

    def _at(self, q, kv):
        """Definition on broadcasting int64 index arrays that are in range."""
        raise NotImplementedError

    def _live(self, grid):
        """Sorted linear indices (row * n_col + col) of a superset of the live tiles."""
        raise NotImplementedError

    def _size(self, grid):
        """Upper bound on the number of live tiles, cheap."""
        return self._live(grid).size

    def _state(self, grid, rows, cols):
        """int8 per tile: ABSENT, INTERVAL (equals `_hint` there), FULL (all cells) or OPEN."""
        raise NotImplementedError

    def _counts(self, grid, rows, cols):
        """Attended cells of each tile, int64; -1 where only its cells tell."""
        state = self._state(grid, rows, cols)
        counts = np.choose(state, [0, -1, grid.area(rows, cols), -1])
        inside = state == tiles.INTERVAL
        if inside.any():
            bounds = grid, *self._hint(), rows[inside], cols[inside]
            counts[inside] = tiles.interval_counts(*bounds)
        return counts

    def _patterns(self, grid, rows, cols):
        """A number for each tile, int64: cells of equal ones are the same; -1 where none is known.

        Asked of tiles that the row intervals of `_hint` cover whole.
        """
        return np.full(rows.size, -1)

    def _parts(self):
        """Arrays, numbers and masks that determine this mask within its class."""
        raise NotImplementedError

    def _transposed(self):
        from masks.algebra import Transposed

        return Transposed(self)

    def _complement(self):
        from masks.algebra import Complement

        return Complement(self)

    def _restricted(self, q, kv):
        from masks.restriction import Restricted

        return Restricted(self, q, kv)

    def _hint(self):
        """Row intervals (lo, hi) that INTERVAL tiles refer to, or None."""
        return None

    def _cells(self, grid, rows, cols):
        """Boolean ``(t, tile_m, tile_n)``; cells past the edge are arbitrary."""
        q, kv = grid.indices(rows, cols)
        return np.broadcast_to(self._at(q, kv), (rows.size, grid.tile_m, grid.tile_n))

    def _cached(self, key, make):
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    # What users call.

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def planes(self) -> tuple[Mask, ...]:
        return (self,)

    @property
    def plane_index(self) -> NDArray[np.int32]:
        return np.zeros((1, 1), np.int32)

    @property
    def is_plain(self) -> bool:
        """True unless the mask distinguishes heads or batch entries."""
        return True

    def __call__(
        self, q_idx: ArrayLike, kv_idx: ArrayLike, *, head: int = 0, batch: int = 0
    ) -> NDArray[np.bool_]:
        """Whether query `q_idx` attends to key `kv_idx`.

        Parameters
        ----------
        q_idx, kv_idx : array_like of int
            Broadcasting indices, ``0 <= q_idx < nq`` and ``0 <= kv_idx < nk``.
        head, batch : int
            Plane to look at; only a multi-plane mask distinguishes them.

        Returns
        -------
        ndarray of bool
        """
        q = _indices("q_idx", q_idx, self.shape[0])
        kv = _indices("kv_idx", kv_idx, self.shape[1])
        shape = np.broadcast_shapes(q.shape, kv.shape)
        if 0 in shape:
            return np.zeros(shape, bool)
        plane = self._plane(head, batch)
        return np.array(np.broadcast_to(plane._at(q, kv), shape))

    def _plane(self, head, batch):
        return self

    def dense(self) -> NDArray[np.bool_]:
        """Boolean array: ``(nq, nk)``, or ``(batch or 1, heads or 1, nq, nk)`` if multi-plane."""
        nq, nk = self.shape
        out = np.zeros((nq, nk), bool)
        kv = np.arange(nk)[None, :]
        step = max(1, tiles.CELLS_PER_CHUNK // max(nk, 1))
        for start in range(0, nq if nk else 0, step):
            q = np.arange(start, min(start + step, nq))[:, None]
            out[start : start + step] = self._at(q, kv)
        return out

    def tiles(self, tile_m: SupportsIndex, tile_n: SupportsIndex | None = None) -> tiles.Tiles:
        """Classify the mask into tiles; the result is cached on the mask.

        Parameters
        ----------
        tile_m : int
            Queries per tile.
        tile_n : int, optional
            Keys per tile; `tile_m` when omitted.

        Returns
        -------
        masks.Tiles
        """
        tile_m = _check.integer("tile_m", tile_m, 1)
        tile_n = tile_m if tile_n is None else _check.integer("tile_n", tile_n, 1)
        return self._cached(("tiles", tile_m, tile_n), lambda: tiles.build(self, tile_m, tile_n))

    def live_tiles(
        self, tile_m: SupportsIndex, tile_n: SupportsIndex | None = None
    ) -> tuple[int, int]:
        """About how many tiles have attended cells, and how many have no others: without cells.

        Where more than one tile of eight can only be told by its cells, all are classified; else
        such tiles count as attended in part.

        Parameters
        ----------
        tile_m, tile_n
            As of `tiles`.

        Returns
        -------
        live, full : int
        """
        tile_m = _check.integer("tile_m", tile_m, 1)
        tile_n = tile_m if tile_n is None else _check.integer("tile_n", tile_n, 1)
        count = lambda: tiles.live_and_full(self, tile_m, tile_n)
        return self._cached(("live tiles", tile_m, tile_n), count)

    def count_nonzero(self) -> int:
        """Number of attended (query, key) pairs, summed over the planes of all (batch, head)."""
        from masks.counting import total

        return total(self)

    @property
    def nnz(self) -> int:
        """`count_nonzero`, under SciPy's name."""
        return self.count_nonzero()

    def to_scipy(self, block: SupportsIndex = 1, *, touched: bool = False) -> csr_array:
        """Blocks of the mask as a boolean ``scipy.sparse.csr_array``.

        Parameters
        ----------
        block : int
            Block size; 1 gives the exact token matrix.
        touched : bool
            Count a partly attended block as present. Otherwise one raises ValueError.
        """
        from masks.block import to_scipy

        return to_scipy(self, block, touched)

    def stats(
        self,
        tile: SupportsIndex = 128,
        *,
        head_dim: SupportsIndex = 64,
        itemsize: SupportsIndex = 2,
    ) -> MaskStats:
        """Densities, FLOPs, bytes, balance and reachability: see `masks.MaskStats`."""
        from masks.stats import stats

        return stats(self, tile, head_dim, itemsize)

    def draw(self, size: SupportsIndex = 32) -> str:
        """Picture of the mask as text, at any size: see `masks.draw.text`."""
        from masks.draw import text

        return text(self, size)

    def plot(self, ax: Any = None, *, tile: SupportsIndex | None = None) -> Any:
        """Picture of the mask on matplotlib axes: see `masks.draw.plot`."""
        from masks.draw import plot

        return plot(self, ax, tile)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the mask to an ``.npz`` file without pickle; `masks.load` reads it back."""
        from masks.io import save

        save(path, self)

    @property
    def T(self) -> Mask:
        """The mask with queries and keys swapped."""
        return self._transposed()

    def __or__(self, other: Mask) -> Mask:
        from masks.algebra import union

        return union(self, other) if _combines(other) else NotImplemented

    def __and__(self, other: Mask) -> Mask:
        from masks.algebra import intersection

        return intersection(self, other) if _combines(other) else NotImplemented

    def __xor__(self, other: Mask) -> Mask:
        return (self - other) | (other - self) if _combines(other) else NotImplemented

    def __sub__(self, other: Mask) -> Mask:
        return self & ~other if _combines(other) else NotImplemented

    __ror__, __rand__, __rxor__, __rsub__ = __or__, __and__, __xor__, __sub__

    def __array__(self, dtype: DTypeLike = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("the array of a mask is always a new one: copy=False is not possible")
        return self.dense() if dtype is None else self.dense().astype(dtype)

    def __invert__(self) -> Mask:
        return self._complement()

    def __bool__(self) -> NoReturn:
        raise ValueError(
            "a mask is neither true nor false: masks combine with &, |, ^, - and ~, not with and, "
            "or and not; ask `mask is None` or mask.count_nonzero()"
        )

    @property
    def _key(self):
        if self._digest is None:
            self._digest = (type(self).__name__, self.shape, *map(digest, self._parts()))
        return self._digest

    def _arguments(self):
        """Values of `_fields`: they make the mask again, from a file or a pickle."""
        shape = dict(zip(("nq", "nk"), self.shape, strict=True))
        return tuple(shape[x] if x in shape else getattr(self, x) for x in self._fields)

    def __reduce__(self):
        # Nothing that was computed goes along: hashes are those of one process.
        return type(self), self._arguments()

    def __eq__(self, other):
        if not isinstance(other, Mask):
            return NotImplemented
        return self is other or self._key == other._key

    def __hash__(self):
        if self._hash is None:
            self._hash = hash(self._key)
        return self._hash

    def __repr__(self):
        return f"<{type(self).__name__} mask {self.shape[0]} x {self.shape[1]}>"


def _combines(other):
    """Whether `other` is a mask; TypeError for an array, which could be one."""
    if isinstance(other, np.ndarray):
        raise TypeError(
            "a mask does not combine with an array: wrap the array in masks.from_dense(array)"
        )
    return isinstance(other, Mask)


def digest(part):
    """Hashable stand-in for one part of a mask; arrays are hashed by content."""
    if isinstance(part, np.ndarray):
        content = hashlib.blake2b(np.ascontiguousarray(part), digest_size=16).digest()
        return (part.dtype.str, part.shape, content)
    return part


def _indices(name, values, limit):
    array = _check.array_of(name, values)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: must be integers")
    bad = (array < 0) | (array >= limit)
    if bad.any():
        raise ValueError(f"{name} holds {array[bad].flat[0]}: must lie in [0, {limit})")
    return array.astype(np.int64)
