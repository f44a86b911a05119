"""Score functions whose arrays are tensors: `nbflash.scores`, differentiable in them.

Arrays may have any floating dtype. In CUDA memory each call copies them to where the kernels read
them, which costs no plan: one that is computed anew for every call is as good as a parameter.
"""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple, SupportsFloat

import numpy as np
import torch

from nbflash import scores as core
from nbflash.definitions.types import Function, Functions
from nbflash.scores import Score
from nbflash.torch.constants import addressed, constant, number, object_of
from nbflash.torch.memory import check_tensor

__all__ = ["TensorScore", "alibi", "bias", "compose", "custom", "relative", "softcap"]


class _Kind(enum.Enum):  # a constant to torch.compile
    """What stands for a tensor among the parameters."""

    TENSOR = enum.auto()


class Stage(NamedTuple):
    """One function: what makes it of constants and of tensors, in this order.

    ``learned`` says which of its arrays with a gradient are tensors, and ``arrays`` which of its
    tensors have a gradient.
    """

    make: object
    constants: tuple
    arrays: tuple = ()
    learned: tuple = ()

    def build(self, arrays):
        """The `nbflash.scores.Score` of native arrays."""
        if self.make is not core.custom:
            return self.make(*self.constants, *arrays)
        fn, grad, params, param_grads, _ = self.constants
        arrays = iter(arrays)
        given = tuple(next(arrays) if x is _Kind.TENSOR else x for x in params)
        return core.custom(fn, grad, given, param_grads)


class TensorScore:
    """Functions one after the other, and the tensors that they read.

    Made by the functions of this module, and taken by ``score=`` of `nbflash.torch.attention`.
    """

    def __init__(self, stages, tensors):
        self.stages, self.tensors = tuple(stages), tuple(tensors)

    def __repr__(self):
        names = ", ".join(stage.make.__name__ for stage in self.stages)
        return f"TensorScore({names})"


def build(stages, arrays):
    """The `nbflash.scores.Score` of a TensorScore's stages and native arrays."""
    made, arrays = [], iter(arrays)
    for stage in stages:
        made.append(stage.build([next(arrays) for _ in stage.arrays]))
    return core.compose(*made)


def flattened(stages):
    """Stages as arguments of a function that torch.compile runs: no tuple may hold an object."""
    flat = []
    for stage in stages or ():
        made = stage.make, stage.arrays, stage.learned
        flat += [*made, len(stage.constants), *map(_settled, stage.constants)]
    return flat


def _settled(x):
    """A constant of a stage that was made outside of the graph, whose numbers may be symbols."""
    return tuple(map(_settled, x)) if isinstance(x, tuple) else constant(x)


def unflattened(flat):
    """The stages of a tuple; None if there is none."""
    stages, at = [], 0
    while at < len(flat):
        make, arrays, learned, count = flat[at : at + 4]
        stages.append(Stage(make, flat[at + 4 : at + 4 + count], arrays, learned))
        at += 4 + count
    return tuple(stages) or None


def stages_of(score):
    """The stages and the tensors of what ``score=`` was given."""
    if score is None:
        return None, ()
    if isinstance(score, TensorScore):
        return score.stages, score.tensors
    if isinstance(score, core.Score):
        return (_constant(score),), ()
    raise TypeError(
        f"score must be made by nbflash.torch.scores or nbflash.scores, got {type(score).__name__}"
    )


def stages_on(score, device):
    """The same of a call whose q is on a device."""
    stages, arrays = stages_of(score)
    for x in arrays:
        if x.device != device:
            raise ValueError(f"score has a tensor on {x.device} but q is on {device}")
    return stages, arrays


def softcap(cap: SupportsFloat) -> TensorScore:
    """`nbflash.scores.softcap`: ``cap · tanh(s / cap)``."""
    if torch.compiler.is_compiling():
        return TensorScore([Stage(core.softcap, (number("cap", cap),))], [])
    return TensorScore([_constant(core.softcap(cap))], [])


def alibi(slopes: Any) -> TensorScore:
    """`nbflash.scores.alibi`: slopes a number, a list, or for q on the CPU a tensor (heads,)."""
    if not isinstance(slopes, torch.Tensor):
        if not torch.compiler.is_compiling():
            return TensorScore([_constant(core.alibi(slopes))], [])
        if isinstance(slopes, (int, float)):
            return TensorScore([Stage(core.alibi, (constant(slopes),))], [])
        slopes = tuple(number("slopes", x) for x in slopes)
        return TensorScore([Stage(core.alibi, (slopes,), (), (False,))], [])
    if slopes.is_cuda:
        raise ValueError(
            f"slopes must be in host memory, got a tensor on {slopes.device}: give a list, "
            f"slopes.tolist(), or learn them as params of scores.custom"
        )
    return _of_one(core.alibi, "slopes", slopes)


def relative(table: Any) -> TensorScore:
    """`nbflash.scores.relative`: a table (heads, 2 reach + 1) by the distance of the key."""
    return _of_one(core.relative, "table", table)


def bias(array: Any) -> TensorScore:
    """`nbflash.scores.bias`: ``s + array[b, h, q_idx, kv_idx]``, axes of length 1 for all."""
    return _of_one(core.bias, "array", array)


def custom(
    fn: Function, grad: Function | None = None, params: Any = (), param_grads: Functions = None
) -> TensorScore:
    """`nbflash.scores.custom`: a function of one's own; its arrays are tensors among ``params``.

    Numbers of NumPy are taken in eager mode alone: torch.compile takes them for arrays.
    """
    if not isinstance(params, (tuple, list)):
        raise TypeError(f"params must be a tuple, got {type(params).__name__}")
    params = tuple(torch.as_tensor(x) if isinstance(x, np.ndarray) else constant(x) for x in params)
    grads = (None,) * len(params) if param_grads is None else tuple(param_grads)
    is_tensor = [isinstance(x, torch.Tensor) for x in params]
    both = list(zip(is_tensor, grads, strict=False))
    stage = Stage(
        core.custom,
        (
            fn,
            grad,
            tuple(_Kind.TENSOR if isinstance(x, torch.Tensor) else x for x in params),
            None if param_grads is None else grads,
            # 3 == np.int64(3) and 0.0 == -0.0, but they are not compiled alike.
            tuple((type(x), _sign(x)) for x in params),
        ),
        tuple(part is not None for tensor, part in both if tensor),
        tuple(tensor for tensor, part in both if part is not None),
    )
    return TensorScore([stage], [x for x in params if isinstance(x, torch.Tensor)])


def _sign(x):
    return math.copysign(1.0, x) if isinstance(x, (float, np.floating)) else 0


def compose(*given: TensorScore | Score) -> TensorScore:
    """`nbflash.scores.compose`: the scores one after the other, the first one first."""
    both = [stages_of(score) for score in given]
    return TensorScore(
        [stage for stages, _ in both for stage in stages or ()],
        [tensor for _, tensors in both for tensor in tensors],
    )


def _constant(score):
    return Stage(core.compose, (score,), (), _all_constant(addressed(score)))


@torch.compiler.assume_constant_result
def _all_constant(score):
    return (False,) * sum(len(parts) for parts in object_of(score).parts if parts)


def _of_one(make, name, tensor):
    check_tensor(name, tensor)
    return TensorScore([Stage(make, (), (True,), (True,))], [tensor])
