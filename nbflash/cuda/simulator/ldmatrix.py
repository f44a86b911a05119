"""ldmatrix in the simulator: see :mod:`nbflash.cuda.ptx.ldmatrix`."""

import functools

import numpy as np

from nbflash.cuda.simulator.engine import WARP, current
from nbflash.cuda.simulator.errors import SimError
from nbflash.cuda.simulator.memory import wrap
from nbflash.cuda.simulator.warp import warp_collective
from nbflash.cuda.simulator.window import CHUNK, place


@functools.cache
def _exchange(count, transposed):
    def ldmatrix(values, mask):
        """The words of every lane, of the rows that the first lanes have read."""
        if len(values) < WARP:
            raise SimError(f"ldmatrix needs all {WARP} lanes, got {len(values)}")
        rows = np.array([values[lane] for lane in range(8 * count)], np.uint16)
        matrices = rows.reshape(count, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 2, 1)
        words = np.ascontiguousarray(matrices).view(np.uint32).reshape(count, WARP)
        return {lane: tuple(words[:, lane]) for lane in range(WARP)}

    return ldmatrix


def ldmatrix(address, count, transposed):
    """``ldmatrix.x{count}``: the first 8 · count lanes read a row each, all get their words."""
    row, lane = None, current().tid % WARP
    if lane < 8 * count:
        if address % CHUNK:
            raise SimError(f"ldmatrix: address {int(address)} is not a multiple of {CHUNK}")
        raw, home = current().block.shared.dynamic
        first = place(address, CHUNK, "ldmatrix")
        row = wrap(raw[first : first + CHUNK].view(np.uint16), home).vector(0, 8)
    return warp_collective(_exchange(count, bool(transposed)), row)
