"""What a mainloop of the Hopper forward is: the work that a consumer warpgroup does on a tile."""

from collections.abc import Callable
from typing import NamedTuple


class Mainloop(NamedTuple):
    """The parts of a mainloop, which :mod:`.consumer` calls.

        q_of(smem, place, stage, warpgroup, thread)   Q as its products take it
        start(base, q, warpgroup)                     the state before the first tile
        make_step(masked, first)                      one tile; one form per kind of tile
        last(state, v_prior, warpgroup)               the last product: O, m, l

    ``step(state, q, now, prior, tile, keep, ending, smem, place, scoring, ids)`` takes

        q         Q, its stage and phase
        now       stage and phase of the tile's K, and of its V
        prior     V of the tile before, and its stage
        tile      kind, and where it is: first key, row tile, batch and head
        keep      which of a thread's scores count, a word for each of its rows
        ending    of a row's first tile: the row that ends with the tile before
        scoring   what score functions, recovery and dropout go by
        ids       thread, thread of the warpgroup, warpgroup

    and returns the state, the descriptor of the next tile, and q of that.
    """

    q_of: Callable
    start: Callable
    make_step: Callable
    last: Callable
