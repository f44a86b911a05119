"""Plans of block maps, made on the device by kernels: `nbflash.schedule.block_tiles` says what."""
