"""The Hopper backward of one problem and mask: its tables, and its kernels with arguments bound."""

from functools import cached_property, lru_cache

import numpy as np

from masks import FULL
from nbflash import launch, tensor_map
from nbflash.constants import LOG2_E
from nbflash.kernels.bwd_sm90 import bwd_sm90_spec
from nbflash.kernels.bwd_sm90_config import MOST_HEAD_DIM, backward_config
from nbflash.kernels.bwd_sm90_rows import RowsConfig, round_sm90_spec, statistics_sm90_spec
from nbflash.schedule import TileSchedule


def tables(schedule, batch, heads, group):
    """What the kernel walks: work, planes, the transposed schedule, bounds by query tiles.

    Parameters
    ----------
    schedule : TileSchedule
        Transposed.
    batch, heads, group : int

    Returns
    -------
    arrays : tuple
        int32, but the last, the bit tiles, uint32.
    live : int
        Items of the work list that have tiles.
    """
    s = schedule
    plane_of, work = s.plane_of(batch, heads), s.work(batch, heads, group)
    lengths = np.diff(s.row_ptr)
    hidden = np.concatenate([[0], np.cumsum(s.kind != FULL)])[s.row_ptr]
    per_item = [
        count.reshape(s.planes, s.n_row)[plane_of].reshape(-1, group, s.n_row).sum(axis=1)
        for count in (lengths, np.diff(hidden))
    ]
    length, masked = (count[work[:, 1], work[:, 0]] for count in per_item)
    n_block, head = work.T
    work = np.stack([n_block, *np.divmod(head, heads // group), masked > 0], 1).astype(np.int32)
    bounds = np.zeros((s.planes, 2, s.n_col * s.tile_m), np.int32)
    bounds[:, 0, : s.nq] = s.lo.reshape(s.planes, s.nq)
    bounds[:, 1, : s.nq] = s.hi.reshape(s.planes, s.nq)
    bounds = bounds.reshape(s.planes, 2, s.n_col, s.tile_m).transpose(0, 2, 1, 3)
    arrays = work, plane_of, s.row_ptr, s.col_idx, s.kind, bounds, s.bits
    return tuple(np.ascontiguousarray(x).ravel() for x in arrays), int(np.count_nonzero(length))


def rows_config(cfg):
    """The configuration of the kernels around the main one."""
    return RowsConfig(cfg.dtype, cfg.head_dim, cfg.tile_m, cfg.panels)
