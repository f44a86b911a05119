"""torch's FlexAttention."""

from functools import partial

import numpy as np

from experiments.harness.grid import BLOCKS, CAUSAL, DENSE, DOCUMENTS, PREFIX, WINDOW
from experiments.libraries.torch_base import TorchLibrary

#: FlexAttention's default tiles do not fit into smaller blocks, and torch 2.11 refuses them.
DEFAULT_TILE = 128


class FlexAttention(TorchLibrary):
    """``torch.nn.attention.flex_attention``, compiled anew for each shape."""

    def __init__(self, q, k, v):
        import torch
        import torch._dynamo
        import torch._functorch.config
        from torch.nn.attention.flex_attention import flex_attention

        super().__init__(q, k, v)
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 64
        torch._functorch.config.donated_buffer = False  # the timed backward runs many times
        self._compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def label(self, case):
        return "flex-attention"

    def _attention(self, case):
        compiled = partial(self._compiled, enable_gqa=case.heads_kv is not None)
        if case.kind == DENSE:
            return compiled
        options = None
        if case.tile < DEFAULT_TILE:
            options = {"fwd_BLOCK_M": case.tile, "fwd_BLOCK_N": case.tile}
        return partial(compiled, block_mask=self._block_mask(case), kernel_options=options)

    def _block_mask(self, case):
        from torch.nn.attention.flex_attention import BlockMask

        lists = self._block_tensors(case.mask, case.tile)
        mask_mod = None if case.kind == BLOCKS else mask_mod_of(case, self._beside)
        return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=case.tile, mask_mod=mask_mod)


def mask_mod_of(case, beside):
    """The mask of a case as a function of places, as FlexAttention's documentation writes it.

    Parameters
    ----------
    case : harness.grid.Case
        Of any kind but dense and blocks.
    beside : callable
        ``beside(array)`` is what the function may read of a NumPy array.
    """
    given = case.arguments

    def causal(batch, head, q_idx, kv_idx):
        return q_idx >= kv_idx

    def window(batch, head, q_idx, kv_idx):
        return (q_idx - kv_idx <= given["left"]) & (kv_idx - q_idx <= given["right"])

    def prefix(batch, head, q_idx, kv_idx):
        return (q_idx >= kv_idx) | (kv_idx < given["prefix_len"])

    if case.kind != DOCUMENTS:
        return {CAUSAL: causal, WINDOW: window, PREFIX: prefix}[case.kind]
    lengths = given["lengths"]
    document = beside(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))

    def documents(batch, head, q_idx, kv_idx):
        same = document[q_idx] == document[kv_idx]
        return same & (q_idx >= kv_idx) if given["causal"] else same

    return documents
