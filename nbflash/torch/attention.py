"""attention and varlen_attention of tensors."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

import masks
from nbflash.definitions.types import Scale, Seed, Window
from nbflash.inputs.block_map import BlockMap
from nbflash.inputs.dropout import check_dropout, check_seed
from nbflash.inputs.problem import check_flag
from nbflash.scores import Score
from nbflash.torch import autograd
from nbflash.torch.constants import constant
from nbflash.torch.handles import handle_of, mask_now
from nbflash.torch.late_masks import Documents, LateMask, documents, integers
from nbflash.torch.memory import check_tensor
from nbflash.torch.scores import TensorScore, stages_on

_LAYOUTS = ("bshd", "bhsd")
_SIGN = 1 << 63


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: masks.Mask | BlockMap | None = ...,
    *,
    causal: bool = ...,
    window: Window = ...,
    scale: Scale = ...,
    score: TensorScore | Score | None = ...,
    dropout: float = ...,
    seed: Seed = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    layout: str = ...,
    impl: str = ...,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: masks.Mask | BlockMap | None = ...,
    *,
    causal: bool = ...,
    window: Window = ...,
    scale: Scale = ...,
    score: TensorScore | Score | None = ...,
    dropout: float = ...,
    seed: Seed = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    layout: str = ...,
    impl: str = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: masks.Mask | BlockMap | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    scale: Scale = None,
    score: TensorScore | Score | None = None,
    dropout: float = 0.0,
    seed: Seed = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    layout: str = "bshd",
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`nbflash.attention` of tensors on the CPU or a CUDA device, with gradients.

    Under ``torch.compile`` one operator, also with ``fullgraph=True``: make masks outside of what
    is compiled. Under autocast q, k and v are cast as those of torch's own attention are.

    Parameters
    ----------
    q : Tensor (batch, seqlen_q, heads, head_dim)
        float16, bfloat16, float32 or float64; any strides.
    k, v : Tensor (batch, seqlen_k, heads_kv, head_dim)
        Of the dtype and device of ``q``; ``heads % heads_kv == 0``.
    mask, causal, window, scale, dropout, impl
        As in `nbflash.attention`. In training and in evaluation alike, dropout is what is given.
    score : TensorScore or nbflash.scores.Score, optional
        Of `nbflash.torch.scores`: its tensors get gradients.
    seed : int, (int, int) or int64 Tensor of two, optional
        Seed and offset of dropout. By default each call draws them from torch's generator of the
        device, which `torch.manual_seed` sets, and within a CUDA graph every replay.
    return_lse : bool
        Also return the log-sum-exp; gradients flow through both.
    deterministic : bool, optional
        Gradients of q, k and v are bitwise reproducible, and those of a score as
        `nbflash.score_backward` says; default `torch.are_deterministic_algorithms_enabled`.
    layout : {"bshd", "bhsd"}
        ``"bhsd"``: q, k, v and the result are (batch, heads, seqlen, head_dim).

    Returns
    -------
    out : Tensor like q
    lse : Tensor (batch, heads, seqlen_q), only with ``return_lse=True``
        float32, or float64 for float64 inputs.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what would be right.
    NotImplementedError
        For second derivatives, and under ``torch.vmap``.
    """
    check_flag("return_lse", return_lse)
    check_layout(layout)
    q, k, v = check_tensors(q, k, v)
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    check_flag("deterministic", deterministic)
    stages, arrays = stages_on(score, q.device)
    mask = mask_now(mask, q.shape[2])
    handle = handle_of(mask, causal, window, scale, stages, dropout, deterministic, impl)
    seed = _seed_tensor(seed, dropout, q.device)
    is_late = isinstance(mask, LateMask)
    if is_late:
        arrays = *arrays, *mask.tensors
    out, lse = autograd.attention(q, k, v, arrays, seed, handle, return_lse, is_late)
    out = out.transpose(1, 2) if layout == "bhsd" else out
    return (out, lse) if return_lse else out


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    causal: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention within each of several sequences that lie one behind the other.

    Parameters
    ----------
    q : Tensor (total_q, heads, head_dim)
    k, v : Tensor (total_k, heads_kv, head_dim)
    cu_seqlens_q, cu_seqlens_k : sequence of int, or Tensor
        Where sequences begin, and the end: ``[0, n_0, n_0 + n_1, ...]``; of the keys by default the
        same. A tensor of CUDA memory is copied to the host, which waits for the device.
        A compiled graph reads them whenever it runs.
    causal : bool
        Of every sequence, bottom-right aligned.
    return_lse, **options
        As in `attention`, without ``mask``, ``window`` and ``layout``.

    Returns
    -------
    out : Tensor (total_q, heads, head_dim)
    lse : Tensor (heads, total_q), only with ``return_lse=True``
    """
    refused = [name for name in ("layout", "mask", "window") if name in options]
    if refused:
        raise TypeError(f"varlen_attention takes no {', '.join(refused)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.ndim != 3:
            raise ValueError(f"{name} must have 3 axes (total, heads, head_dim), got {x.shape}")
    check_flag("causal", causal)
    mask = _documents(cu_seqlens_q, cu_seqlens_k, causal)
    if isinstance(mask, masks.Mask) and mask.shape != (len(q), len(k)):
        raise ValueError(f"cu_seqlens must end at {(len(q), len(k))}, got {mask.shape}")
    out, lse = attention(q[None], k[None], v[None], mask, return_lse=True, **options)
    return (out[0], lse[0]) if return_lse else out[0]


def _documents(starts_q, starts_k, causal):
    if not torch.compiler.is_compiling():
        starts_q = integers("cu_seqlens_q", starts_q)
        starts_k = starts_q if starts_k is None else integers("cu_seqlens_k", starts_k)
        return documents(starts_q, starts_k, causal)
    starts_q = torch.as_tensor(starts_q, device="cpu")
    starts_k = starts_q if starts_k is None else torch.as_tensor(starts_k, device="cpu")
    return LateMask(Documents, (constant(causal),), (starts_q, starts_k))


def check_layout(layout):
    """Raise ValueError for a name that is no layout."""
    if layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(_LAYOUTS)}, got {layout!r}")


def check_tensors(q, k, v):
    """Tensors of four axes on one device, cast under autocast as torch's own attention does."""
    check_tensor("q", q)
    device = q.device
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.device != device:
            raise ValueError(f"{name} must be on the device of q, {device}, got {x.device}")
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 axes, got shape {tuple(x.shape)}")
    kind = device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v)]


def _seed_tensor(seed, dropout, device):
    """Seed and offset as a tensor; None without dropout."""
    if isinstance(seed, torch.Tensor):
        return seed
    if seed is not None:
        if torch.compiler.is_compiling():
            pair = isinstance(seed, (list, tuple))
            seed = tuple(constant(x) for x in seed) if pair else constant(seed)
        return torch.tensor(_words(seed), dtype=torch.int64, device="cpu")
    if check_dropout(dropout) == 0:
        return None
    return torch.randint(_SIGN - 1, (2,), device=device)


@torch.compiler.assume_constant_result
def _words(seed):
    """Two integers from 0 to 2**64 - 1 as int64 has them."""
    return [x - 2 * _SIGN if x >= _SIGN else x for x in check_seed(seed, None)]
