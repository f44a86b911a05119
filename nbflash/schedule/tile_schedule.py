"""TileSchedule: the execution order of a mask, as plain arrays that every kernel walks.

A mask knows geometry; a schedule knows execution. It is the CSR of live tiles (Algorithm 5's
``M_ij != 0``) plus two bounds per query row and the bit tiles of irregular patterns. Its transpose
walks the same tiles by columns, for dK and dV.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array

from masks import Mask
from masks.tiles import BITS, FULL, INTERVAL

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class TileSchedule:
    """Live tiles of a mask, row by row, for tiles of ``tile_m`` queries and ``tile_n`` keys.

    Row ``r`` of query head ``h`` in batch element ``b`` holds the entries
    ``row_ptr[p * n_row + r]`` to ``row_ptr[p * n_row + r + 1]`` of ``col_idx`` and ``kind``, where
    ``p = plane_of(batch, heads)[b * heads + h]``.  Rows may be empty.

    Attributes
    ----------
    tile_m, tile_n : int
        Queries and keys of one tile.
    nq, nk : int
        Queries and keys of the mask.
    row_ptr : int32 (planes * n_row + 1,)
        Start of each row; plane ``p``, row ``r`` is row ``p * n_row + r``.
    col_idx, kind : int32 (nnz,)
        Tile index along the other axis, increasing within a row (but in `outwards`), and its kind:
        ``INTERVAL``, ``FULL`` or ``BITS + t`` for bit tile ``t``.
    lo, hi : int32 (planes * nq,)
        In an INTERVAL tile, query ``q`` of plane ``p`` sees the keys ``lo[i] <= kv < hi[i]`` with
        ``i = p * nq + q``.
    bits : uint32 (max(n_bits, 1), tile_m, ceil(tile_n / 32))
        Deduplicated bit tiles: key ``c`` of query ``r`` is bit ``c % 32`` of word ``c // 32``.  The
        orientation is (query, key) in the transpose too.
    plane_index : int32 (batch or 1, heads or 1)
        Plane of every batch element and query head.
    transposed : bool
        False: rows are query tiles.  True: rows are key tiles, columns are query tiles.
    """

    tile_m: int
    tile_n: int
    nq: int
    nk: int
    row_ptr: np.ndarray
    col_idx: np.ndarray
    kind: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    bits: np.ndarray
    plane_index: np.ndarray
    planes: int = 1
    transposed: bool = False

    at_run_time = False  # what is in it is known

    @classmethod
    def from_mask(cls, mask: Mask, tile_m: int, tile_n: int) -> TileSchedule:
        """Tile every plane of ``mask`` and join the planes into one schedule.

        Parameters
        ----------
        mask : masks.Mask
            Plain, per head or per batch.
        tile_m, tile_n : int
            Queries and keys of one tile; independent of any block size the mask was built with.

        Raises
        ------
        TypeError
            If ``mask`` is not a `masks.Mask`.
        ValueError
            If the tiles or the row bounds of all planes together do not fit 32-bit indices.
        """
        if not isinstance(mask, Mask):
            raise TypeError(f"mask must be a masks.Mask, got {type(mask).__name__}")
        tiles = [plane.tiles(tile_m, tile_n) for plane in mask.planes]
        nq, nk = mask.shape
        counts = [np.diff(t.kinds.indptr) for t in tiles]
        sizes = [t.kinds.nnz for t in tiles]
        _check_int32("live tiles", sum(sizes), tile_m, tile_n)
        _check_int32("row bounds", len(tiles) * nq, tile_m, tile_n)
        bits, kind = _join_bits(tiles)
        return cls(
            tile_m=tile_m,
            tile_n=tile_n,
            nq=nq,
            nk=nk,
            row_ptr=_pointers(np.concatenate(counts)),
            col_idx=np.concatenate([t.kinds.indices for t in tiles], dtype=np.int32),
            kind=kind,
            lo=np.concatenate([t.lo for t in tiles], dtype=np.int32),
            hi=np.concatenate([t.hi for t in tiles], dtype=np.int32),
            bits=bits,
            plane_index=np.array(mask.plane_index, dtype=np.int32, ndmin=2),
            planes=len(tiles),
        )

    def __getstate__(self):
        """Of a pickle: without the transpose and what else was derived."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def n_row(self) -> int:
        """Tiles along the walked axis of one plane."""
        return _cdiv(self.nk, self.tile_n) if self.transposed else _cdiv(self.nq, self.tile_m)

    @property
    def n_col(self) -> int:
        """Tiles along the other axis of one plane."""
        return _cdiv(self.nq, self.tile_m) if self.transposed else _cdiv(self.nk, self.tile_n)

    @cached_property
    def row_order(self) -> np.ndarray:
        """Rows of all planes, longest first and stable: int32 (planes * n_row,)."""
        return _longest_first(np.diff(self.row_ptr))

    @cached_property
    def T(self) -> TileSchedule:
        """The same tiles walked along the other axis; ``lo``, ``hi`` and ``bits`` are shared."""
        n_row, n_col = self.n_row, self.n_col
        plane = np.repeat(np.arange(self.planes), n_row).repeat(np.diff(self.row_ptr))
        position = np.arange(self.col_idx.size, dtype=np.int32)
        by_row = csr_array(
            (position, self.col_idx + plane * n_col, self.row_ptr),
            shape=(self.planes * n_row, self.planes * n_col),
        )
        by_col = by_row.tocsc()
        order = by_col.data
        return replace(
            self,
            row_ptr=by_col.indptr.astype(np.int32),
            col_idx=(by_col.indices - plane[order] * n_row).astype(np.int32),
            kind=self.kind[order],
            transposed=not self.transposed,
        )

    @cached_property
    def outwards(self) -> TileSchedule:
        """The same tiles, a row's in the order of their distance from the diagonal, which ends at
        the last query and key: scores that fall with it are largest in the first. Of query rows.
        """
        tile_m, tile_n, behind = self.tile_m, self.tile_n, self.nk - self.nq
        row = np.repeat(np.arange(self.planes * self.n_row), np.diff(self.row_ptr))
        middle, other = (
            (2 * (row % self.n_row) + 1) * tile_m,
            (2 * self.col_idx.astype(np.int64) + 1) * tile_n,
        )
        order = np.lexsort((abs(middle + 2 * behind - other), row))
        return replace(self, col_idx=self.col_idx[order], kind=self.kind[order])

    @property
    def tiles(self) -> dict[str, int]:
        """Number of stored tiles of each kind, over all planes."""
        return {
            "interval": int(np.count_nonzero(self.kind == INTERVAL)),
            "full": int(np.count_nonzero(self.kind == FULL)),
            "bits": int(np.count_nonzero(self.kind >= BITS)),
        }

    @cached_property
    def masked(self) -> int:
        """How many tiles are masked."""
        return int(np.count_nonzero(self.kind != FULL))

    @property
    def full_tiles(self) -> bool:
        """Whether no tile is masked."""
        return self.masked == 0

    @cached_property
    def full_but_edge(self) -> bool:
        """Whether no tile is masked, but for what lies past the last key."""
        masked = np.flatnonzero(self.kind != FULL)
        if not masked.size:
            return True
        if not self.nk % self.tile_n or (self.kind[masked] != INTERVAL).any():
            return False
        row = np.searchsorted(self.row_ptr, masked, side="right") - 1
        plane, row = np.divmod(row, self.n_row)
        m_block, n_block = row, self.col_idx[masked]
        if self.transposed:
            m_block, n_block = n_block, m_block
        last = self.nk // self.tile_n
        seen = (self.lo <= last * self.tile_n) & (self.hi == self.nk)
        starts = np.arange(0, self.nq, self.tile_m)
        seen = np.logical_and.reduceat(seen.reshape(self.planes, self.nq), starts, axis=1)
        return bool((n_block == last).all() and seen[plane, m_block].all())

    @property
    def density(self) -> float:
        """Live tiles over all tiles, of all planes; 0.0 for a mask of size zero."""
        total = self.planes * self.n_row * self.n_col
        return self.col_idx.size / total if total else 0.0

    def plane_of(self, batch: int, heads: int) -> np.ndarray:
        """Plane of every batch element and query head: int32 (batch * heads,), C order."""
        return np.broadcast_to(self.plane_index, (batch, heads)).flatten()

    def work(self, batch: int, heads: int, group: int = 1) -> np.ndarray:
        """Every (row, head) pair, longest first: the work list of a persistent kernel.

        Parameters
        ----------
        batch, heads : int
            Batch elements and query heads.
        group : int
            Query heads that share one row of work.  In the transpose, ``heads // heads_kv``: one
            KV tile serves all query heads of its group, and its length is their sum.

        Returns
        -------
        int32 (n_row * batch * heads // group, 2)
            Row tile and ``b * (heads // group) + h // group``.  Empty rows are listed too, since
            their outputs must be written.  Pairs of equal length keep the order head, row.

        Raises
        ------
        ValueError
            If ``group`` does not divide ``heads``, or is not 1 for a schedule of query rows.
        """
        if group < 1 or heads % group:
            raise ValueError(f"group must divide heads={heads}, got {group=}")
        if group > 1 and not self.transposed:
            raise ValueError(f"group must be 1 for a schedule of query rows, got {group=}; use .T")
        counts = np.diff(self.row_ptr).reshape(self.planes, self.n_row)
        lengths = counts[self.plane_of(batch, heads)]
        lengths = lengths.reshape(batch * heads // group, group, self.n_row).sum(axis=1)
        head, row = np.divmod(_longest_first(lengths.ravel()), max(self.n_row, 1))
        return np.stack([row, head], axis=1)

    def tables(self, batch: int, heads: int, group: int = 1) -> tuple[np.ndarray, ...]:
        """What the kernels of `simt` and `sm80` walk: the work list, whose length is the number of
        blocks, planes, row_ptr, col_idx, kind, lo, hi and bits. Arguments as of `work`.
        """
        work, plane_of = self.work(batch, heads, group), self.plane_of(batch, heads)
        return work, plane_of, self.row_ptr, self.col_idx, self.kind, self.lo, self.hi, self.bits

    def __repr__(self) -> str:
        axis = "columns" if self.transposed else "rows"
        kinds = ", ".join(f"{n} {name}" for name, n in self.tiles.items() if n) or "no tiles"
        return (
            f"TileSchedule({self.nq}x{self.nk}, tiles {self.tile_m}x{self.tile_n} by {axis}, "
            f"{self.planes} plane(s), {kinds}, density {self.density:.3g})"
        )


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _pointers(counts: np.ndarray) -> np.ndarray:
    row_ptr = np.zeros(counts.size + 1, dtype=np.int32)
    np.cumsum(counts, out=row_ptr[1:])
    return row_ptr


def _longest_first(lengths: np.ndarray) -> np.ndarray:
    return np.argsort(-lengths, kind="stable").astype(np.int32)


def _check_int32(what: str, n: int, tile_m: int, tile_n: int) -> None:
    if n > _INT32_MAX:
        raise ValueError(
            f"the mask has {n} {what} with {tile_m=}, {tile_n=}; the schedule's 32-bit indices "
            f"hold at most {_INT32_MAX}: use larger tiles, fewer distinct planes or a sparser mask"
        )


def _join_bits(tiles) -> tuple[np.ndarray, np.ndarray]:
    """Bit tiles of all planes without duplicates, and the kinds renumbered to match.

    An empty collection becomes one tile of zeros, so that kernels always get a valid pointer.
    """
    bits = np.concatenate([t.bits for t in tiles])
    kind = np.concatenate([t.kinds.data for t in tiles])
    first = np.cumsum([0] + [len(t.bits) for t in tiles[:-1]])
    is_bits = kind >= BITS
    kind[is_bits] += np.repeat(first, [t.kinds.nnz for t in tiles])[is_bits].astype(np.int32)
    if len(bits) == 0:
        return np.zeros((1, *bits.shape[1:]), np.uint32), kind
    if len(tiles) == 1:
        return bits, kind
    rows = bits.reshape(len(bits), -1)
    unique, number = np.unique(
        rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel(), return_inverse=True
    )
    kind[is_bits] = number[kind[is_bits] - BITS] + BITS
    return unique.view(np.uint32).reshape(-1, *bits.shape[1:]), kind
