"""torch's FlexAttention."""

from functools import partial

from experiments.harness.grid import CAUSAL, DENSE
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
        if case.kind == DENSE:
            return self._compiled
        options = None
        if case.tile < DEFAULT_TILE:
            options = {"fwd_BLOCK_M": case.tile, "fwd_BLOCK_N": case.tile}
        return partial(self._compiled, block_mask=self._block_mask(case), kernel_options=options)

    def _block_mask(self, case):
        from torch.nn.attention.flex_attention import BlockMask

        lists = self._block_tensors(case.mask, case.tile)
        causal = _keeps_causal if case.kind == CAUSAL else None
        return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=case.tile, mask_mod=causal)


def _keeps_causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx
