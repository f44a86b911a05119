"""Exact block-sparse FlashAttention, forward and backward, on CuPy and NumPy arrays."""

__version__ = "0.2.0"

import nbflash.definitions.shadowing  # noqa: F401 - before all that imports masks
from nbflash import scores, selection
from nbflash.api import attention, attention_backward, plan, score_backward, why_not
from nbflash.decoding import decode, why_not_decode
from nbflash.environment import show_config
from nbflash.inputs.block_map import BlockMap
from nbflash.kv_cache import KVCache
from nbflash.merging import merge, merge_backward, merge_sink, merge_sink_backward
from nbflash.planning.cache import cache_info, clear_cache, set_cache_limit
from nbflash.planning.plan import AttentionPlan
from nbflash.schedule.tile_schedule import TileSchedule
from nbflash.warming import warm

__all__ = [
    "AttentionPlan",
    "BlockMap",
    "KVCache",
    "TileSchedule",
    "attention",
    "attention_backward",
    "cache_info",
    "clear_cache",
    "decode",
    "merge",
    "merge_backward",
    "merge_sink",
    "merge_sink_backward",
    "plan",
    "score_backward",
    "scores",
    "selection",
    "set_cache_limit",
    "show_config",
    "warm",
    "why_not",
    "why_not_decode",
]
