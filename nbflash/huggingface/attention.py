"""What transformers calls in every attention layer under ``attn_implementation="nbflash"``."""

from __future__ import annotations

import functools

import numpy as np
import torch

import masks
from masks.interval import Interval
from nbflash.huggingface.mask_functions import ModelMask, from_tensor, shared
from nbflash.inputs.decode_problem import MAX_QUERIES
from nbflash.torch import attention, decode, merge_sink, scores

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
    dropout, scaling, softcap
        As in `nbflash.torch.attention`.
    s_aux : Tensor (heads,), optional
        Attention sinks.
    position_bias : Tensor (batch or 1, heads, queries, keys), optional
        Added to the scores.

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
    mask, bias = _mask_and_bias(module, attention_mask, is_causal, nq, nk)
    if (starts := kwargs.get("cu_seq_lens_q")) is not None:
        mask = _in_sequences(mask, starts, kwargs.get("cu_seq_lens_k"))
    if (override := getattr(module, OVERRIDE, None)) is not None:
        mask = shared(mask & rows_of(override, nq, nk))
    if head_dim < q.shape[-1]:
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - head_dim))
    score = _score(softcap, position_bias, bias)
    end = None if score is not None or dropout or _learns(q, k, v) else _causal_end(mask)
    if end is not None and nq <= MAX_QUERIES:
        lengths = torch.full((len(q),), end, dtype=torch.int32, device=q.device)
        out, lse = decode(q, k, v, lengths, scale=scaling, return_lse=True)
    else:
        given = {"scale": scaling, "score": score, "dropout": dropout}
        out, lse = attention(q, k, v, mask, return_lse=True, **given)
    if s_aux is not None:
        out, _ = merge_sink(out, lse, s_aux)
    return out[..., :head_dim].contiguous(), None


def _mask_and_bias(module, given, is_causal, nq, nk):
    """What is attended, and what is added to the scores, or None."""
    if isinstance(given, ModelMask | masks.Mask):
        return getattr(given, "mask", given), None
    if isinstance(given, torch.Tensor):
        if given.ndim != 4:
            raise ValueError(
                f"attention_mask must have 4 axes here, got shape {tuple(given.shape)}: "
                f"transformers made no mask of it"
            )
        given = given[..., :nk]
        if given.dtype == torch.bool:
            return shared(from_tensor(given)), None
        hidden = given <= torch.finfo(given.dtype).min / 2
        if bool((hidden | (given == 0)).all()):
            return shared(from_tensor(~hidden)), None
        return masks.dense(nq, nk), given
    if given is not None:
        raise TypeError(f"attention_mask must be a masks.Mask or a tensor, got {type(given)}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or nq == 1:
        return masks.dense(nq, nk), None
    if nq != nk:
        raise ValueError(
            f"attention_mask must be given for {nq} queries and {nk} keys of a causal layer: "
            f"without it there is no saying which keys come first"
        )
    return masks.causal(nq), None


def _in_sequences(mask, starts_q, starts_k):
    starts_q = starts_q.tolist()
    starts_k = starts_q if starts_k is None else starts_k.tolist()
    return shared(mask & masks.documents_from_cu_seqlens(starts_q, starts_k))


def rows_of(override, nq, nk):
    """The mask of the last nq of nk tokens: of a function of (nq, nk), or of a square mask."""
    if not isinstance(override, masks.Mask):
        return override(nq, nk)
    if override.shape == (nq, nk):
        return override
    if max(nq, nk) > min(override.shape):
        raise ValueError(f"the mask of sparsify is {override.shape}, too small for {(nq, nk)}")
    return _cut(override, nq, nk)


@torch.compiler.assume_constant_result
@functools.lru_cache(maxsize=64)
def _cut(mask, nq, nk):
    first = nk - nq
    return masks.from_function(lambda q, kv: mask(q + first, kv), nq, nk)


def _score(softcap, *biases):
    parts = [] if softcap is None else [scores.softcap(softcap)]
    parts += [scores.bias(x) for x in biases if x is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    return scores.compose(*parts)


def _learns(*tensors):
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


@torch.compiler.assume_constant_result
@functools.lru_cache(maxsize=256)
def _causal_end(mask):
    """One past the last query's own key, where every query attends all keys up to its own."""
    if not isinstance(mask, Interval) or not mask.shape[0] or mask.lo.any():
        return None
    end = int(mask.hi[-1])
    return end if (mask.hi == np.arange(end - mask.shape[0], end) + 1).all() else None
