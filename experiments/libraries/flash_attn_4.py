"""flash-attn-4, the package ``flash_attn.cute``."""

import importlib
import importlib.metadata

import numpy as np

from experiments.harness.grid import BLOCKS, CAUSAL, DOCUMENTS, PREFIX, WINDOW
from experiments.libraries.torch_base import TorchLibrary

#: flash-attn-4 4.0.0b36 on Hopper has tiles of 80 keys for wider heads: it refuses lists of blocks
#: of 128 there and takes the same mask in blocks of 64.
WIDE_HEAD, WIDE_TILE = 192, 64


class FlashAttention4(TorchLibrary):
    """``flash_attn.cute.flash_attn_func``; documents by ``flash_attn_varlen_func``."""

    heads_first = False

    @staticmethod
    def version():
        return importlib.metadata.version("flash-attn-4")

    @staticmethod
    def why_not(case):
        return "a mask_mod in the CuTe language alone" if case.kind == PREFIX else ""

    def label(self, case):
        return "flash-attn-4"

    def _attention(self, case):
        library = importlib.import_module("flash_attn.cute")
        if case.kind == DOCUMENTS:
            return self._documents(library.flash_attn_varlen_func, case)
        function, options = library.flash_attn_func, {}
        if case.kind == CAUSAL:
            options["causal"] = True
        if case.kind == WINDOW:
            options["window_size"] = tuple(case.arguments[side] for side in ("left", "right"))
        if case.kind == BLOCKS:
            options["block_sparse_tensors"] = self._blocks(case, case.mask)
            options["block_sparse_tensors_bwd"] = self._blocks(case, case.mask.T)

        def attention(q, k, v):
            return _output(function(q, k, v, **options))

        return attention

    def _documents(self, function, case):
        """The sequences of a batch follow each other, as documents do."""
        lengths = case.arguments["lengths"]
        ends = self._beside(np.cumsum([0, *lengths * case.shape[0]], dtype=np.int32))
        options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": case.arguments["causal"]}
        options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(lengths))

        def attention(*qkv):
            packed = (x.reshape(-1, *x.shape[2:]) for x in qkv)
            return _output(function(*packed, **options)).reshape(qkv[0].shape)

        return attention

    def _blocks(self, case, mask):
        sparsity = importlib.import_module("flash_attn.cute.block_sparsity")
        tile = WIDE_TILE if case.shape[-1] > WIDE_HEAD else case.tile
        lists = self._block_tensors(mask, tile)
        return sparsity.BlockSparseTensorsTorch(*lists, block_size=(tile, tile))


def _output(result):
    return result[0] if isinstance(result, tuple) else result
