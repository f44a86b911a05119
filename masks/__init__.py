"""Attention masks: what each query may attend to, and the tiles that kernels need.

Generators return an immutable `Mask`; combine them with ``|``, ``&``, ``^``, ``-``, ``~``; ask
``.tiles()``, ``.stats()``, ``.draw()``. Only NumPy and SciPy are needed (matplotlib for
``.plot()``).
"""

from masks.base import Mask
from masks.block import from_scipy
from masks.coverage import coverage
from masks.interval import (
    block_diagonal,
    causal,
    chunked,
    dense,
    documents,
    documents_from_cu_seqlens,
    padding,
    prefix,
    window,
)
from masks.io import load, save
from masks.leaves import from_dense, from_function
from masks.patterns import (
    bigbird,
    butterfly,
    fixed,
    global_local,
    local,
    random,
    strided,
    toeplitz,
)
from masks.planes import per_batch, per_head
from masks.reorder import reorder
from masks.restriction import restrict
from masks.stats import MaskStats
from masks.tiles import ABSENT, BITS, FULL, INTERVAL, Tiles
from masks.token import axial, dilated, neighborhood, sinks, vertical_slash
from masks.trees import tree

__all__ = [
    "ABSENT",
    "BITS",
    "FULL",
    "INTERVAL",
    "Mask",
    "MaskStats",
    "Tiles",
    "axial",
    "bigbird",
    "block_diagonal",
    "butterfly",
    "causal",
    "chunked",
    "coverage",
    "dense",
    "dilated",
    "documents",
    "documents_from_cu_seqlens",
    "fixed",
    "from_dense",
    "from_function",
    "from_scipy",
    "global_local",
    "load",
    "local",
    "neighborhood",
    "padding",
    "per_batch",
    "per_head",
    "prefix",
    "random",
    "reorder",
    "restrict",
    "save",
    "sinks",
    "strided",
    "toeplitz",
    "tree",
    "vertical_slash",
    "window",
]
