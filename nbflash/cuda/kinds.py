"""The types of a kernel's arguments, by name.

Launches need them, and a kernel that is kept on disk is launched without Numba. Who compiles takes
`numba_type`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A number, an address, an array or a tuple.

    Attributes
    ----------
    name : str
        As Numba has it; ``CPointer``, ``Array`` and ``Tuple`` are of ``parts``.
    parts : tuple of Kind
    ndim : int
        Of an array.
    """

    name: str
    parts: tuple = ()
    ndim: int = 0

    @property
    def bitwidth(self):
        """Of an integer or a floating-point number."""
        return int(self.name.lstrip("uintfloa"))

    @property
    def numba(self):
        """`numba_type` of this one."""
        return numba_type(self)

    def __repr__(self):
        return f"{self.name}{self.parts or ''}{self.ndim or ''}"


def numba_type(kind):
    """Numba's own; what compiles names this function, so that keys of kernels cover it."""
    from numba.cuda import types

    parts = tuple(map(numba_type, kind.parts))
    if kind.name == "CPointer":
        return types.CPointer(*parts)
    if kind.name == "Array":
        return types.Array(*parts, kind.ndim, "C", readonly=True)
    if kind.name == "Tuple":
        return types.BaseTuple.from_types(parts)
    return getattr(types, kind.name)


int8, int32, int64 = Kind("int8"), Kind("int32"), Kind("int64")
uint8, uint16, uint32, uint64 = (Kind(f"uint{n}") for n in (8, 16, 32, 64))
float16, float32, float64 = (Kind(f"float{n}") for n in (16, 32, 64))


def pointer(kind):
    """The address of such numbers."""
    return Kind("CPointer", (kind,))


def array(kind, ndim):
    """A contiguous array that is only read."""
    return Kind("Array", (kind,), ndim)


def several(kinds):
    """A tuple."""
    return Kind("Tuple", tuple(kinds))


#: What a kernel computes with, by the dtype of its tensors.
ACCUMULATOR = {"float16": float32, "bfloat16": float32, "float32": float32, "float64": float64}
#: What a tensor holds, by dtype; bfloat16 and float8 travel as their bits.
STORAGE = {
    "float16": float16,
    "bfloat16": uint16,
    "float32": float32,
    "float64": float64,
    "int8": int8,
    "float8_e4m3fn": uint8,
}
