"""The name "nbflash" among transformers' attention implementations."""

from __future__ import annotations

import functools
import sys

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import generic

from nbflash.huggingface.attention import attention_of
from nbflash.huggingface.mask_functions import mask_of

NAME = "nbflash"
_ASKED = "is_flash_attention_requested"


def register():
    """Let ``attn_implementation="nbflash"`` mean this package.

    To transformers a name with "flash" in it is a kernel of the flash_attn package, which it loads,
    and for which it makes no mask. The one function that says so is told that "nbflash" is none.
    """
    AttentionInterface.register(NAME, attention_of)
    AttentionMaskInterface.register(NAME, mask_of)
    theirs = getattr(generic, _ASKED)
    ours = _but_for_ours(theirs)
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers") and vars(module).get(_ASKED) is theirs:
            setattr(module, _ASKED, ours)


def _but_for_ours(theirs):
    @functools.wraps(theirs)
    def is_requested(config=None, requested_attention_implementation=None, version=None):
        name = requested_attention_implementation
        if name == NAME or (config is not None and config._attn_implementation == NAME):
            return False
        return theirs(config, requested_attention_implementation, version)

    return is_requested
