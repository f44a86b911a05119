"""What the lanes of a warp find together: butterflies of shuffles, and a search.

    x' = combine(x, x of lane ^ 1)      x'' = combine(x', x' of lane ^ 2)      …

After log₂ n rounds all n lanes hold the same.
"""

import functools
import operator

from nbflash.cuda.ptx._asm import cuda, inlined
from nbflash.cuda.ptx.traced import Scalar
from nbflash.cuda.tile.tracing import maximum, shuffle_xor, unrolled
from nbflash.cuda.tile.warp_math import lanes_of
from nbflash.definitions.constants import WARP

QUAD = 4  # lanes that share the rows of a wgmma fragment


def across_lanes(values, lanes, combine, first=1):
    """``combine`` of each value over ``lanes`` lanes that are ``first`` apart, in all of them."""
    steps = [first << i for i in range(lanes.bit_length() - 1)]
    if isinstance(values[0], Scalar):

        def over_steps(x):
            return functools.reduce(lambda x, step: combine(x, shuffle_xor(x, step)), steps, x)

        return tuple(map(over_steps, values))
    for step in steps:  # the simulator moves all of them at one meeting of the warp
        values = tuple(map(combine, values, shuffle_xor(tuple(values), step)))
    return tuple(values)


@unrolled
def warp_sum(x):
    """The sum over all lanes."""
    return across_lanes((x,), WARP, operator.add)[0]


@unrolled
def warp_max(x):
    """The largest of all lanes; NaN loses."""
    return across_lanes((x,), WARP, maximum)[0]


@inlined
def first_behind(values, begin, end, bound, lane):
    """The first of the increasing ``values[begin:end]`` that is ``bound`` or more.

    All lanes call it alike. A round looks at 32 places: few rounds, because each is a wait for
    global memory.
    """
    while begin < end:
        step = (end - begin + 31) >> 5
        at = begin + lane * step
        below = cuda.popc(lanes_of(at < end and values[at] < bound))
        if below == 0:
            end = begin
        else:
            begin, end = begin + (below - 1) * step + 1, min(begin + below * step, end)
    return begin
