"""The arguments of a kernel from words, as a launch on a GPU has them."""

import numpy as np

from nbflash.cuda.simulator.errors import SimError
from nbflash.cuda.simulator.hopper import SimTensorMap


def arguments(signature, words, maps=()):
    """What a kernel of this signature is called with.

    Parameters
    ----------
    signature : tuple of Kind
        Tensor maps first.
    words : sequence
        Numbers, and for addresses NumPy arrays of one axis: all memory from there on. Anything
        else in the place of an address is None to the kernel.
    maps : sequence of (array, tuple)
        Memory, and the geometry as `nbflash.cuda.tensor_map.geometry` has it.

    Raises
    ------
    SimError
        If there are more or fewer words than the signature has.
    """
    left = iter(words)
    try:
        found = [_argument(kind, left) for kind in signature[len(maps) :]]
    except StopIteration:
        raise SimError("there are fewer words than the kernel's signature has") from None
    if list(left):
        raise SimError("there are more words than the kernel's signature has")
    return [*(SimTensorMap.decoded(memory, *layout) for memory, layout in maps), *found]


def _argument(kind, words):
    """The next argument."""
    if kind.name == "Tuple":
        return tuple(_argument(part, words) for part in kind.parts)
    word = next(words)
    if kind.name == "CPointer":
        return word.view(kind.parts[0].name) if isinstance(word, np.ndarray) else None
    if kind.name in ("float16", "float32", "float64", "uint64"):
        return np.dtype(kind.name).type(word)
    return word
