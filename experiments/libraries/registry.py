"""The libraries that `peers` compares."""

import importlib
from functools import partial

from experiments.harness.passes import NBFLASH
from experiments.libraries.cudnn_frontend import CudnnFrontend
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
    "cudnn-frontend": CudnnFrontend,
}

#: Modules of packages beside torch, which a machine may lack.
MODULES = {"flash-attn-4": "flash_attn.cute", "cudnn-frontend": "cudnn.block_sparse_attention.api"}


def why_not_here(name):
    """Why a library cannot run on this machine; empty when it can."""
    if name == NBFLASH:
        return ""
    reason = why_not_torch()
    if not reason and name in MODULES:
        try:
            importlib.import_module(MODULES[name])
        except (ImportError, OSError) as error:
            return str(error)
    return reason
