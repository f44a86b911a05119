"""decode of tensors: an operator without gradients."""

from __future__ import annotations

from typing import Literal, overload

import torch

import masks
from nbflash.decoding import run_decode
from nbflash.definitions.types import Scale, Window
from nbflash.inputs.arrays import as_tensor
from nbflash.inputs.block_map import BlockMap
from nbflash.inputs.decode_problem import Cache, decode_inputs
from nbflash.inputs.problem import check_flag
from nbflash.scores import Score
from nbflash.torch.autograd import is_eager
from nbflash.torch.handles import handle_of, mask_now, spec_of
from nbflash.torch.memory import check_tensor, native_of, with_rows
from nbflash.torch.operators import define, new_results
from nbflash.torch.scores import TensorScore, stages_on

_NO_GRADIENT = "nbflash: decode has no gradient; call it under torch.no_grad()"


@overload
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_table: torch.Tensor | None = ...,
    mask: masks.Mask | BlockMap | None = ...,
    window: Window = ...,
    k_scale: torch.Tensor | None = ...,
    v_scale: torch.Tensor | None = ...,
    scale: Scale = ...,
    score: TensorScore | Score | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_table: torch.Tensor | None = ...,
    mask: masks.Mask | BlockMap | None = ...,
    window: Window = ...,
    k_scale: torch.Tensor | None = ...,
    v_scale: torch.Tensor | None = ...,
    scale: Scale = ...,
    score: TensorScore | Score | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    mask: masks.Mask | BlockMap | None = None,
    window: Window = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: Scale = None,
    score: TensorScore | Score | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`nbflash.decode` of tensors: the last tokens of every sequence attend to cached keys.

    Parameters
    ----------
    q : Tensor (batch, q_len, heads, head_dim)
    k_cache, v_cache : Tensor (batch, capacity, heads_kv, head_dim)
        With a ``block_table``: (pages, page_size, heads_kv, head_dim). The dtype of ``q``, or int8
        or float8_e4m3fn.
    lengths : int32 Tensor (batch,)
        On the device of ``q``, as is ``block_table``.
    block_table, mask, window, k_scale, v_scale, scale, return_lse
        As in `nbflash.decode`.
    score : TensorScore or nbflash.scores.Score, optional
        Of `nbflash.torch.scores`, without gradients. Its ``q_idx`` is the position of a token in
        its sequence.

    Returns
    -------
    out : Tensor like q
    lse : Tensor (batch, heads, q_len), only with ``return_lse=True``
    """
    check_flag("return_lse", return_lse)
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths}
    optional = {"block_table": block_table, "k_scale": k_scale, "v_scale": v_scale}
    named |= {name: x for name, x in optional.items() if x is not None}
    for name, x in named.items():
        check_tensor(name, x)
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if q.ndim != 4:
        raise ValueError(f"q must have 4 axes, got shape {tuple(q.shape)}")
    mask = mask_now(mask, q.shape[2])
    stages, arrays = stages_on(score, q.device)
    handle = handle_of(mask, False, window, scale, stages, 0.0, False, "auto")
    given = q, k_cache, v_cache, lengths, block_table, k_scale, v_scale
    run = _decode if _is_alone(*given, *arrays) else torch.ops.nbflash.decode.default
    out, lse = run(*given, arrays, handle)
    return (out, lse) if return_lse else out


def _is_alone(*tensors):
    """Whether nobody listens to an operator, nor asks for gradients: around torch's dispatcher."""
    if torch.compiler.is_compiling() or not is_eager(tensors):
        return False
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))


@define(
    "decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, Tensor? block_table,"
    " Tensor? k_scale, Tensor? v_scale, Tensor[] arrays, int handle) -> (Tensor out, Tensor lse)"
)
def _decode(q, k_cache, v_cache, lengths, block_table, k_scale, v_scale, arrays, handle):
    spec = spec_of(handle)
    given = k_cache, v_cache, lengths, block_table, k_scale, v_scale
    cache = Cache(*(None if x is None else native_of(x) for x in given))
    score = spec.score(arrays, q.dtype)
    native = decode_inputs(native_of(with_rows(q)), cache)
    how = spec.given
    out, lse = run_decode(*native, how.mask, how.scale, how.window, score)
    return as_tensor(out), as_tensor(lse)


@torch.library.register_fake("nbflash::decode")
def _fake_decode(q, k_cache, v_cache, lengths, block_table, k_scale, v_scale, arrays, handle):
    return new_results(q)


def _no_gradient(ctx, *gradients):
    raise NotImplementedError(_NO_GRADIENT)


torch.library.register_autograd("nbflash::decode", _no_gradient)
