"""Attention of PyTorch tensors, on the CPU and on CUDA devices: a part of autograd.

    from nbflash.torch import attention

    out = attention(q, k, v, mask)   # as nbflash.attention, with out.backward()

Importing this imports torch; nothing else in nbflash does, but `nbflash.huggingface`.
"""

from torch._dynamo import trace_rules

from nbflash.torch import scores
from nbflash.torch.attention import attention, varlen_attention
from nbflash.torch.decoding import decode
from nbflash.torch.merging import merge, merge_sink
from nbflash.torch.modules import Attention

__all__ = [
    "Attention",
    "attention",
    "decode",
    "merge",
    "merge_sink",
    "scores",
    "varlen_attention",
]

# A mask that is made inside torch.compile breaks the graph: NumPy is not traced.
trace_rules.add("masks")
