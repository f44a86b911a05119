"""The passes that are measured, what they are compared with, and their arithmetic."""

FORWARD, BACKWARD, BOTH = "forward", "backward", "both"

#: Pass to the array that is checked after timing. `BOTH` is one after the other, timed as one call.
PASSES = {FORWARD: "out", BACKWARD: "dq", BOTH: "dq"}

NBFLASH = "nbflash"
DENSE = "dense"
BASELINE = "baseline"

_WORK = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}


def flops(shape, density, which):
    """Attention's own: 4 · s · N² · d · heads · batch forward, 2.5 times that backward.

    Parameters
    ----------
    shape : (batch, seqlen, heads, head_dim)
    density : float
        Share of the scores that the mask keeps.
    which : {"forward", "backward", "both"}
    """
    batch, n, heads, head_dim = shape
    return _WORK[which] * 4.0 * density * n * n * head_dim * heads * batch


def over_base(rows, column, base, same):
    """The time of each row over that of the base; None without one.

    Parameters
    ----------
    rows : list of dict
    column, base : str
        The base is the row with this value in that column.
    same : tuple of str
        Columns in which a row and its base agree.
    """

    def key(row):
        return tuple(row[name] for name in same)

    of = {key(row): row["median_ms"] for row in rows if row[column] == base}
    return [row["median_ms"] / of[key(row)] if key(row) in of else None for row in rows]


def live(row):
    """Algorithm 5's s of one row of results: live tiles, or blocks where no tiles are walked."""
    return row["tile_density"] if row["tile_density"] != "" else row["density"]
