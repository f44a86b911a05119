"""The maximum of a row that may have seen no score yet."""

import math

from nbflash.cuda.tile.tracing import equal, select

NEG_INF = -math.inf


def guarded(m):
    """0 for a row that has seen no score (m = −inf), so that −inf − m stays −inf."""
    return select(equal(m, NEG_INF), 0.0, m)
