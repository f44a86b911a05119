"""The arrays of a call as native arrays: of NumPy, of CuPy, or tensors by pointer."""

from __future__ import annotations

from nbflash.inputs.arrays import are_native, native
from nbflash.inputs.tensors import by_pointer


def forward_inputs(q, k, v, out, behind_cupy=False):
    """q, k, v and out (or None) as native arrays.

    With ``behind_cupy`` tensors become CuPy arrays: what the call reads besides is made on CuPy's
    stream.
    """
    if out is None:
        return *_native(("q", "k", "v"), (q, k, v), behind_cupy), None
    return _native(("q", "k", "v", "out"), (q, k, v, out), behind_cupy)


def backward_inputs(q, k, v, dout, out, lse, dlse, behind_cupy=False):
    """q, k, v, dout, out, lse and dlse (or None), in this order, as `forward_inputs` has them."""
    given = (q, k, v, dout, out, lse) if dlse is None else (q, k, v, dout, out, lse, dlse)
    given = _native(("q", "k", "v", "dout", "out", "lse", "dlse"), given, behind_cupy)
    return given if dlse is not None else (*given, None)


def _native(names, given, behind_cupy):
    if are_native(*given):
        return given
    found = None if behind_cupy else by_pointer(given)
    return found or native(**dict(zip(names, given, strict=False)))
