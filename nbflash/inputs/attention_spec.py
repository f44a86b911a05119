"""What a plan computes: a problem, a mask, a score and dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbflash.inputs.problem import Problem


@dataclass(frozen=True)
class AttentionSpec:
    """What an implementation is asked to compute.

    Attributes
    ----------
    problem : nbflash.inputs.problem.Problem
    mask : masks.Mask or nbflash.inputs.block_layout.BlockLayout
    score : nbflash.scores.Score or None
    dropout : float
        Probability; 0 for none.
    positions : nbflash.inputs.positions.Positions or None
        Where the tokens are in the sequence that dropout's random numbers belong to; None: where
        they are in the arrays.
    """

    problem: Problem
    mask: Any = None
    score: Any = None
    dropout: float = 0.0
    positions: Any = None
