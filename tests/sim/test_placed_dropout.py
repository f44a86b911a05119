"""Dropout in a part of a sequence drops what it does in the whole one."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import sm80_runs
from placed_runs import check
from simt_runs import Geometry
from sm90_runs import ALONE, HALVES

from nbflash.backends.sm90.executor import Sm90Executor
from nbflash.cuda.tile.dropout import PLACED


@pytest.mark.parametrize("deterministic", [False, True])
def test_simt(deterministic):
    geometry = Geometry(tx=4, ty=4, rm=8, rn=8)
    check(geometry.executor_of, np.float32, 8, deterministic)


@pytest.mark.parametrize("m_tiles", [1, 2])
def test_sm80(m_tiles):
    """In one pass, and in two."""
    geometry = sm80_runs.Geometry(warps=2, m_tiles=m_tiles, width=96)
    check(geometry.executor_of, np.float16, 16, deterministic=m_tiles == 2)


FORWARD = {"three": replace(ALONE, tile_n=96), "halves": HALVES}


@pytest.mark.parametrize("form", FORWARD)
def test_sm90(form):
    """Groups of keys of which one has no neighbour, and halves of a tile."""
    config = replace(FORWARD[form], dtype="bfloat16", dropout=PLACED)

    def executor_of(spec):
        return Sm90Executor(spec, config=config)

    check(executor_of, ml_dtypes.bfloat16, 16)
