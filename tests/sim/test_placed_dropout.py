"""Dropout in a part of a sequence drops what it does in the whole one.

`families/placed_dropout.py` has the other cases: planted faults pass through them.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
from placed_runs import check
from simt_runs import Geometry
from sm90_runs import HALVES

from nbflash.backends.simt.executor import SimtExecutor
from nbflash.backends.sm90.executor import Sm90Executor
from nbflash.cuda.tile.dropout import PLACED


def test_simt_in_two_passes():
    geometry = Geometry(tx=4, ty=4, rm=8, rn=8)
    check(geometry.executor_of, np.float32, 8, deterministic=True)


def test_simt_in_tiles_of_two_blocks():
    """Those of the table: keys 64 behind each other are not so in the sequence."""
    check(SimtExecutor, np.float32, 8)


def test_halves_of_a_tile():
    config = replace(HALVES, dtype="bfloat16", dropout=PLACED)

    def executor_of(spec):
        return Sm90Executor(spec, config=config)

    check(executor_of, ml_dtypes.bfloat16, 16)
