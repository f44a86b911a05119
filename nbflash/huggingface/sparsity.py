"""A block-sparse mask for any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import masks
from nbflash.huggingface.attention import OVERRIDE
from nbflash.huggingface.layer_masks import Override

ModelT = TypeVar("ModelT")


def sparsify(
    model: ModelT,
    mask: masks.Mask | Callable[[int, int], masks.Mask] | None,
    *,
    where: Callable[[str, Any], bool] | None = None,
) -> ModelT:
    """Let the attention layers of a model attend within a mask, besides the model's own.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Changed in place, its attention implementation too.
    mask : masks.Mask, callable or None
        Square, for as many tokens as there may be: a call of fewer tokens, or of those behind a
        cache, takes their rows and the columns of the keys that are there. Or a function of
        ``(nq, nk)`` that makes the mask of the last nq of nk tokens; nk counts tokens from the
        first one on, also where a cache has room for more or holds those of a window alone.
        None takes a mask away again.
    where : callable, optional
        ``where(name, module)``, of the names of ``model.named_modules()``: which modules it is for.
        Encoder-decoder models have layers of several sizes.

    Returns
    -------
    model
    """
    if mask is not None and not isinstance(mask, masks.Mask) and not callable(mask):
        raise TypeError(f"mask must be a masks.Mask, a function or None, got {type(mask).__name__}")
    model.set_attn_implementation("nbflash")
    override = None if mask is None else Override(mask)
    for name, module in model.named_modules():
        if where is None or where(name, module):
            setattr(module, OVERRIDE, override)
    return model
