"""Parts of an attention merged, or added, by one kernel: what `nbflash.merging` and ranks call."""
