"""The Hopper backward without atomics: statistics, a pass over rows for dQ, one over columns."""

from functools import cached_property, lru_cache

import numpy as np

from nbflash import launch, tensor_map
from nbflash.constants import LOG2_E
from nbflash.kernels.bwd_sm90_dq import bwd_sm90_dq_spec
from nbflash.kernels.bwd_sm90_dq_config import ROWS, dq_config
from nbflash.kernels.bwd_sm90_rows import RowsConfig, statistics_sm90_spec
from nbflash.kernels.sm90_config import PANEL
from nbflash.persistent import row_tables
from nbflash.schedule import TileSchedule


def rows_config(dtype, head_dim, tile_m):
    """The configuration of the statistics, laid out by query tiles of ``tile_m``."""
    return RowsConfig(dtype, head_dim, tile_m, -(-head_dim // PANEL), clears=False)
