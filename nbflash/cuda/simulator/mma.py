"""mma in the simulator: fragments as :mod:`nbflash.cuda.ptx.mma` says, sums in float32."""

import functools

import numpy as np

from nbflash.cuda.simulator.warp import over_lanes
from nbflash.cuda.simulator.wgmma import floats


@functools.cache
def _product(dtype):
    def mma(*words):
        """Of the words of a, of b, and the numbers of c, over the lanes."""
        a, b = (np.array(x).astype(np.int64) for x in (words[:4], words[4:6]))
        c = np.array(words[6:])
        # word (i', i), row, quad, one of two  →  row, column
        a = a.astype(np.uint32).T.copy().view(np.uint16).reshape(8, 4, 2, 2, 2)
        a = a.transpose(3, 0, 2, 1, 4).reshape(16, 16)
        b = b.astype(np.uint32).T.copy().view(np.uint16).reshape(8, 4, 2, 2)
        b = b.transpose(2, 1, 3, 0).reshape(16, 8)
        c = c.T.reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
        with np.errstate(all="ignore"):
            d = floats(a, dtype) @ floats(b, dtype) + c
        return tuple(d.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4).T)

    return over_lanes(mma)


def mma(dtype, c, a, b):
    """``mma.sync``: all lanes of the warp must take part."""
    return _product(dtype)(*a, *b, *c)
