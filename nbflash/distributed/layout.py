"""scatter and gather: between the order of a sequence and the parts that ranks have of it."""

from __future__ import annotations

import json

from nbflash.definitions.types import ArrayT
from nbflash.distributed.communicator import Communicator, check_together
from nbflash.distributed.parcels import Index, taken
from nbflash.distributed.sharding import Sharding, check_sharding, integer
from nbflash.inputs.arrays import as_given, library, native


def scatter(
    x: ArrayT, sharding: Sharding, rank: int, *, axis: int = 1, of: str = "queries"
) -> ArrayT:
    """A rank's own part of an array of the whole sequence.

    Parameters
    ----------
    x : array
        With as many tokens along ``axis`` as the mask has queries, or keys; of any dtype with
        elements of 1, 2, 4 or 8 bytes.
    sharding : Sharding
    rank : int
    axis : int
    of : {"queries", "keys"}

    Returns
    -------
    array
        The tokens ``sharding.positions(rank, of)``: a view where they follow each other.
    """
    given = x
    check_sharding(sharding)
    (x,) = native(x=x)
    axis, places = _checked_axis(x, axis), sharding.positions(rank, of)
    n = sharding.mask.shape[of == "keys"]
    if x.shape[axis] != n:
        raise ValueError(f"x must have {n} tokens along axis {axis}, got shape {x.shape}")
    return as_given(given, taken(x, Index(places), axis))


def gather(
    x: ArrayT, sharding: Sharding, comm: Communicator, *, axis: int = 1, of: str = "queries"
) -> ArrayT:
    """The array of the whole sequence, on every rank, of every rank's part of it.

    Parameters
    ----------
    x : array
        The rank's own part, as `scatter` returns it.
    sharding, axis, of
        As of `scatter`.
    comm : Communicator

    Returns
    -------
    array
        C-contiguous.

    Raises
    ------
    TypeError, ValueError, RuntimeError, TimeoutError
        As `attention`.
    """
    given = x

    def check():
        check_sharding(sharding)
        (x,) = native(x=given)
        at = _checked_axis(x, axis)
        own = sharding.positions(comm.rank, of)
        if x.shape[at] != own.size:
            raise ValueError(f"x must have {own.size} tokens along axis {at}, got shape {x.shape}")
        rest = [n for i, n in enumerate(x.shape) if i != at]
        facts = {"call": "gather", "axis": at, "of": of, "shape besides": rest}
        facts |= {"dtype": str(x.dtype), "sharding": sharding.digest}
        return (x, at), json.dumps(facts)

    x, axis = check_together(comm, check)
    xp, device = library(x)
    with device:
        places = [Index(sharding.positions(rank, of)) for rank in range(comm.size)]
        own = xp.ascontiguousarray(x)
        shape = list(x.shape)
        parts = {}
        for rank, index in enumerate(places):
            shape[axis] = index.size
            parts[rank] = own if rank == comm.rank else xp.empty(shape, x.dtype)
        others = {rank: x for rank, x in parts.items() if x.size and rank != comm.rank}
        sends = {r: own for r in range(comm.size) if r != comm.rank and own.size}
        comm.exchange(sends, others).wait()
        shape[axis] = sharding.mask.shape[of == "keys"]
        whole = xp.empty(shape, x.dtype)
        for rank, part in parts.items():
            words = whole.view(f"u{x.dtype.itemsize}")
            words[_at(words, axis, places[rank])] = part.view(words.dtype)
        return as_given(given, whole)


def _checked_axis(x, axis):
    """The axis, not below 0, of an array that can be sent."""
    if x.dtype.hasobject or x.itemsize not in (1, 2, 4, 8):
        raise TypeError(f"x must have elements of 1, 2, 4 or 8 bytes, got dtype {x.dtype}")
    axis = integer("axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be an axis of x, which has {x.ndim}, got {axis}")
    return axis % x.ndim


def _at(x, axis, index):
    """The index of an array for tokens along an axis."""
    return (*(slice(None),) * axis, index.of(x))
