"""flash-attn-4, the package ``flash_attn.cute``."""

import importlib
import importlib.metadata

from experiments.harness.grid import BLOCKS, CAUSAL
from experiments.libraries.torch_base import TorchLibrary

#: flash-attn-4 4.0.0b36 on Hopper has tiles of 80 keys for wider heads: it refuses lists of blocks
#: of 128 there and takes the same mask in blocks of 64.
WIDE_HEAD, WIDE_TILE = 192, 64


class FlashAttention4(TorchLibrary):
    """``flash_attn.cute.flash_attn_func``."""

    heads_first = False

    @staticmethod
    def version():
        return importlib.metadata.version("flash-attn-4")

    def label(self, case):
        return "flash-attn-4"

    def _attention(self, case):
        function = importlib.import_module("flash_attn.cute").flash_attn_func
        options = {"causal": True} if case.kind == CAUSAL else {}
        if case.kind == BLOCKS:
            options["block_sparse_tensors"] = self._blocks(case, case.mask)
            options["block_sparse_tensors_bwd"] = self._blocks(case, case.mask.T)

        def attention(q, k, v):
            result = function(q, k, v, **options)
            return result[0] if isinstance(result, tuple) else result

        return attention

    def _blocks(self, case, mask):
        sparsity = importlib.import_module("flash_attn.cute.block_sparsity")
        tile = WIDE_TILE if case.shape[-1] > WIDE_HEAD else case.tile
        lists = self._block_tensors(mask, tile)
        return sparsity.BlockSparseTensorsTorch(*lists, block_size=(tile, tile))
