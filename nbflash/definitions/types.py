"""Types of arguments, for those who check types.

Arrays are of any library (NumPy, CuPy, DLPack, ``__cuda_array_interface__``): results have the type
of the array that they are like, and dtypes and shapes are checked when a call runs.
"""

from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, SupportsIndex, TypeAlias, TypeVar

ArrayT = TypeVar("ArrayT")
KeysT = TypeVar("KeysT")
SinkT = TypeVar("SinkT")
Array: TypeAlias = Any
DType: TypeAlias = Any

#: A function of one score: `nbflash.scores.custom`.
Function: TypeAlias = Callable[..., Any]
Functions: TypeAlias = Sequence[Function | None] | None

#: ``(left, right)``, None is unbounded.
Window: TypeAlias = tuple[SupportsIndex | None, SupportsIndex | None] | None
#: A seed, ``(seed, offset)``, or an array of the two.
Seed: TypeAlias = SupportsIndex | Sequence[SupportsIndex] | Array | None
Scale: TypeAlias = SupportsFloat | None
#: One size, or one of queries and one of keys.
Block: TypeAlias = SupportsIndex | tuple[SupportsIndex, SupportsIndex]
