"""Problem: the frozen description of one attention call; checks of its arrays, mask and scale.

Each check raises before anything is written, and names the argument, its value and what is right.
"""

from __future__ import annotations

import functools
import numbers
import operator
from dataclasses import dataclass

import numpy as np

import masks
from nbflash.inputs.arrays import alignment, device_of, overlaps, pointer
from nbflash.inputs.tensors import CudaTensor

DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_HEAD_DIM = 256
_LAYOUT = {
    **dict.fromkeys(("q", "out", "dout", "out_a", "out_b"), "(batch, seqlen_q, heads, head_dim)"),
    **dict.fromkeys(("k", "v"), "(batch, seqlen_k, heads_kv, head_dim)"),
    **dict.fromkeys(("lse", "dlse", "lse_a", "lse_b"), "(batch, heads, seqlen_q)"),
    "sink": "(heads,)",
    "k_cache": "(batch or pages, capacity or page_size, heads_kv, head_dim)",
    "v_cache": "(batch or pages, capacity or page_size, heads_kv, head_dim)",
    "lengths": "(batch,)",
    "block_table": "(batch, pages per sequence)",
    "k_scale": "(heads_kv,) or the first three axes of k_cache",
    "v_scale": "(heads_kv,) or the first three axes of v_cache",
}
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Problem:
    """Shapes, layout, dtype, scale and device of q, k and v: with a mask, all that a plan needs.

    Attributes
    ----------
    batch, nq, nk, heads, heads_kv, head_dim : int
        Query head ``h`` uses key/value head ``h // group``.
    dtype : str
        Name of the dtype of q, k and v: one of ``DTYPES``.
    scale : float
        Factor of ``Q Kᵀ``.
    strides : tuple of three 4-tuples
        Of q, k and v, in elements; 0 along an axis of length 1.
    device : str
        ``"cpu"`` (NumPy) or ``"cuda"`` (CuPy).
    device_id : int
    alignment : int
        Bytes, at most 16, that divide the base address and the strides of q, k and v.
    of_torch : bool
        Whether results are torch's memory and kernels run on its current stream, not on CuPy's.
    """

    batch: int
    nq: int
    nk: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: str
    scale: float
    strides: tuple[tuple[int, ...], ...]
    device: str
    device_id: int
    alignment: int
    of_torch: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.heads_kv

    @property
    def empty(self) -> bool:
        """Whether there is no query-key pair: outputs are zero, or have no elements."""
        return self.batch * self.nq * self.nk == 0

    @property
    def q_shape(self) -> tuple[int, ...]:
        """Shape of q, out, dout and dq."""
        return self.batch, self.nq, self.heads, self.head_dim

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """Shape of k, v, dk and dv."""
        return self.batch, self.nk, self.heads_kv, self.head_dim

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of lse."""
        return self.batch, self.heads, self.nq

    @property
    def lse_dtype(self) -> str:
        """float64 for float64 inputs, whose gradients a float32 lse would spoil; else float32."""
        return wide_dtype(self.dtype)

    def __str__(self) -> str:
        return (
            f"q {self.q_shape}, k and v {self.kv_shape}, {self.dtype}, scale {self.scale:.4g}, "
            f"{self.device}"
        )


def check_forward(q, k, v, scale=None) -> Problem:
    """The problem that three native arrays and a scale state.

    Raises
    ------
    TypeError
        If a dtype is not supported or differs, or ``scale`` is not a real number.
    ValueError
        If a shape, the ratio of heads, the layout, the alignment or ``scale`` is not usable.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_rank(name, x, 4)
        _check_dtype(name, x)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        _check_device(name, x, device_of(q))
    _check_shapes(q.shape, k.shape, v.shape)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_layout(name, x)
    batch, nq, heads, head_dim = q.shape
    return Problem(
        batch=batch,
        nq=nq,
        nk=k.shape[1],
        heads=heads,
        heads_kv=k.shape[2],
        head_dim=head_dim,
        dtype=q.dtype.name,
        scale=check_scale(scale, q.dtype, head_dim),
        strides=tuple(_element_strides(x) for x in (q, k, v)),
        device=device_of(q)[0],
        device_id=device_of(q)[1],
        alignment=alignment(q, k, v),
        of_torch=isinstance(q, CudaTensor),
    )


