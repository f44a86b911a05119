"""What ncu watches: one forward and backward pass of the left panel of `figure2`.

ncu … python -m experiments.commands.paper.figure2_pass full nbflash
"""

import sys

import numpy as np

from experiments.commands.paper.figure2 import SIZES, STANDARD
from experiments.harness.grid import dense_case
from experiments.harness.inputs import random_inputs
from experiments.harness.setup import set_up
from experiments.libraries.dense import DenseBaseline
from experiments.libraries.nbflash import Nbflash


def main(section, name):
    """Run it once to compile what it needs, then once between the marks of the profiler."""
    from cupy.cuda import Device, profiler

    setup = set_up("paper-figure2", section, "cuda")
    shape = tuple(setup.settings["left"][key] for key in SIZES)
    arrays = random_inputs(setup.backend.xp, shape, setup.settings["dtype"], 0)
    if name == STANDARD:
        keep = setup.backend.array(np.ones((shape[1], shape[1]), bool))
        call = DenseBaseline(setup.backend, *arrays, keep).both
    else:
        call = Nbflash(*arrays[:3]).both(dense_case(shape), arrays[3])
    call()
    Device().synchronize()
    profiler.start()
    call()
    Device().synchronize()
    profiler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
