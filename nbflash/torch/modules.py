"""Attention as a torch.nn.Module."""

from __future__ import annotations

import torch

import masks
from nbflash.definitions.types import Scale, Window
from nbflash.inputs.block_map import BlockMap
from nbflash.scores import Score
from nbflash.torch.attention import attention, check_layout
from nbflash.torch.merging import merge_sink
from nbflash.torch.scores import TensorScore


class Attention(torch.nn.Module):
    """`nbflash.torch.attention` with its options, for models: what lies between projections.

    Parameters
    ----------
    mask, causal, window, scale, score, deterministic, layout
        As in `nbflash.torch.attention`.
    dropout : float
        In training only.
    sinks : int, optional
        Number of query heads: each gets a learnable attention sink, `nbflash.torch.merge_sink`,
        the parameter ``sink``, which begins at 0.
    """

    def __init__(
        self,
        mask: masks.Mask | BlockMap | None = None,
        *,
        causal: bool = False,
        window: Window = None,
        scale: Scale = None,
        score: TensorScore | Score | None = None,
        dropout: float = 0.0,
        sinks: int | None = None,
        deterministic: bool | None = None,
        layout: str = "bshd",
    ) -> None:
        super().__init__()
        check_layout(layout)
        self.mask, self.causal, self.window, self.scale = mask, causal, window, scale
        self.score, self.dropout, self.layout = score, dropout, layout
        self.deterministic = deterministic
        self.sink = None if sinks is None else torch.nn.Parameter(torch.zeros(sinks))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The result for tensors of ``layout``."""
        if self.layout == "bhsd":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = attention(
            *(q, k, v, self.mask),
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            score=self.score,
            dropout=self.dropout if self.training else 0.0,
            return_lse=True,
            deterministic=self.deterministic,
        )
        if self.sink is not None:
            out, _ = merge_sink(out, lse, self.sink)
        return out.transpose(1, 2) if self.layout == "bhsd" else out

    def extra_repr(self) -> str:
        """What differs from the defaults."""
        named = "mask", "window", "scale", "score", "deterministic"
        given = {name: x for name in named if (x := getattr(self, name)) is not None}
        given |= {name: x for name in ("causal", "dropout") if (x := getattr(self, name))}
        if self.sink is not None:
            given["sinks"] = len(self.sink)
        if self.layout != "bshd":
            given["layout"] = repr(self.layout)
        return ", ".join(f"{name}={x}" for name, x in given.items())
