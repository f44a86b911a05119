"""The first kernel of decode by mma, bound to a problem, a mask and a layout."""

from __future__ import annotations

import numpy as np

from nbflash.backends.sm80.decode.config import KEYS, ROWS, decode_config
from nbflash.backends.sm80.decode.kernel import decode_sm80_spec
from nbflash.backends.split_kv.part import TOKENS
from nbflash.backends.split_kv.splits import heads_together, splits_for, walk
from nbflash.definitions.constants import LEAST_SCALE, LOG2_E
from nbflash.inputs import arrays

ALIGNMENT = 16  # bytes, of the rows of q and of the caches


def why_not(problem, q, cache) -> list[str]:
    """Reasons why this kernel cannot run a problem in its layout; empty when it can."""
    p = problem
    if p.dtype not in ("float16", "bfloat16"):
        return [f"needs float16 or bfloat16, got {p.dtype}"]
    reasons = []
    if p.cache_dtype != p.dtype:
        reasons.append(f"needs caches of {p.dtype}, got {p.cache_dtype}")
    if p.head_dim % 8 or p.head_dim > 256:
        reasons.append(f"needs a head_dim of 8, 16, ... 256, got {p.head_dim}")
    if p.page_size is not None and p.page_size % KEYS:
        reasons.append(f"needs pages of a multiple of {KEYS} keys, got {p.page_size}")
    least = min(map(arrays.alignment, (q, cache.k_cache, cache.v_cache)))
    if least < ALIGNMENT and p.device == arrays.CUDA:
        reasons.append(f"needs addresses and strides that are multiples of 16 bytes, got {least}")
    return reasons


class Sm80Partial:
    """As `nbflash.backends.simt.decode_host.SimtPartial` is, with tensor cores and cp.async.

    Parameters
    ----------
    device, problem, mask, q, cache
        As of `SimtPartial`.
    config : DecodeSm80Config, optional
        Instead of the table's row.
    splits : int, optional
        Instead of what the rule gives.
    """

    counted = 0  # row tiles: see `nbflash.backends.sm90.decode.host.Sm90Partial`

    def __init__(self, device, problem, mask, q, cache, *, config=None, splits=None):
        p, pack = problem, heads_together(problem, mask)
        cfg = config or self.config_for(device, p, mask)
        _, tiles, tables = walk(p, mask, TOKENS, cfg.tile_n, pack)
        items = p.batch * (p.heads // pack) * -(-p.nq * pack // ROWS)
        slots = device.multiprocessors * cfg.min_blocks
        self.splits = splits or splits_for(items, tiles, slots)
        table, group = cache.block_table, p.heads // p.heads_kv
        paging = (0, 0) if table is None else (table.strides[0] // table.itemsize, p.page_size)
        sizes = *paging, p.capacity, p.batch, p.nq, p.heads, pack, group, self.splits
        strides = map(arrays.strides, (q, cache.k_cache, cache.v_cache))
        constants = *strides, *sizes, max(abs(p.scale) * LOG2_E, LEAST_SCALE)
        self._run = device.bind(decode_sm80_spec(cfg), items * self.splits, constants, tables)
        self._words = device.words
        (self._no_table,) = device.resident((np.zeros(1, np.int32),))

    @staticmethod
    def config_for(device, p, mask):
        """The geometry for a problem."""
        known = {"masked": mask is not None, "negate": p.scale < 0}
        return decode_config(p.dtype, p.head_dim, smem_limit=device.smem_limit, **known)

    def __call__(self, q, cache, part_o, part_lse):
        """Write ``part_o`` and ``part_lse``."""
        k, v, lengths, table, _, _ = cache
        table = self._no_table if table is None else table
        self._run(self._words((q, k, v, lengths, table, part_o, part_lse)))
