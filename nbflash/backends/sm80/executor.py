"""The portable tensor-core implementation: which kernels a problem needs, with arguments bound."""

from dataclasses import replace
from functools import cached_property

import numpy as np

from nbflash.backends.simt.executor import device_of
from nbflash.backends.sm80.config import forward_config
from nbflash.backends.sm80.forward import fwd_sm80_spec
from nbflash.cuda import score_params
from nbflash.cuda.ptx._asm import SIM
from nbflash.cuda.tile.wgmma.dropout import dropping_of
from nbflash.definitions.constants import LEAST_SCALE, LOG2_E
from nbflash.inputs import arrays
from nbflash.schedule.tile_schedule import TileSchedule


class Sm80Executor:
    """Forward and backward of one problem and mask on one device (or in the simulator).

    Parameters
    ----------
    problem : nbflash.inputs.problem.Problem
    mask : masks.Mask
    config : Sm80Config, optional
        Instead of the forward table's row.
    score : nbflash.scores.Score, optional
    dropout : float
    """

    two_passes = None

    def __init__(self, problem, mask, *, config=None, score=None, dropout=0.0):
        self._problem, self._mask = problem, mask
        self._device = device_of(problem.device_id)
        self._score, params = score_params.prepare(score, problem, self._device.capability)
        self._params = self._device.params(params)
        self._dropping = dropping_of(dropout)
        self._config = config or forward_config(
            problem.dtype, problem.head_dim, smem_limit=self._device.smem_limit
        )
        self.schedule = TileSchedule.from_mask(mask, self._config.tile_m, self._config.tile_n)
        self._qkv_strides = tuple(three[:3] for three in problem.strides)

    def _complete(self, config):
        """A row of a table with what this problem asks for besides."""
        return replace(config, score=self._score, dropout=bool(self._dropping))

    def _state(self, seed):
        """The kernels' argument of that name."""
        return self._device.state(seed) if self._dropping else ()

    @property
    def _factor(self):
        """What scores are multiplied with: they are in base 2, a score function's are natural."""
        return abs(self._problem.scale) * (1.0 if self._score else LOG2_E)

    def _bind(self, spec, schedule, work, scales):
        p, s = self._problem, schedule
        tables = work, s.plane_of(p.batch, p.heads), s.row_ptr, s.col_idx, s.kind, s.lo, s.hi, s.bits
        constants = p.nq, p.nk, p.heads, p.group, s.n_row, *scales
        return self._device.bind(spec, len(work), constants, tables, (self._params, self._dropping))

    @cached_property
    def _forward(self):
        p = self._problem
        work = self.schedule.work(p.batch, p.heads)
        config = replace(
            self._complete(self._config), negate=p.scale < 0, full_tiles=self.schedule.full_tiles
        )
        scale = max(self._factor, LEAST_SCALE)
        return self._bind(fwd_sm80_spec(config), self.schedule, work, (scale,))

    def forward(self, q, k, v, out, lse, seed=None):
        """Write ``out`` and ``lse``."""
        strides = *self._qkv_strides, arrays.strides(out)
        tensors = *map(_bits, (q, k, v)), _words(out), lse
        self._forward(tensors, strides, self._state(seed))


def _bits(x):
    """An array as its kernel has it: 16 bits an element, of any type."""
    return x.view(np.uint16) if SIM else x


def _words(x):
    """And as words of two elements."""
    return x.view(np.uint32) if SIM else x
