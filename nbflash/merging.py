"""merge and merge_sink: attention over parts of the keys, joined by their log-sum-exp.

    LSE = log(exp LSE_a + exp LSE_b)      w_p = exp(LSE_p − LSE)      O = w_a O_a + w_b O_b

In float32 (float64 for float64). An empty part attends nothing: its ``lse`` is -inf, its weight 0,
and what its ``out`` holds counts for nothing. Between the two weights only the difference of the
``lse`` counts, so that they keep their precision however large it is. NumPy arrays are merged
element by element, CuPy arrays by one kernel, `nbflash.backends.merging`.
"""

from __future__ import annotations

import numpy as np

from nbflash.definitions.types import Array, ArrayT, KeysT, SinkT
from nbflash.inputs.arrays import as_given, in_rows, library, native
from nbflash.inputs.problem import check_parts, wide_dtype
from nbflash.inputs.tensors import operators_for


def merge(out_a: ArrayT, lse_a: KeysT, out_b: Array, lse_b: Array) -> tuple[ArrayT, KeysT]:
    """Attention over the keys of two disjoint parts, from the results over each.

    Exact, commutative to the bit, and associative up to rounding: any number of parts merge in any
    order. An empty part changes nothing.

    Parameters
    ----------
    out_a, out_b : array (batch, seqlen_q, heads, head_dim)
        Of `attention` over the same queries; float16, bfloat16, float32 or float64, both the same.
        Any strides. Where many parts follow each other, float32 rounds less.
    lse_a, lse_b : array (batch, heads, seqlen_q)
        Of `attention` with ``return_lse=True``: float32, float64 for float64 outputs. -inf marks
        a row that attends nothing in this part; its ``out`` is ignored there, NaN included.

    Returns
    -------
    out : array like out_a
        C-contiguous. 0 where both parts attend nothing.
    lse : array like lse_a
        C-contiguous. -inf where both parts attend nothing.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what would be right.

    Notes
    -----
    The reduction of Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023), by the online softmax of
    Milakov and Gimelshein (arXiv 1805.02867).
    """
    if operators := operators_for(out_a):
        return operators.merge(out_a, lse_a, out_b, lse_b)
    given = out_a
    out_a, lse_a, out_b, lse_b = _parts(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    xp, device = library(out_a)
    with device:
        results = xp.empty(out_a.shape, out_a.dtype), xp.empty(lse_a.shape, lse_a.dtype)
        _write_merged((in_rows(out_a), lse_a), (in_rows(out_b), lse_b), results)
    return as_given(given, results)


def merge_into(results, part, rows=None):
    """Merge a part into results, on the device that is current; each is a pair ``(out, lse)``.

    Parameters
    ----------
    results : pair of native arrays
        Written in place.
    part : pair of native arrays
        Of as many rows as ``rows`` names, or of all. Its ``out`` may have another dtype.
    rows : slice or int32 array, optional
        Which rows of the results, each once.
    """
    if isinstance(rows, slice):
        results, rows = (results[0][:, rows], results[1][:, :, rows]), None
    _write_merged(results, part, results, rows)


def add_into(total, part, rows=None):
    """Add a part to rows of a total in place, rounded once; arguments as of `merge_into`."""
    if isinstance(rows, slice):
        total, rows = total[:, rows], None
    if total.size and not isinstance(total, np.ndarray):
        from nbflash.backends.merging import host

        host.add(total, part, rows)
        return
    at = slice(None) if rows is None else rows
    wide = np.dtype(wide_dtype(total.dtype.name))
    total[:, at] = total[:, at].astype(wide) + part.astype(wide)


def _write_merged(a, b, results, places=None):
    """Write the merge of two parts that have their rows contiguous."""
    (out_a, lse_a), (out_b, lse_b), (out, lse) = a, b, results
    if out.size and not isinstance(out, np.ndarray):
        from nbflash.backends.merging import host

        host.merge(a, b, results, places)
        return
    xp, at = library(out)[0], slice(None) if places is None else places
    out_a, lse_a = out_a[:, at], lse_a[:, :, at]
    with np.errstate(over="ignore", invalid="ignore"):
        w_a, w_b, joint = _weights(xp, lse_a, lse_b)
        # O = w_a O_a + w_b O_b
        out[:, at] = _rows(w_a) * _values(xp, out_a, lse_a) + _rows(w_b) * _values(xp, out_b, lse_b)
        lse[:, :, at] = joint


def merge_backward(
    dout: Array,
    out_a: ArrayT,
    lse_a: KeysT,
    out_b: Array,
    lse_b: Array,
    *,
    dlse: Array | None = None,
) -> tuple[ArrayT, KeysT, ArrayT, KeysT]:
    """Gradients of `merge` with respect to the results of both parts.

    What comes back for a part are the ``dout`` and the ``dlse`` of `attention_backward` over it:
    the gradients of q over the parts add up, those of k and v belong to each part.

    Parameters
    ----------
    dout : array like out_a
        Gradient of the merged output.
    out_a, lse_a, out_b, lse_b
        As given to `merge`.
    dlse : array like lse_a, optional
        Gradient of the merged log-sum-exp; None is zero. What it holds where both parts attend
        nothing is ignored.

    Returns
    -------
    dout_a : array like out_a
    dlse_a : array like lse_a
    dout_b : array like out_b
    dlse_b : array like lse_b
        All C-contiguous, and 0 where the part attends nothing.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what would be right.

    Notes
    -----
    With ``∂w_a / ∂LSE_a = w_a w_b = −∂w_b / ∂LSE_a`` and ``t = w_a w_b rowsum(dO ∘ (O_a − O_b))``::

        dO_a = w_a dO      dLSE_a = w_a dLSE + t
        dO_b = w_b dO      dLSE_b = w_b dLSE − t
    """
    given = out_a
    out_a, lse_a, out_b, lse_b, dout, dlse = _parts(
        out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, dout=dout, dlse=dlse
    )
    dlse = 0 if dlse is None else dlse
    xp, device = library(out_a)
    with device, np.errstate(over="ignore", invalid="ignore"):
        w_a, w_b, _ = _weights(xp, lse_a, lse_b)
        wide = dout.astype(lse_a.dtype)
        terms = wide * (_values(xp, out_a, lse_a) - _values(xp, out_b, lse_b))
        # t = w_a w_b rowsum(dO ∘ (O_a − O_b)), in the same order whatever the strides
        t = w_a * w_b * xp.ascontiguousarray(terms).sum(axis=-1).swapaxes(1, 2)
        # beside an empty part the merge is the identity
        t = xp.where(xp.minimum(lse_a, lse_b) == -np.inf, 0, t)
        gradients = []
        for lse, w, dlse_p in ((lse_a, w_a, w_a * dlse + t), (lse_b, w_b, w_b * dlse - t)):
            dout_p = _values(xp, _rows(w) * wide, lse)
            dlse_p = xp.where(lse == -np.inf, 0, dlse_p)
            gradients += xp.ascontiguousarray(dout_p, dout.dtype), xp.ascontiguousarray(dlse_p)
    return as_given(given, tuple(gradients))


def merge_sink(out: ArrayT, lse: KeysT, sink: Array) -> tuple[ArrayT, KeysT]:
    """Attention with one more key for each head, of value 0 and logit ``sink``: an attention sink.

    The weights of a row sum to less than 1: ``exp(s_j) / (exp(sink) + Σ exp(s_j))``.

    Parameters
    ----------
    out : array (batch, seqlen_q, heads, head_dim)
    lse : array (batch, heads, seqlen_q)
        As `attention` returns them; see `merge`.
    sink : array (heads,)
        A learnable logit per query head, dtype of ``lse``, natural and unscaled. -inf is no sink,
        inf makes NaN of its head.

    Returns
    -------
    out : array like out
    lse : array like lse
        With the sink: a row that attends nothing has ``out = 0`` and ``lse = sink``.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what would be right.

    Notes
    -----
    Attention sinks are from StreamingLLM (arXiv 2309.17453), which also trains with them. A logit
    per head is what gpt-oss calls ``sinks`` and flash-attn ``learnable_sink``; ``sink = 0`` is the
    "softmax off by one". The mask `masks.sinks` is another matter: it keeps the first keys.
    """
    if operators := operators_for(out):
        return operators.merge_sink(out, lse, sink)
    given = out
    out, lse, sink = _parts(out=out, lse=lse, sink=sink)
    return as_given(given, merge(out, lse, *_sink_part(out, lse, sink)))


def merge_sink_backward(
    dout: Array, out: ArrayT, lse: KeysT, sink: SinkT, *, dlse: Array | None = None
) -> tuple[ArrayT, KeysT, SinkT]:
    """Gradients of `merge_sink`.

    ``attention_backward(dout, q, k, v, out, lse, dlse=dlse)`` with what comes back, and with the
    results of `attention`, gives the gradients of q, k and v.

    Parameters
    ----------
    dout : array like out
        Gradient of the output of `merge_sink`.
    out, lse, sink
        As given to `merge_sink`: without the sink.
    dlse : array like lse, optional
        Gradient of the log-sum-exp of `merge_sink`; None is zero.

    Returns
    -------
    dout : array like out
    dlse : array like lse
        Of the results of `attention`.
    dsink : array like sink
        Summed over batch and queries.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what would be right.
    """
    given = out
    out, lse, sink, dout, dlse = _parts(out=out, lse=lse, sink=sink, dout=dout, dlse=dlse)
    part = _sink_part(out, lse, sink)
    dout, dlse, _, dlse_sink = merge_backward(dout, out, lse, *part, dlse=dlse)
    with library(out)[1]:
        dsink = dlse_sink.sum(axis=(0, 2), dtype=np.float64)  # over all tokens
        dsink = dsink.astype(sink.dtype)
    return as_given(given, (dout, dlse, dsink))


def _parts(**named):
    """Native arrays that fit the first of them; ``dlse`` may be None."""
    given = {name: x for name, x in named.items() if name != "dlse" or x is not None}
    arrays = dict(zip(given, native(**given), strict=True))
    check_parts(**arrays)
    return [arrays.get(name) for name in named]


def _sink_part(out, lse, sink):
    """The part that a sink is: one row of zeros, and its logit, in place of all rows."""
    xp, device = library(out)
    with device:
        zero = xp.zeros(out.shape[-1:], out.dtype)
        return xp.broadcast_to(zero, out.shape), xp.broadcast_to(sink[:, None], lse.shape)


def _weights(xp, lse_a, lse_b):
    """Weights of both parts, which sum to 1 or to 0 where both are empty, and the joint LSE."""
    largest = xp.maximum(lse_a, lse_b)
    shift = xp.where(largest == -np.inf, 0, largest)
    p_a, p_b = xp.exp(lse_a - shift), xp.exp(lse_b - shift)  # the larger one is 1
    total = xp.maximum(p_a + p_b, 1)
    return p_a / total, p_b / total, largest + xp.log1p(xp.minimum(p_a, p_b))


def _values(xp, x, lse):
    """``x`` (batch, seqlen_q, heads, head_dim) in the dtype of lse, 0 where lse is -inf."""
    return xp.where(_rows(lse == -np.inf), 0, x.astype(lse.dtype))


def _rows(x):
    """(batch, heads, seqlen_q) to (batch, seqlen_q, heads, 1)."""
    return x.swapaxes(1, 2)[..., None]