def check_mask(mask, problem: Problem, causal=False, window=None):
    """The mask of a problem: ``mask``, ``causal`` and ``window`` joined by ``&``.

    Raises
    ------
    TypeError
        If ``mask`` is not a `masks.Mask`, ``causal`` not a bool or ``window`` not a pair.
    ValueError
        If the mask has another size, batch or number of heads than the problem.
    """
    nq, nk = problem.nq, problem.nk
    parts = []
    if mask is not None:
        check_mask_type(mask)
        if mask.shape != (nq, nk):
            raise ValueError(
                f"mask must have shape (seqlen_q, seqlen_k) = {(nq, nk)}, got {mask.shape}"
            )
        for axis, size in (("batch", problem.batch), ("heads", problem.heads)):
            got = getattr(mask, axis)
            if got not in (None, size):
                raise ValueError(f"mask has {axis}={got}, but q has {axis}={size}")
        parts.append(mask)
    if check_flag("causal", causal):
        parts.append(masks.causal(nq, nk))
    if window is not None:
        left, right = check_window(window)
        left, right = (  # beyond the sequence is all of it
            side if side is None else min(side, n) for side, n in ((left, nk), (right, nq))
        )
        parts.append(masks.window(nq, nk, left=left, right=right))
    return functools.reduce(operator.and_, parts or [masks.dense(nq, nk)])


def check_flag(name: str, value) -> bool:
    """``value`` as a bool, or TypeError: 0 and 1 are not flags."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_window(window) -> tuple[int | None, int | None]:
    """``window`` as (left, right), both inclusive and None where unbounded."""
    want = "window must be (left, right), non-negative integers or None"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{want}, got {window!r}")
    sides = []
    for side in window:
        if isinstance(side, (bool, np.bool_)) or not (side is None or hasattr(side, "__index__")):
            raise TypeError(f"{want}, got {window!r}")
        sides.append(None if side is None else operator.index(side))
        if side is not None and side < 0:
            raise ValueError(f"{want}, got {window!r}")
    return sides[0], sides[1]


def check_writeable(out) -> None:
    """``out`` is no read-only array, which CuPy does not have, and has a place for each element."""
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out must be writeable, got a read-only array; pass a copy or out=None")
    if _overlaps_itself(out):
        raise ValueError(
            f"out must not overlap itself, got strides {out.strides} for shape {out.shape}"
        )


def check_out(out, problem: Problem, q, k, v) -> None:
    """``out`` can receive the result: shape, dtype and layout fit, the memory is its own."""
    _check_like("out", out, problem.q_shape, q.dtype, device_of(q))
    check_writeable(out)
    check_disjoint(out, q, k, v)


def check_disjoint(out, q, k, v) -> None:
    """``out`` shares no memory with an input, which the kernels read while they write."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if overlaps(out, x):
            raise ValueError(f"out must not overlap {name}; pass separate memory or out=None")


def check_backward(dout, out, lse, dlse, problem: Problem, q) -> None:
    """``dout``, ``out``, ``lse`` and ``dlse`` (or None) belong to a forward call of this problem.

    Raises
    ------
    TypeError
        If a dtype is not that of q, or, of ``lse`` and ``dlse``, not ``problem.lse_dtype``.
    ValueError
        If a shape, the layout or the alignment does not fit.
    """
    device = device_of(q)
    lse_type = problem.lse_shape, np.dtype(problem.lse_dtype), device
    _check_like("dout", dout, problem.q_shape, q.dtype, device)
    _check_like("out", out, problem.q_shape, q.dtype, device)
    _check_like("lse", lse, *lse_type)
    if dlse is not None:  # in any layout: that of lse.sum() is a single number
        _check_like("dlse", dlse, *lse_type, check_layout=_check_aligned)


def check_parts(**named) -> None:
    """Arrays in any layout belong to one attention output, which is the first of them.

    Raises
    ------
    TypeError
        If the dtype of the first is not supported, that of another output differs, or that of an
        lse or a sink is not float32 (float64 beside float64 outputs).
    ValueError
        If a shape, the device or the alignment does not fit.
    """
    first, out = next(iter(named.items()))
    _check_rank(first, out, 4)
    _check_dtype(first, out)
    batch, nq, heads, _ = out.shape
    lse_dtype = np.dtype(wide_dtype(out.dtype.name))
    expected = {
        _LAYOUT["out"]: (out.shape, out.dtype),
        _LAYOUT["lse"]: ((batch, heads, nq), lse_dtype),
        _LAYOUT["sink"]: ((heads,), lse_dtype),
    }
    device = device_of(out)
    for name, x in named.items():
        _check_device(name, x, device, first)
        _check_like(name, x, *expected[_LAYOUT[name]], device, check_layout=_check_aligned)


def wide_dtype(dtype: str) -> str:
    """The precision of sums over ``dtype``, and of the lse."""
    return "float64" if dtype == "float64" else "float32"


