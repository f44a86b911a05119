"""The CPU implementation of one `AttentionSpec`."""

from contextlib import contextmanager
from functools import cached_property

import numpy as np

from nbflash.backends.cpu import passes
from nbflash.backends.cpu.dropout import Drop
from nbflash.backends.cpu.score import prepare
from nbflash.backends.cpu.score_gradient import prepare_gradient
from nbflash.backends.cpu.sizes import tile_sizes
from nbflash.schedule.tile_schedule import TileSchedule


class CpuExecutor:
    """The passes over one schedule; always deterministic."""

    two_passes = None

    def __init__(self, spec):
        self._spec, self._scale = spec, spec.problem.scale
        tiles = tile_sizes(spec.problem.head_dim, spec.mask)
        self.schedule = TileSchedule.from_mask(spec.mask, *tiles)
        self._real = np.dtype(spec.problem.lse_dtype).type
        self._score = prepare(spec.score, self.schedule.nq, self.schedule.nk, self._real)

    def _drop(self, seed):
        return Drop(self._spec.dropout, seed, self._spec.positions)

    @contextmanager
    def _named(self):
        """What a function of a score raises has its file and line as a note."""
        try:
            yield
        except Exception as error:
            if self._spec.score is not None:
                error.add_note(f"score: {self._spec.score}")
            raise

    def forward(self, q, k, v, out, lse, seed=(0, 0)):
        how = self.schedule, self._scale, self._score, self._drop(seed)
        with self._named():
            passes.forward(q, k, v, out, lse, *how)

    def backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, seed=(0, 0)):
        how = self.schedule, self._scale, self._score, self._drop(seed)
        with self._named():
            passes.backward(dout, q, k, v, out, lse, dlse, dq, dk, dv, *how)

    @cached_property
    def _gradient(self):
        return prepare_gradient(self._spec.score, self._spec.problem)

    def score_backward(self, dout, q, k, v, out, lse, dlse, sums, seed=(0, 0)):
        how = self.schedule, self._scale, self._gradient, self._drop(seed)
        with self._named():
            passes.score_backward(dout, q, k, v, out, lse, dlse, sums, *how)
