"""Results against plain float64 ones, within budgets that come of plain low-precision runs.

The error of few rows is large or next to nothing as it happens. So there are several runs, with
keys in other orders among others that nobody attends, and of every element the error that counts
is the largest: `decode_cases.expected` does so, too.
"""

import numpy as np

from nbflash.testing import assert_within_reference

PRECISIONS = np.float32, np.float64
VALUES = 64  # how many rows the runs have together, at least


def runs_for(rows):
    return 1 + VALUES // max(rows, 1)


def furthest(exact, draws):
    """Of every element the draw that is furthest away, in the dtype of the first."""
    with np.errstate(over="ignore"):
        draws = np.stack([np.asarray(x, draws[0].dtype) for x in draws])
    with np.errstate(invalid="ignore"):  # of infinities that are equal
        error = np.nan_to_num(abs(draws.astype(np.float64) - exact))
    return np.take_along_axis(draws, error.argmax(axis=0)[None], axis=0)[0]


def check_yardstick(name, exact, narrow, wide):
    """Raise unless a plain run comes near the exact result as its precision grows.

    Plain runs share scores with nbflash: a fault of theirs must not become a budget.
    """
    finite = np.isfinite(exact)
    sizes = (np.asarray(x, np.float64)[finite] - exact[finite] for x in (narrow, wide))
    error, left = (np.max(abs(x), initial=0.0) for x in sizes)
    rounding = np.finfo(np.float32).eps * np.max(abs(exact[finite]), initial=0.0)
    assert left <= max(error / 2, rounding), f"{name}: the yardstick is {left:.3e} off in float64"


def check(name, got, exact, draws, factor=2):
    assert_within_reference(got, exact, furthest(exact, draws), name, factor)
