"""Products of a warpgroup, and what is done with their fragments: wgmma."""