def _check_like(name, x, shape, dtype, device, check_layout=None) -> None:
    _check_device(name, x, device)
    _check_rank(name, x, len(shape))
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {_LAYOUT[name]} = {shape}, got {x.shape}")
    if x.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {x.dtype}")
    (check_layout or _check_layout)(name, x)


def _check_device(name, x, device, first="q") -> None:
    if device_of(x) != device:
        raise ValueError(
            f"{name} is on CUDA device {device_of(x)[1]} but {first} is on device {device[1]}; "
            f"copy it there"
        )


def _check_rank(name, x, ndim) -> None:
    if x.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes {_LAYOUT[name]}, got shape {x.shape}")


def _check_dtype(name, x) -> None:
    if x.dtype.name not in DTYPES or not x.dtype.isnative:
        raise TypeError(
            f"{name} must have dtype {', '.join(DTYPES)} in native byte order, got {x.dtype}"
        )


def _check_shapes(q, k, v) -> None:
    batch, nq, heads, head_dim = q
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q must have head_dim 1 to {MAX_HEAD_DIM}, got {head_dim}, shape {q}")
    for axis, size, got in (("batch", batch, k[0]), ("head_dim", head_dim, k[3])):
        if got != size:
            raise ValueError(f"k must have {axis}={size} like q, got {got}, shape {k}")
    if v != k:
        raise ValueError(f"v must have the shape of k, {k}, got {v}")
    heads_kv = k[2]
    if heads < 1:
        raise ValueError(f"q must have at least one head, got shape {q}")
    if heads_kv < 1 or heads % heads_kv:
        raise ValueError(
            f"k and v must have a number of heads that divides the {heads} heads of q, got "
            f"{heads_kv}"
        )
    for name, n in (("q", nq), ("k", k[1])):
        if n > _INT32_MAX:
            raise ValueError(f"{name} must have seqlen at most {_INT32_MAX}, got {n}")


def _check_layout(name, x) -> None:
    if x.size == 0:
        return
    itemsize = x.dtype.itemsize
    if x.shape[-1] > 1 and x.strides[-1] != itemsize:
        raise ValueError(
            f"{name} must have a contiguous last axis (stride {itemsize} bytes), got strides "
            f"{x.strides}; copy it first"
        )
    _check_aligned(name, x)


def _check_aligned(name, x) -> None:
    itemsize = x.dtype.itemsize
    if x.size and pointer(x) % itemsize:
        raise ValueError(
            f"{name} must be aligned to its item size of {itemsize} bytes, got a base address "
            f"that is {pointer(x) % itemsize} bytes off; copy it first"
        )
    if x.size and any(n > 1 and s % itemsize for n, s in zip(x.shape, x.strides, strict=True)):
        raise ValueError(
            f"{name} must be aligned: strides must be multiples of {itemsize} bytes, got "
            f"{x.strides}; copy it first"
        )


def check_scale(scale, dtype, head_dim) -> float:
    """``scale`` as a float, or the default."""
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, (bool, np.bool_)) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be a real number or None, got {scale!r}")
    work = np.float64 if dtype == np.float64 else np.float32
    largest = float(np.finfo(work).max) / 2  # the kernels multiply by log2(e) < 2
    scale = scale.item() if isinstance(scale, np.generic) else scale  # float16 ends at 65504
    if not -largest <= scale <= largest:
        raise ValueError(
            f"scale must be finite in {work.__name__}, at most {largest:.3g} in magnitude, got "
            f"{scale!r}"
        )
    return float(scale)


def check_mask_type(mask) -> None:
    """Raise TypeError unless ``mask`` is a `masks.Mask`, with what makes one of it."""
    if isinstance(mask, masks.Mask):
        return
    hint = "masks.from_function(fn, nq, nk)" if callable(mask) else "one of the masks generators"
    if isinstance(mask, np.ndarray):
        hint = "masks.from_dense(mask)"
    elif hasattr(mask, "tocsr"):
        hint = "masks.from_scipy(mask, block)"
    raise TypeError(f"mask must be a masks.Mask or None, got {type(mask).__name__}; use {hint}")


def _element_strides(x) -> tuple[int, ...]:
    itemsize = x.dtype.itemsize
    return tuple(s // itemsize if n > 1 else 0 for n, s in zip(x.shape, x.strides, strict=True))


def _overlaps_itself(x) -> bool:
    """True unless each axis, by increasing stride, steps over the extent of the axes before it."""
    extent = x.dtype.itemsize
    axes = [] if x.size == 0 else zip(x.strides, x.shape, strict=True)
    for stride, n in sorted((abs(s), n) for s, n in axes if n > 1):
        if stride < extent:
            return True
        extent += (n - 1) * stride
    return False
