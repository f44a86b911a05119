"""Which size of tile a mask asks for: the mask is not tiled for the others."""


def fastest(configs, mask, masked=1):
    """The configuration whose tiles take the least time.

    Parameters
    ----------
    configs : list
        Of attributes ``tile_m``, ``tile_n`` and ``speed``, scores a second, by any unit. The first
        of equals is chosen.
    mask : masks.Mask or nbflash.inputs.block_layout.BlockLayout
    masked : int
        How many full tiles take as long as one with a mask.
    """

    def time(config):
        live, full = mask.live_tiles(config.tile_m, config.tile_n)
        tiles = full + masked * (live - full)
        return tiles * config.tile_m * config.tile_n / config.speed

    return configs[0] if len(configs) == 1 else min(configs, key=time)
