"""Pictures of a mask: text with block characters, or matplotlib axes."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np

from masks import _check
from masks.counting import picture_tile, shares

SHADES = ("··", "░░", "▒▒", "▓▓", "██")


def text(mask, size: SupportsIndex = 32) -> str:
    """One two-character cell per tile, at most `size` tiles along the longer side.

    ``██`` is a tile attended in full, ``▓▓ ▒▒ ░░`` in part (above 2/3, above 1/3, less), ``··`` an
    absent one. Queries run down, keys to the right.

    Notes
    -----
    See ``masks.counting.shares`` for what is counted and what sampled at a size where not every
    cell can be looked at.
    """
    size = _check.integer("size", size, 1)
    image = shares(mask, picture_tile(mask, size))
    level = np.where(image == 1, 4, np.where(image == 0, 0, 1 + (image * 3).astype(int)))
    return "\n".join("".join(SHADES[cell] for cell in row) for row in level)


def plot(mask, ax: Any = None, tile: SupportsIndex | None = None) -> Any:
    """Draw the share of attended cells per tile on matplotlib axes and return them.

    Parameters
    ----------
    ax : matplotlib.axes.Axes, optional
        Axes to draw on; new ones otherwise.
    tile : int, optional
        Tile size; by default the smallest that gives at most 256 tiles along the longer side.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Mask.plot needs matplotlib: pip install matplotlib") from error
    if tile is None:
        tile = picture_tile(mask, 256)
    tile = _check.integer("tile", tile, 1)
    ax = plt.subplots()[1] if ax is None else ax
    nq, nk = mask.shape
    image = shares(mask, tile)
    extent = (0, image.shape[1] * tile, image.shape[0] * tile, 0)
    ax.imshow(image, cmap="Blues", vmin=0, vmax=1, extent=extent, interpolation="nearest")
    ax.set(xlabel="key", ylabel="query", xlim=(0, max(nk, 1)), ylim=(max(nq, 1), 0))
    return ax
