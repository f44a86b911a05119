"""cudnn-frontend, its module ``cudnn.block_sparse_attention``."""

import importlib
import importlib.metadata

import numpy as np

from experiments.harness.grid import BLOCKS
from experiments.libraries.base import block_lists
from experiments.libraries.torch_base import TorchLibrary

_MODULE = "cudnn.block_sparse_attention"

#: What the forward of nvidia-cudnn-frontend 1.32.0 takes on Hopper. The backward takes bfloat16,
#: head_dim 128 and as many heads of K and V as of Q alone, and says so.
TILES, HEAD_DIMS = (64, 128), (64, 96, 128)


class CudnnFrontend(TorchLibrary):
    """``block_sparse_attention_forward`` and ``block_sparse_attention_backward``.

    Both are given the key blocks of each row of blocks; the backward makes those of each column of
    them in every call. K and V are not split (``kv_splits=1``, the default).
    """

    @staticmethod
    def version():
        return importlib.metadata.version("nvidia-cudnn-frontend")

    @staticmethod
    def why_not(case):
        if case.kind != BLOCKS or case.tile not in TILES or case.shape[1] % case.tile:
            return "masks of whole blocks of 64 or 128 alone"
        if case.shape[-1] not in HEAD_DIMS:
            return "head_dim 64, 96 and 128 alone"
        return ""

    def label(self, case):
        return "cudnn-frontend"

    def forward(self, case):
        run = self._forward(case)
        return lambda: self._public(run()[0])

    def backward(self, case, dout):
        run = self._backward(case, dout)
        results = self._forward(case)()
        return lambda: run(*results)

    def both(self, case, dout):
        forward, backward = self._forward(case), self._backward(case, dout)
        return lambda: backward(*forward())

    def _forward(self, case):
        """A call that returns the output, in the layout of the library, and the LSE."""
        function = importlib.import_module(_MODULE).block_sparse_attention_forward
        lists = index_lists(case)
        options = self._options(lists)
        if "q2k_block_nums" in lists and not lists["q2k_block_nums"].all():
            options["allow_empty_block_nums"] = True

        def call():
            found = function(*self._inputs, **options)
            return found["o_tensor"], found["lse_tensor"]

        return call

    def _backward(self, case, dout):
        """A function of what the forward returned."""
        function = importlib.import_module(_MODULE).block_sparse_attention_backward
        options, dout = self._options(index_lists(case)), self._own(dout)

        def call(out, lse):
            found = function(dout, *self._inputs, out, lse, **options)
            return tuple(self._public(found[f"{name}_tensor"]) for name in ("dq", "dk", "dv"))

        return call

    def _options(self, lists):
        """Arrays as tensors."""
        return {
            key: self._beside(x) if isinstance(x, np.ndarray) else x for key, x in lists.items()
        }


def index_lists(case):
    """Of the mask of a case, what forward and backward are both given.

    Returns
    -------
    dict
        ``q2k_block_index``, int32 (batch, heads, rows, k), increasing key blocks of each row of
        blocks, 0 where there are fewer; ``block_sparse_num``, how many each row has, or where rows
        differ ``q2k_block_nums``, int32 (batch, heads, rows); ``sparse_block_size``.

    Raises
    ------
    ValueError
        If a block is attended in part.
    """
    (in_part, _), (counts, columns) = block_lists(case.mask, case.tile)
    if in_part.any():
        raise ValueError("masks of whole blocks of 64 or 128 alone")
    batch, _, heads, _ = case.shape
    most = max(int(counts.max(initial=0)), 1)
    found = {"q2k_block_index": _planes(columns[:, :most], batch, heads)}
    if (counts == most).all():
        found["block_sparse_num"] = most
    else:
        found["q2k_block_nums"] = _planes(counts, batch, heads)
    return found | {"sparse_block_size": case.tile}


def _planes(x, batch, heads):
    """A copy for each batch entry and head: the kernels take no strides of 0."""
    return np.tile(x, (batch, heads, *(1,) * x.ndim))
