"""Adapters to the attention libraries that nbflash is measured beside.

Each is made from the q, k and v of one shape, (batch, seqlen, heads, head_dim), and makes calls
without arguments: that of `forward` returns the output, those of `backward` and of `both`, which
runs the forward pass first, dQ, dK and dV, all in that layout. Block lists and whatever else a call
needs are prepared before. torch's tensors share the memory of the arrays; SDPA and FlexAttention
get a copy in the layout they are documented for, (batch, heads, seqlen, head_dim).
"""

import importlib
import importlib.metadata
from dataclasses import dataclass
from functools import partial

import numpy as np

import masks
import nbflash
from experiments.harness.passes import both

DENSE, CAUSAL, BLOCKS = "dense", "causal", "blocks"
NBFLASH = "nbflash"

#: flash-attn-4 4.0.0b36 on Hopper has tiles of 80 keys for wider heads: it refuses lists of blocks
#: of 128 there and takes the same mask in blocks of 64.
FA4_WIDE_HEAD, FA4_WIDE_TILE = 192, 64

#: FlexAttention's default tiles do not fit into smaller blocks, and torch 2.11 refuses them.
FLEX_TILE = 128


@dataclass(frozen=True)
class Case:
    """One mask at one shape.

    Attributes
    ----------
    name : str
        Of the mask.
    kind : {"dense", "causal", "blocks"}
    mask : masks.Mask
    density : float
        Share of the scores that count as work: a half for causal.
    tile : int
        Block size.
    shape : (batch, seqlen, heads, head_dim)
    """

    name: str
    kind: str
    mask: masks.Mask
    density: float
    tile: int
    shape: tuple[int, int, int, int]


def block_lists(mask, tile):
    """The blocks of each row of blocks, those attended in part and those attended in full.

    Returns
    -------
    two pairs (counts, columns)
        int32 (rows,) and int32 (rows, columns of blocks): row ``i`` has ``counts[i]`` blocks, the
        first ones of ``columns[i]``, in increasing order; what follows them is 0.
    """
    tiles = mask.tiles(tile)
    rows, cols = tiles.coordinates()
    full = tiles.kinds.data == masks.FULL
    return tuple(_padded(rows[at], cols[at], tiles.kinds.shape) for at in (~full, full))


def _padded(rows, cols, shape):
    counts = np.bincount(rows, minlength=shape[0])
    first = np.cumsum(counts) - counts
    columns = np.zeros(shape, np.int32)
    columns[rows, np.arange(rows.size) - first[rows]] = cols
    return counts.astype(np.int32), columns


def tensor(x):
    """A torch tensor on the memory of an array; bfloat16 travels as bytes."""
    import torch

    return torch.from_dlpack(x.view(np.uint8)).view(getattr(torch, x.dtype.name))


class Library:
    """What adapters have in common."""

    #: A `features.Feature` where something else than plain attention is computed.
    feature = None

    @staticmethod
    def why_not(case):
        """Why a case is left out; empty where the library is to try it."""
        return ""

    def details(self, case, which):
        """More columns of the row of a case and a pass."""
        return {}


class Nbflash(Library):
    """nbflash by its public plan."""

    def __init__(self, q, k, v, impl="auto"):
        self._inputs, self._impl = (q, k, v), impl

    @staticmethod
    def version():
        return nbflash.__version__

    def _plan(self, case):
        return nbflash.plan(*self._inputs, case.mask, impl=self._impl)

    def label(self, case):
        """Which implementation runs is part of the name."""
        return f"{NBFLASH} {self._plan(case).impl}"

    def forward(self, case):
        plan = self._plan(case)
        return lambda: plan(*self._inputs)[0]

    def backward(self, case, dout):
        plan = self._plan(case)
        out, lse = plan(*self._inputs)
        return partial(plan.backward, dout, *self._inputs, out, lse)

    def both(self, case, dout):
        return partial(both, self._plan(case), dout, *self._inputs)


class TorchLibrary(Library):
    """What the libraries on torch have in common: a subclass gives ``_attention(case)``."""

    heads_first = True

    def __init__(self, q, k, v):
        self._inputs = [self._own(x) for x in (q, k, v)]

    @staticmethod
    def version():
        import torch

        return torch.__version__

    def _own(self, x):
        x = tensor(x)
        return x.transpose(1, 2).contiguous() if self.heads_first else x

    def _public(self, x):
        return x.transpose(1, 2) if self.heads_first else x

    def _attention(self, case):
        """A function of q, k and v in the library's own layout."""
        raise NotImplementedError

    def forward(self, case):
        attention = self._attention(case)
        return lambda: self._public(attention(*self._inputs))

    def backward(self, case, dout):
        leaves, attention = self._leaves(), self._attention(case)
        out, dout = attention(*leaves), self._own(dout)
        return lambda: self._gradients(out, leaves, dout, retain_graph=True)

    def both(self, case, dout):
        leaves, attention, dout = self._leaves(), self._attention(case), self._own(dout)
        return lambda: self._gradients(attention(*leaves), leaves, dout)

    def _leaves(self):
        return [x.detach().requires_grad_() for x in self._inputs]

    def _gradients(self, *args, **options):
        import torch

        return tuple(map(self._public, torch.autograd.grad(*args, **options)))


class Sdpa(TorchLibrary):
    """``torch.nn.functional.scaled_dot_product_attention`` held to one of its backends."""

    def __init__(self, q, k, v, backend):
        super().__init__(q, k, v)
        self._backend = backend

    @staticmethod
    def why_not(case):
        return "dense and causal alone" if case.kind == BLOCKS else ""

    def label(self, case):
        return f"sdpa-{self._backend.split('_')[0].lower()}"

    def _attention(self, case):
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend, causal = getattr(SDPBackend, self._backend), case.kind == CAUSAL

        def attention(q, k, v):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return attention


class Flex(TorchLibrary):
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
        if case.tile < FLEX_TILE:
            options = {"fwd_BLOCK_M": case.tile, "fwd_BLOCK_N": case.tile}
        return partial(self._compiled, block_mask=self._block_mask(case), kernel_options=options)

    def _block_mask(self, case):
        from torch.nn.attention.flex_attention import BlockMask

        lists = _on(self._inputs[0].device, block_lists(case.mask, case.tile))
        causal = _keeps_causal if case.kind == CAUSAL else None
        return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=case.tile, mask_mod=causal)


class FlashAttention4(TorchLibrary):
    """flash-attn-4, the package ``flash_attn.cute``."""

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
        tile = FA4_WIDE_TILE if case.shape[-1] > FA4_WIDE_HEAD else case.tile
        lists = _on(self._inputs[0].device, block_lists(mask, tile))
        return sparsity.BlockSparseTensorsTorch(*lists, block_size=(tile, tile))


def _on(device, lists):
    """Block lists as torch tensors that every batch entry and head shares."""
    import torch

    return [torch.from_numpy(x)[None, None].to(device) for pair in lists for x in pair]


def _keeps_causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


#: Name of a library to its adapter, in the order of the tables.
LIBRARIES = {
    NBFLASH: Nbflash,
    "sdpa-flash": partial(Sdpa, backend="FLASH_ATTENTION"),
    "sdpa-cudnn": partial(Sdpa, backend="CUDNN_ATTENTION"),
    "flex-attention": Flex,
    "flash-attn-4": FlashAttention4,
}


def why_not_here(name):
    """Why a library cannot run on this machine; empty when it can."""
    if name == NBFLASH:
        return ""
    try:
        import torch

        if name == "flash-attn-4":
            importlib.import_module("flash_attn.cute")
    except (ImportError, OSError) as error:
        return str(error)
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"
