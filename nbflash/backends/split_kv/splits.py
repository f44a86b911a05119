"""How the keys of a decode are shared out among blocks, whichever kernel reads them."""

from __future__ import annotations

import numpy as np

from nbflash.inputs.arrays import strides
from nbflash.schedule.tile_schedule import TileSchedule

_FEW_TILES = 2  # of a split, at least
_MOST_SPLITS = 256
# Of a block, in tiles: 3.5 by 5 sequences of 16384 keys on an H100, bfloat16 and int8 of 128
# columns; for the kernel without tensor cores it is a guess.
_BEGIN_AND_END = 4
_NEAR_BEST = 1.05


def most_splits(tiles: int) -> int:
    """How many splits so many tiles may be cut into."""
    return min(max(tiles // _FEW_TILES, 1), _MOST_SPLITS)


def splits_for(items: int, tiles: int, slots: int) -> int:
    """How many splits the keys are cut into: as in FlashDecoding, by the time of whole waves.

    ``items · splits`` blocks run in waves of ``slots``, of which the last is as long as a full one.
    A wave takes the time of a block's tiles, of its beginning and of its end. The fewest splits
    within 5 % of the shortest time: each is another partial result to write and read.

    Parameters
    ----------
    items : int
        Blocks without splits.
    tiles : int
        Tiles of the longest item. A split has ``_FEW_TILES`` or more of them.
    slots : int
        Blocks that the device runs at once.
    """
    more = range(2, most_splits(tiles) + 1)
    counts = [1, *(n for n in more if -(-tiles // n) < -(-tiles // (n - 1)))]
    waves = {n: -(-items * n // slots) for n in counts}
    times = {n: w * (-(-tiles // n) + _BEGIN_AND_END) for n, w in waves.items()}
    enough = _NEAR_BEST * min(times.values())
    return next(n for n, time in times.items() if time <= enough)


def heads_together(p, mask):
    """How many query heads have keys and a mask in common: those of a KV group, or 1."""
    group = p.heads // p.heads_kv
    if mask is None:
        return group
    planes = np.broadcast_to(mask.plane_index, (p.batch, p.heads)).reshape(-1, group)
    return group if (planes == planes[:, :1]).all() else 1


def tiles_in_window(p, mask, tokens, tile_n):
    """The most tiles that the windows of so many tokens in a row touch."""
    left, right = p.window_within(mask)
    keys = left + min(tokens + right, p.nq)  # there are none behind the last token's
    return (keys + tile_n - 2) // tile_n + 1


def walk(p, mask, tile_m, tile_n, pack):
    """Query tiles, the tiles of the longest row, and the schedule as the kernels take it.

    Its planes belong to batch and row of ``pack`` heads.
    """
    most = tiles_in_window(p, mask, min(tile_m, p.nq), tile_n)
    if mask is None:
        nothing = [np.zeros(1, np.int32)] * 6 + [np.zeros(1, np.uint32)]
        return -(-p.nq // tile_m), min(-(-p.capacity // tile_n), most), nothing
    s = TileSchedule.from_mask(mask, tile_m, tile_n)
    planes = s.plane_of(p.batch, p.heads)[::pack]
    tables = [planes, s.row_ptr, s.col_idx, s.kind, s.lo, s.hi, s.bits]
    return s.n_row, min(int(np.diff(s.row_ptr).max(initial=0)), most), tables


def scale_strides(x):
    """(page, token, head) of scales, or of none; those of heads are the same for all tokens."""
    if x is None:
        return 0, 0, 0
    return strides(x) if x.ndim == 3 else (0, 0, 1)
