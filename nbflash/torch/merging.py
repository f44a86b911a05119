"""merge and merge_sink of tensors: written in torch, which derives and fuses them.

The equations are those of `nbflash.merge` and `nbflash.merge_sink`.
"""

from __future__ import annotations

import torch

from nbflash.torch.memory import check_tensor

_INF = float("inf")


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`nbflash.merge`: attention over disjoint parts of the keys, joined by their log-sum-exp.

    Parameters
    ----------
    out_a, out_b : Tensor (batch, seqlen_q, heads, head_dim)
    lse_a, lse_b : Tensor (batch, heads, seqlen_q)
        Of `nbflash.torch.attention` with ``return_lse=True``; -inf where nothing is attended, and
        ``out`` is ignored.

    Returns
    -------
    out, lse : Tensor
    """
    _check(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    return _merged(out_a, lse_a, out_b, lse_b)


def _merged(out_a, lse_a, out_b, lse_b):
    largest = torch.maximum(lse_a, lse_b)
    shift = largest.detach().masked_fill(largest == -_INF, 0)
    p_a, p_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = p_a + p_b
    safe = total.masked_fill(total == 0, 1)  # where both parts are empty
    out = _weighted(p_a / safe, out_a, lse_a) + _weighted(p_b / safe, out_b, lse_b)
    lse = (shift + torch.log(safe)).masked_fill(total == 0, -_INF)
    return out.to(out_a.dtype), lse


def _check(**parts):
    """Raise TypeError or ValueError unless they are tensors of the same queries and heads."""
    for name, x in parts.items():
        check_tensor(name, x)
    first, shape = next((name, tuple(x.shape)) for name, x in parts.items())
    if len(shape) != 4:
        raise ValueError(f"{first} must have 4 axes, got shape {shape}")
    batch, n, heads, _ = shape
    for name, x in parts.items():
        want = shape if name.startswith("out") else (batch, heads, n)
        want = (heads,) if name == "sink" else want
        if tuple(x.shape) != want:
            raise ValueError(f"{name} must have shape {want}, as {first}, got {tuple(x.shape)}")


def _weighted(weight, out, lse):
    """A part of the sum; what an empty row holds counts for nothing, NaN included."""
    weight, is_empty = (x.transpose(1, 2).unsqueeze(-1) for x in (weight, lse == -_INF))
    return weight * out.masked_fill(is_empty, 0)


def merge_sink(
    out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`nbflash.merge_sink`: one more key for each head, of value 0 and logit ``sink``.

    Parameters
    ----------
    out : Tensor (batch, seqlen_q, heads, head_dim)
    lse : Tensor (batch, heads, seqlen_q)
        Of `nbflash.torch.attention` with ``return_lse=True``.
    sink : Tensor (heads,)
        A logit per head, which gets its gradient.

    Returns
    -------
    out, lse : Tensor
        With the sink.
    """
    _check(out=out, lse=lse, sink=sink)
    sink = sink.to(lse.dtype)[:, None].expand_as(lse)
    return _merged(out, lse, torch.zeros_like(out), sink)
