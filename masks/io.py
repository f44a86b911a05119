"""Save and load masks as ``.npz`` files: arrays and a JSON description, never pickle."""

from __future__ import annotations

import contextlib
import json
from os import PathLike

import numpy as np

from masks.algebra import Complement, Intersection, Transposed, Union
from masks.base import Mask
from masks.block import BlockSparse
from masks.interval import Interval
from masks.leaves import Bitmap, Columns, Diagonals, Predicate
from masks.planes import Planes
from masks.restriction import Restricted
from masks.token import Neighborhood
from masks.trees import Tree

FORMAT = 1

#: What a file may hold: any mask without a Python function in it.
CLASSES = {
    cls.__name__: cls
    for cls in (
        *(Interval, BlockSparse, Diagonals, Columns, Bitmap, Neighborhood, Tree),
        *(Union, Intersection, Complement, Transposed, Restricted, Planes),
    )
}


def save(path: str | PathLike[str], mask: Mask) -> None:
    """Write `mask` to an ``.npz`` file that `load` reads without pickle.

    Parameters
    ----------
    path : str, path or binary file
        Written exactly there: no suffix is added.
    mask : Mask
        Any mask without a Python function in it; ``from_dense(mask.dense())`` freezes one.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask is {type(mask).__name__}: must be a Mask")
    arrays = {}
    tree = json.dumps({"format": FORMAT, "mask": _encode(mask, arrays)})
    arrays["tree"] = np.frombuffer(tree.encode(), np.uint8)
    with contextlib.nullcontext(path) if hasattr(path, "write") else open(path, "wb") as file:
        np.savez_compressed(file, **arrays)


def _encode(value, arrays):
    if isinstance(value, Predicate):
        name = getattr(value.fn, "__qualname__", type(value.fn).__name__)
        raise ValueError(
            f"mask holds the function {name}, which cannot be saved: "
            "freeze it with masks.from_dense(mask.dense())"
        )
    if isinstance(value, Mask):
        fields = [_encode(field, arrays) for field in value._arguments()]
        return {"class": type(value).__name__, "fields": fields}
    if isinstance(value, np.ndarray):
        arrays[name := f"array_{len(arrays)}"] = value
        return {"array": name}
    if isinstance(value, tuple):
        return [_encode(item, arrays) for item in value]
    return int(value)


def load(path: str | PathLike[str]) -> Mask:
    """Read a mask written by `save`.

    Raises
    ------
    ValueError
        The file is not one written by `save`.
    """
    with contextlib.nullcontext(path) if hasattr(path, "read") else open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                return _mask_of(archive)
        except MemoryError:
            raise
        except Exception as e:  # a damaged file raises whatever reads it
            raise ValueError(f"path={str(path)!r}: not a mask file ({e!r})") from e


def _mask_of(archive):
    document = json.loads(archive["tree"].tobytes().decode())
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']}, this version reads {FORMAT}")
    mask = _decode(document["mask"], archive)
    if not isinstance(mask, Mask):
        raise ValueError(f"it holds {type(mask).__name__}")
    return mask


def _decode(node, archive):
    if isinstance(node, list):
        return tuple(_decode(item, archive) for item in node)
    if isinstance(node, dict) and "array" in node:
        return archive[node["array"]]
    if isinstance(node, dict):
        return CLASSES[node["class"]](*(_decode(field, archive) for field in node["fields"]))
    return node
