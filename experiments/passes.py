"""The two passes that are measured, what they are compared with, and their arithmetic."""

#: Pass to the array that is checked after timing.
PASSES = {"forward": "out", "backward": "dq"}

DENSE = "dense"
BASELINE = "baseline"

_BACKWARD = 2.5


def flops(shape, density, which):
    """Attention's own: 4 · s · N² · d · heads · batch, 2.5 times that in the backward pass.

    Parameters
    ----------
    shape : (batch, seqlen, heads, head_dim)
    density : float
        Share of the scores that the mask keeps.
    which : {"forward", "backward"}
    """
    batch, n, heads, head_dim = shape
    forward = 4.0 * density * n * n * head_dim * heads * batch
    return forward * (_BACKWARD if which == "backward" else 1.0)


def live(row):
    """Algorithm 5's s of one row of results: live tiles, or blocks where no tiles are walked."""
    return row["tile_density"] if row["tile_density"] != "" else row["density"]
