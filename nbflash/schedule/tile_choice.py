"""Which size of tile a mask asks for: the mask is not tiled for the others."""


def fastest(configs, mask, masked=1, of_a_row=0, by_columns=False):
    """The configuration whose tiles take the least time.

    Parameters
    ----------
    configs : list
        Of attributes ``tile_m``, ``tile_n`` and ``speed``, scores a second, by any unit. The first
        of equals is chosen.
    mask : masks.Mask or nbflash.inputs.block_layout.BlockLayout
    masked : int
        How many full tiles take as long as one with a mask.
    of_a_row : int
        Scores that take as long as what a row of tiles begins and ends with.
    by_columns : bool
        Rows are those of ``tile_n`` keys.
    """

    def time(config):
        live, full = mask.live_tiles(config.tile_m, config.tile_n)
        tiles = full + masked * (live - full)
        size, own = (mask.shape[1], config.tile_n) if by_columns else (mask.shape[0], config.tile_m)
        rows = len(mask.planes) * -(-size // own)
        return tiles * config.tile_m * config.tile_n / config.speed + of_a_row * rows

    return configs[0] if len(configs) == 1 else min(configs, key=time)
