"""What transformers calls in every attention layer under ``attn_implementation="nbflash"``."""

from __future__ import annotations

import torch

import masks
from nbflash.definitions.constants import MAX_QUERIES
from nbflash.huggingface.layer_masks import LayerMask, decoded, last_rows, late_mask
from nbflash.huggingface.mask_functions import ModelMask, host_array
from nbflash.torch import attention, merge_sink, scores

OVERRIDE = "nbflash_mask"  # attribute of a module, see `nbflash.huggingface.sparsify`


def attention_of(
    module,
    query,
    key,
    value,
    attention_mask,
    *,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    softcap=None,
    s_aux=None,
    position_bias=None,
    **kwargs,
):
    """transformers' attention function: (batch, heads, tokens, head_dim) in, its swapped out.

    Parameters
    ----------
    module : torch.nn.Module
        The layer; its ``is_causal`` counts where there is no mask.
    query, key, value : Tensor (batch, heads or heads_kv, tokens, head_dim)
    attention_mask : masks.Mask, Tensor of four axes, or None
        What `nbflash.huggingface.mask_of` made; a boolean mask, or one that is added to scores.
    dropout : float
    scaling : float, optional
        As ``dropout`` and ``scale`` of `nbflash.torch.attention`.
    is_causal : bool, optional
        Instead of the module's.
    softcap : float, optional
        As ``cap`` of `nbflash.scores.softcap`.
    s_aux : Tensor (heads,), optional
        Attention sinks.
    position_bias : Tensor (batch or 1, heads, queries, keys), optional
        Added to the scores.
    **kwargs
        ``cu_seq_lens_q`` and ``cu_seq_lens_k`` say where packed sequences begin.
        ``output_attentions`` and ``head_mask`` are refused unless None or False. All others are
        ignored.

    Returns
    -------
    out : Tensor (batch, tokens, heads, head_dim)
    None
        In place of the weights, which are not computed.
    """
    for name in ("output_attentions", "head_mask"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"nbflash has no {name}: set attn_implementation='eager' for it")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    nq, nk, head_dim = q.shape[1], k.shape[1], v.shape[-1]
    if head_dim < q.shape[-1]:
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - head_dim))
    starts = _starts(kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"))
    override = getattr(module, OVERRIDE, None)
    kind, given, bias = _kind_of(module, attention_mask, is_causal, nq, nk)
    score = _score(softcap, position_bias, bias)
    is_biased = position_bias is not None or bias is not None
    decodes = False  # a bool: under torch.compile nq may be symbolic
    if nq <= MAX_QUERIES:
        decodes = not (is_biased or dropout or _learns(q, k, v))
    rows = None
    if torch.compiler.is_compiling():
        mask = _in_graph(kind, given, override, starts, decodes)
    else:
        mask = _now(kind, given, override, starts, nq, nk)
        rows = last_rows(mask) if decodes else None
    if rows is not None:
        out, lse = decoded(q, k, v, rows, scaling, score)
    else:
        options = {"scale": scaling, "score": score, "dropout": dropout}
        out, lse = attention(q, k, v, mask, return_lse=True, **options)
    if s_aux is not None:
        out, _ = merge_sink(out, lse, s_aux)
    return out[..., :head_dim].contiguous(), None


def _kind_of(module, given, is_causal, nq, nk):
    """How a mask is given, as `LayerMask` calls it; what is given; and a bias, or None."""
    if isinstance(given, ModelMask):
        return "model", given, None
    if isinstance(given, masks.Mask):
        return "given", given, None
    if isinstance(given, torch.Tensor):
        if given.ndim != 4:
            raise ValueError(
                f"attention_mask must have 4 axes here, got shape {tuple(given.shape)}: "
                f"transformers made no mask of it"
            )
        given = given[..., :nk]
        if given.dtype == torch.bool:
            return "boolean", given, None
        if not given.is_floating_point():
            raise TypeError(f"attention_mask must be boolean or floating, got {given.dtype}")
        hidden = given <= torch.finfo(given.dtype).min / 2
        if torch.compiler.is_compiling():
            return "boolean", ~hidden, given.masked_fill(hidden, 0)
        if host_array("attention_mask", (hidden | (given == 0)).all()):
            return "boolean", ~hidden, None
        return "dense", None, given
    if given is not None:
        raise TypeError(f"attention_mask must be a masks.Mask or a tensor, got {type(given)}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or nq == 1:
        return "dense", None, None
    if nq != nk:
        raise ValueError(
            f"attention_mask must be given for {nq} queries and {nk} keys of a causal layer: "
            f"without it there is no saying which keys come first"
        )
    return "causal", None, None


def _starts(of_queries, of_keys):
    """Where packed sequences begin, of queries and of keys; nothing where none are packed."""
    if of_queries is None:
        return ()
    return of_queries, of_queries if of_keys is None else of_keys


def _in_graph(kind, given, override, starts, decodes):
    """The mask of a call that is compiled."""
    if kind == "model":
        return late_mask(kind, None, (given.number,), override, starts, decodes)
    if kind == "boolean":
        return late_mask(kind, None, (given,), override, starts, decodes)
    return late_mask(kind, given, (), override, starts, decodes)


def _now(kind, given, override, starts, nq, nk):
    """The mask of a call."""
    tensors, place = starts, ()
    if kind == "model":
        kind, given, place = "given", given.mask, given.place
    elif kind == "boolean":
        tensors, given = (given, *starts), None
    return LayerMask(kind, given, override, bool(starts), False, place).mask(nq, nk, *tensors)


def _score(softcap, *biases):
    parts = [] if softcap is None else [scores.softcap(softcap)]
    parts += [scores.bias(x) for x in biases if x is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    return scores.compose(*parts)


def _learns(*tensors):
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
