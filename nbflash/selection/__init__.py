"""Which blocks to attend to, from q and k: sparse attention that is chosen at run time.

::

    chosen = selection.mean_pooled(q, k, topk=26, causal=True)
    out = nbflash.attention(q, k, v, chosen)
    selection.coverage(q, k, chosen)  # the share of the attention that is kept

Each function takes NumPy or CuPy arrays, (batch, seqlen, heads, head_dim), and returns a
`nbflash.BlockMap` in the same memory. The host does not wait for the device. The results on NumPy
arrays are the specification. There is no gradient: the choice of blocks is not differentiable.
"""

from nbflash.selection.compressed_keys import compressed
from nbflash.selection.diagonal_sums import antidiagonal
from nbflash.selection.kept_share import coverage
from nbflash.selection.last_queries import vertical_slash
from nbflash.selection.pooled import cumulative, mean_pooled

__all__ = [
    "antidiagonal",
    "compressed",
    "coverage",
    "cumulative",
    "mean_pooled",
    "vertical_slash",
]
