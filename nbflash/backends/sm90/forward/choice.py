"""Which configuration of the Hopper forward a mask asks for."""

from dataclasses import replace

from nbflash.schedule.tile_choice import fastest

MASKED = 2  # full tiles that take as long as a masked one: 1.8 to 2.6


def choose(configs, mask, tiled):
    """The pair of configuration and schedule that takes the least time; without masks if it can be.

    The mask is tiled for one configuration alone: the others are judged by numbers of tiles.

    Parameters
    ----------
    configs : list of Sm90Config
    mask : masks.Mask
    tiled : callable
        ``tiled(config)`` is the mask's `TileSchedule` for its tiles.
    """
    config = fastest(configs, mask, MASKED)
    schedule = tiled(config)
    # By halves 0 to 4 % faster; whole tiles at d=128 up to 3 % where rows are short, and 2 to 5 %
    # slower where they are long (NVIDIA H100 80GB HBM3, 2026-11-22).
    return replace(config, full_tiles=config.halves and schedule.full_tiles), schedule
