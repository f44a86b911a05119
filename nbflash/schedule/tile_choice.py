"""Which size of tile a mask asks for: the mask is not tiled for the others."""


def fastest(configs, mask, masked=1, row_cost=0, by_columns=False):
    """The configuration whose tiles take the least time.

    Parameters
    ----------
    configs : list
        Of attributes ``tile_m``, ``tile_n`` and ``speed``, scores a second, by any unit. The first
        of equals is chosen.
    mask : masks.Mask or nbflash.inputs.block_layout.BlockLayout
    masked : float
        How many full tiles take as long as one with a mask.
    row_cost : int
        Prologue and epilogue of a block, which has one row of tiles, as so many scores.
    by_columns : bool
        A block has a column of tiles, ``tile_n`` keys, instead of a row.
    """

    def time(config):
        live, full = mask.live_tiles(config.tile_m, config.tile_n)
        tiles = full + masked * (live - full)
        size, own = (mask.shape[1], config.tile_n) if by_columns else (mask.shape[0], config.tile_m)
        rows = len(mask.planes) * -(-size // own)
        return tiles * config.tile_m * config.tile_n / config.speed + row_cost * rows

    return configs[0] if len(configs) == 1 else min(configs, key=time)
