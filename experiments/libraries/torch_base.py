"""What the libraries on torch have in common.

torch's tensors share the memory of the arrays; SDPA and FlexAttention get a copy in the layout they
are documented for, (batch, heads, seqlen, head_dim).
"""

import numpy as np

from experiments.libraries.base import Library, block_lists


def why_not_torch(device="cuda"):
    """Why torch cannot run on a device; empty when it can."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return str(error)
    return "" if device == "cpu" or torch.cuda.is_available() else "torch sees no CUDA device"


def tensor(x):
    """A torch tensor on the memory of an array; bfloat16 travels as bytes."""
    import torch

    return torch.from_dlpack(x.view(np.uint8)).view(getattr(torch, x.dtype.name))


class TorchLibrary(Library):
    """A subclass gives ``label(case)`` and ``_attention(case)``."""

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

    def _block_tensors(self, mask, tile):
        """Block lists as tensors that every batch entry and head shares."""
        return [self._beside(x)[None, None] for pair in block_lists(mask, tile) for x in pair]

    def _beside(self, x):
        """A NumPy array as a tensor on the device of the inputs."""
        import torch

        return torch.from_numpy(x).to(self._inputs[0].device)
