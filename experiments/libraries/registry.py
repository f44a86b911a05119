"""The libraries that `peers` compares."""

import importlib
from functools import partial

from experiments.harness.passes import NBFLASH
from experiments.libraries.flash_attn_4 import FlashAttention4
from experiments.libraries.flex_attention import FlexAttention
from experiments.libraries.nbflash import Nbflash
from experiments.libraries.sdpa import Sdpa
from experiments.libraries.torch_base import why_not_torch

#: Name of a library to its adapter, in the order of the tables.
LIBRARIES = {
    NBFLASH: Nbflash,
    "sdpa-flash": partial(Sdpa, backend="FLASH_ATTENTION"),
    "sdpa-cudnn": partial(Sdpa, backend="CUDNN_ATTENTION"),
    "flex-attention": FlexAttention,
    "flash-attn-4": FlashAttention4,
}


def why_not_here(name):
    """Why a library cannot run on this machine; empty when it can."""
    if name == NBFLASH:
        return ""
    reason = why_not_torch()
    if not reason and name == "flash-attn-4":
        try:
            importlib.import_module("flash_attn.cute")
        except (ImportError, OSError) as error:
            return str(error)
    return reason
