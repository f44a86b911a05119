"""decode of sequences whose cached keys and values are spread over ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

import masks
from nbflash import __version__
from nbflash import decode as decode_alone
from nbflash.definitions.types import Array
from nbflash.distributed.call import device_of_call
from nbflash.distributed.communicator import Communicator, check_together
from nbflash.inputs.arrays import as_given, library, native
from nbflash.inputs.problem import check_flag, wide_dtype
from nbflash.merging import merge

_OPTIONS = "block_table", "k_scale", "v_scale", "scale", "impl"  # of nbflash.decode


def decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    comm: Communicator,
    *,
    newest: Any = None,
    mask: masks.Mask | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Array:
    """`nbflash.decode` where each rank has some of the keys. All ranks call it together.

    Parameters
    ----------
    q : array (batch, q_len, heads, head_dim)
        The last tokens of every sequence: the same on all ranks.
    k_cache, v_cache : array
        The keys and values that this rank has, with or without pages, in any order.
    lengths : int32 array (batch,)
        How many of each sequence it has; 0 where it has none.
    comm : Communicator
    newest : int, optional
        The rank that has the keys of ``q``, after all other keys that it has; default the last
        rank. Every query attends to all keys of the other ranks. If ``q`` is one token, any rank
        may have its key.
    mask : masks.Mask, optional
        Shape (q_len, n), of the keys that this rank has; it replaces the causal rule on the rank
        ``newest`` and the attention to all keys on the others.
    return_lse : bool
    **options
        block_table, k_scale, v_scale, scale and impl of `nbflash.decode`. There is no window and no
        score: a rank does not know the positions of its keys.

    Returns
    -------
    out : array like q
        The same bits on all ranks.
    lse : array (batch, heads, q_len), only with ``return_lse=True``

    Raises
    ------
    TypeError, ValueError, RuntimeError, TimeoutError
        As `nbflash.distributed.attention`.

    Notes
    -----
    Each rank attends its own keys. The results are merged by their log-sum-exp along a tree, in
    ⌈log₂ ranks⌉ exchanges, and one more at each end where the number of ranks is no power of two:
    what travels is as large as the output, in float32, however long the sequences are.
    """

    def check():
        check_flag("return_lse", return_lse)
        _check_options(options)
        holder = _check_newest(newest, comm)
        own = mask
        if own is None and comm.rank != holder and q.shape[1] > 1:
            own = masks.dense(q.shape[1], _capacity(k_cache, options))
        part = decode_alone(q, k_cache, v_cache, lengths, mask=own, return_lse=True, **options)
        facts = {"call": "decode", "q": list(q.shape), "dtype": str(q.dtype), "newest": holder}
        scale = options.get("scale")  # a number of any library's
        facts |= {"nbflash": __version__, "scale": scale if scale is None else float(scale)}
        return part, json.dumps(facts)

    out, lse = check_together(comm, check)
    out, lse = native(out=out, lse=lse)
    xp = library(out)[0]
    with device_of_call(out, comm):
        wide = np.dtype(wide_dtype(out.dtype.name))
        merged, lse = _merged(comm, xp, out.astype(wide, copy=False), lse)
        merged = merged.astype(out.dtype, copy=False)
    return as_given(q, (merged, lse) if return_lse else merged)


def _check_options(options):
    for name in options.keys() - _OPTIONS:
        raise TypeError(
            f"decode over ranks takes {', '.join(_OPTIONS)} of nbflash.decode, got {name}: a rank "
            "does not know the positions of its keys"
        )


def _check_newest(newest, comm):
    newest = comm.size - 1 if newest is None else newest
    if isinstance(newest, bool) or not hasattr(newest, "__index__") or np.ndim(newest):
        raise TypeError(f"newest must be a rank, got {newest!r}")
    if not 0 <= newest < comm.size:
        raise ValueError(f"newest must be a rank below {comm.size}, got {newest}")
    return int(newest)


def _capacity(k_cache, options):
    """Keys that a sequence may have on this rank."""
    table = options.get("block_table")
    return k_cache.shape[1] if table is None else k_cache.shape[1] * np.shape(table)[1]


def _merged(comm, xp, out, lse):
    """The results of all ranks as one: pairs of ranks exchange what they have so far.

    A merge is the same to the bit in either order, so that all ranks end with the same bits.
    """
    rank, half = comm.rank, 1 << (comm.size.bit_length() - 1)  # the largest power of two
    beyond, partner = rank >= half, rank ^ half
    partner = partner if partner < comm.size else None

    def exchanged(to=None, of=None):
        """What comes of a rank, while what is here goes to one; None where there is none."""
        sent = xp.concatenate([out.ravel(), lse.ravel()])
        got = xp.empty_like(sent)
        comm.exchange({} if to is None else {to: sent}, {} if of is None else {of: got}).wait()
        return got[: out.size].reshape(out.shape), got[out.size :].reshape(lse.shape)

    other = exchanged(to=partner if beyond else None, of=None if beyond else partner)
    if partner is not None and not beyond:
        out, lse = merge(out, lse, *other)
    for step in (1 << i for i in range(half.bit_length() - 1)):
        peer = None if beyond else rank ^ step
        other = exchanged(peer, peer)
        if not beyond:
            out, lse = merge(out, lse, *other)
    other = exchanged(to=None if beyond else partner, of=partner if beyond else None)
    return other if beyond else (out, lse)
