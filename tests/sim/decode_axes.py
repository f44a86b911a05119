"""The axes of decode's kernels, and the problem of a case: see `axes`."""

from dataclasses import dataclass

import axes
import ml_dtypes
import numpy as np
from decode_cases import DTYPES, check, contiguous, paged

import masks
from nbflash.definitions.quantised import dequantise, quantise

STORED = {"int8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn}
# Of two sequences. One may have fewer keys than tokens, or none.
LENGTHS = {
    "short": (axes.Length(0), axes.Length(0, 2)),
    "tile": (axes.Length(1, -1), axes.Length(1)),
    "tiles": (axes.Length(1, 1), axes.Length(2, 1)),
}
MANY = axes.MANY, axes.Length(0, 1)
MASKS = None, "scattered", "empty", "per-head", axes.SHARED_PLANE
AXES = {
    "nq": (1, 2, 5),
    "heads": axes.HEADS,
    "lengths": tuple(LENGTHS),
    "level": axes.LEVELS,
    # A key and a value of 8 bits with a scale for each head, or for each token of a head.
    "stored": (None, "int8-head", "int8-token", "e4m3-head", "e4m3-token"),
    "layout": tuple(axes.LAYOUTS),
    "poison": axes.POISONS,
    "mask": MASKS,
    "splits": (1, 3),
}


def design(more, **of_many):
    """The cases of `axes.pairs`, and three with a row of many tiles.

    ``of_many`` are values for these, for their time.
    """
    cases = axes.pairs(AXES | more)
    many = {"nq": 1, "heads": (2, 1), "lengths": "many", "poison": None, "stored": None, **of_many}
    return cases + [case | many for case in cases[:3]]


def label(case):
    names = {axis: value for axis, value in case.items() if axis not in ("level", "heads")}
    plain = (None, False, "packed")
    heads, (scale, shift) = "over".join(map(str, case["heads"])), case["level"]
    said = [f"{axis}={value}" for axis, value in names.items() if value not in plain]
    return "-".join([heads, f"{scale}+{shift}", *said])


def mask_of(name, nq, nk, heads):
    """The mask of a case, of two sequences."""
    if name is None:
        return None
    window = masks.window(nq, nk, left=nk // 3, right=None)
    scattered = masks.from_function(lambda q, kv: (5 * q + 7 * kv) % 11 < 4, nq, nk)
    own = masks.per_head([window, scattered, masks.dense(nq, nk), window][:heads])
    return {
        "empty": ~masks.dense(nq, nk),
        "scattered": scattered,
        "per-head": own,
        axes.SHARED_PLANE: masks.per_batch([window, own]),
    }[name]


@dataclass
class Problem:
    """Arrays of a case, and what the kernels take beside them."""

    case: dict
    tile: int
    head_dim: int
    dtype: str
    page_size: int | None

    def __post_init__(self):
        case, (heads, heads_kv) = self.case, self.case["heads"]
        chosen = MANY if case["lengths"] == "many" else LENGTHS[case["lengths"]]
        lengths = [length(self.tile) for length in chosen]
        self.lengths = np.array(lengths, np.int32)
        self.capacity, (self.scale, shift) = max(lengths) + 5, case["level"]
        sizes = self.head_dim, DTYPES[self.dtype], self.lengths, self.capacity
        self.q, self.k, self.v = contiguous(case["nq"], case["heads"], *sizes)
        scales = self._stored(heads_kv) if case["stored"] else None
        if shift and not scales and self.head_dim > 1 and self.dtype != "f64":
            scale = self.head_dim**-0.5 if self.scale is None else self.scale
            self.q[..., -1], self.k[..., -1] = 8, shift / (8 * scale)
        self.mask, self.scales = mask_of(case["mask"], case["nq"], self.capacity, heads), scales

    def _stored(self, heads_kv):
        """Caches of 8 bits take the places of k and v; their scales, of different layouts."""
        storage, kind = self.case["stored"].split("-")
        (self.k, *k_scale), (self.v, *v_scale) = (
            quantise(np.nan_to_num(x), STORED[storage]) for x in (self.k, self.v)
        )
        if kind == "head":
            of_heads = np.linspace(0.01, 0.5, heads_kv), np.linspace(0.02, 0.003, heads_kv)
            return [x.astype(np.float32) for x in of_heads]
        (k_scale,), (v_scale,) = k_scale, v_scale
        return [k_scale, v_scale.swapaxes(0, 1).copy().swapaxes(0, 1)]

    def keep(self, b):
        """Which keys the queries of a sequence attend, (heads or 1, nq, lengths[b])."""
        nq, n = self.case["nq"], int(self.lengths[b])
        if self.mask is None:
            return np.tri(nq, n, n - nq, dtype=bool)[None]
        dense = np.broadcast_to(
            self.mask.dense(), (len(self.lengths), self.q.shape[2], *self.mask.shape)
        )
        return dense[b, :, :, :n]

    def given(self, k, v):
        """q and the caches as a kernel takes them: laid out, in pages, with their scales."""
        table, scales = None, self.scales
        if self.page_size is not None:
            arrays = [k, v, *(x for x in scales or () if x.ndim > 1)]
            *arrays, table = paged(*arrays, lengths=self.lengths, page_size=self.page_size)
            k, v, scales = arrays[0], arrays[1], arrays[2:] or scales
        orders = axes.LAYOUTS[self.case["layout"]]
        return [order(x) for order, x in zip(orders, (self.q, k, v), strict=False)], table, scales

    def wide(self):
        """The keys and values that are attended."""
        if self.scales is None:
            return self.k, self.v
        real = np.dtype(np.float64 if self.dtype == "f64" else np.float32)
        pairs = zip((self.k, self.v), self.scales, strict=True)
        return [dequantise(x, scale, real) for x, scale in pairs]

    def check(self, run):
        """Hold ``run(laid_out, table, scales)`` to its budgets, and NaN to who attends it."""
        got = run(*self.given(self.k, self.v))
        check(got, self.q, *self.wide(), self.lengths, self.keep, self.scale)
        if self.case["poison"] is None or self.scales is not None or not self.lengths.any():
            return
        b = int(self.lengths.argmax())
        last = min(self.tile, int(self.lengths[b])) - 1
        dirty = {"k": self.k.copy(), "v": self.v.copy()}
        dirty[self.case["poison"]][b, last] = np.nan
        out, lse = run(*self.given(**dirty))
        reached = np.zeros(lse.shape, bool)
        reached[b] = self.keep(b)[..., last]
        assert np.isnan(out[reached.swapaxes(1, 2)]).all()
        assert np.isnan(lse[reached]).all() or self.case["poison"] == "v"
        for x, before, others in zip(
            (out, lse), got, (~reached.swapaxes(1, 2), ~reached), strict=True
        ):
            assert x[others].tobytes() == before[others].tobytes()
