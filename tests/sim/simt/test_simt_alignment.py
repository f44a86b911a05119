"""Vector accesses are aligned, and the simulator would say so if they were not."""

import numpy as np
import pytest
from simt_runs import Geometry, run

from nbflash.cuda import simulator as sim
from nbflash.testing import make_qkv, mask_gallery


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "dout"])
def test_rows_that_are_no_whole_vectors_apart_are_caught(which):
    inputs = list(make_qkv(1, 9, 9, 1, 1, 8))
    inputs[which] = np.pad(inputs[which], ((0, 0), (0, 0), (0, 0), (0, 1)))[..., :8]
    with pytest.raises(sim.OutOfBounds, match="not aligned to a vector of 4"):
        run(Geometry(vectors=True), mask_gallery(9)["dense"], *inputs)


@pytest.mark.parametrize("geometry", [Geometry(), Geometry(vectors=True, vector_red=True)], ids=str)
def test_rows_of_whole_vectors_are_not(geometry):
    inputs = [np.pad(x, ((0, 0),) * 3 + ((0, 4),))[..., :8] for x in make_qkv(1, 9, 9, 1, 1, 8)]
    out, *_ = run(geometry, mask_gallery(9)["dense"], *inputs)
    assert np.isfinite(out).all()
