"""Masks that differ between heads or batch entries: distinct planes and an index into them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from masks import _check
from masks.base import Mask


class Planes(Mask):
    """Plain masks and which of them each (batch, head) uses.

    Parameters
    ----------
    planes : sequence of Mask
        Plain masks of one shape; equal ones are stored once.
    plane_index : ndarray of int
        ``(batch or 1, heads or 1)`` index into `planes`; an extent of 1 broadcasts.
    """

    __slots__ = ("_index", "_planes")
    _fields = ("planes", "plane_index")

    def __init__(self, planes, plane_index):
        super().__init__(*planes[0].shape)
        number = {}
        remap = np.array([number.setdefault(m, len(number)) for m in planes], np.int32)
        used, index = np.unique(remap[plane_index], return_inverse=True)
        distinct = list(number)
        self._planes = tuple(distinct[i] for i in used)
        self._index = index.reshape(np.shape(plane_index)).astype(np.int32)
        self._index.setflags(write=False)

    def _parts(self):
        return self._planes, self._index

    @property
    def planes(self):
        return self._planes

    @property
    def plane_index(self):
        return self._index

    @property
    def is_plain(self):
        return False

    @property
    def batch(self):
        return self._index.shape[0] if self._index.shape[0] > 1 else None

    @property
    def heads(self):
        return self._index.shape[1] if self._index.shape[1] > 1 else None

    def _plane(self, head, batch):
        at = []
        for name, value, extent in (
            ("batch", batch, self._index.shape[0]),
            ("head", head, self._index.shape[1]),
        ):
            last = extent - 1 if extent > 1 else _check.INT32_MAX
            at.append(min(_check.integer(name, value, 0, last), extent - 1))
        return self._planes[self._index[tuple(at)]]

    def dense(self):
        return np.stack([m.dense() for m in self._planes])[self._index]

    def _map(self, apply):
        return Planes([apply(m) for m in self._planes], self._index)

    def _transposed(self):
        return self._map(lambda m: m.T)

    def _complement(self):
        return self._map(lambda m: ~m)

    def _restricted(self, q, kv):
        return self._map(lambda m: m._restricted(q, kv))

    def _plain_only(self, method):
        raise ValueError(
            f"{method} of a mask with batch={self.batch}, heads={self.heads}: "
            "call it on each mask of .planes"
        )

    def tiles(self, tile_m, tile_n=None):
        self._plain_only("tiles")

    def live_tiles(self, tile_m, tile_n=None):
        """Of all planes together."""
        counts = [m.live_tiles(tile_m, tile_n) for m in self._planes]
        return tuple(map(sum, zip(*counts, strict=True)))

    def count_nonzero(self):
        """Attended pairs summed over every (batch, head) that the mask distinguishes."""
        counts = np.array([m.count_nonzero() for m in self._planes])
        return int(counts[self._index].sum())

    def to_scipy(self, block=1, *, touched=False):
        self._plain_only("to_scipy")

    def stats(self, tile=128, *, head_dim=64, itemsize=2):
        self._plain_only("stats")

    def plot(self, ax=None, *, tile=None):
        self._plain_only("plot")

    def draw(self, size=32):
        """Pictures of all planes, one below the other."""
        titles = (f"plane {i}" for i in range(len(self._planes)))
        pictures = (m.draw(size) for m in self._planes)
        return "\n".join(f"{a}\n{b}" for a, b in zip(titles, pictures, strict=True))

    def __repr__(self):
        return (
            f"<Planes mask {self.shape[0]} x {self.shape[1]}, batch={self.batch}, "
            f"heads={self.heads}, {len(self._planes)} distinct>"
        )


def per_head(masks: Iterable[Mask]) -> Mask:
    """One mask per query head; an entry may itself be per batch. One entry applies to all heads."""
    return _stack("per_head", "heads", masks, axis=1)


def per_batch(masks: Iterable[Mask]) -> Mask:
    """One mask per batch entry; an entry may itself be per head. One entry applies to all."""
    return _stack("per_batch", "batch", masks, axis=0)


def _stack(name, extent, masks, axis):
    if isinstance(masks, Mask) or not hasattr(masks, "__iter__"):
        raise TypeError(f"masks is {type(masks).__name__}: must be a sequence of Mask")
    masks = list(masks)
    if not masks:
        raise ValueError(f"{name}([]): needs at least one mask")
    for i, m in enumerate(masks):
        if not isinstance(m, Mask):
            raise TypeError(f"{name}[{i}] is {type(m).__name__}: must be a Mask")
        if m.shape != masks[0].shape:
            raise ValueError(f"{name}[{i}].shape={m.shape}: must be {masks[0].shape}")
        if getattr(m, extent) is not None:
            raise ValueError(f"{name}[{i}].{extent}={getattr(m, extent)}: must not vary already")
    if len(masks) == 1:
        return masks[0]
    other = {m.plane_index.shape[1 - axis] for m in masks} - {1}
    if len(other) > 1:
        raise ValueError(f"{name}: entries disagree, {sorted(other)}")
    width = max(other, default=1)
    index, planes = [], []
    for m in masks:
        shape = (1, width) if axis == 0 else (width, 1)
        index.append(np.broadcast_to(m.plane_index, shape) + len(planes))
        planes.extend(m.planes)
    return Planes(planes, np.concatenate(index, axis=axis))


def combine(a, b, operation):
    """Plane by plane ``a | b`` or ``a & b`` with broadcasting over batch and heads."""
    try:
        left, right = np.broadcast_arrays(a.plane_index, b.plane_index)
    except ValueError:
        raise ValueError(
            f"masks with (batch, heads) = ({a.batch}, {a.heads}) and ({b.batch}, {b.heads}) "
            "do not combine"
        ) from None
    pairs, index = np.unique(left.astype(np.int64) * len(b.planes) + right, return_inverse=True)
    planes = [
        operation(a.planes[pair // len(b.planes)], b.planes[pair % len(b.planes)])
        for pair in pairs.tolist()
    ]
    return Planes(planes, index.reshape(left.shape))
