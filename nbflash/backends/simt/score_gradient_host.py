"""Gradients of a score's arrays on CUDA devices: the kernel with its arguments bound."""

from dataclasses import fields

from nbflash.backends.simt.configs import SimtBackwardConfig
from nbflash.backends.simt.executor import SimtExecutor
from nbflash.backends.simt.score_gradient import ScoreBackwardConfig, dscore_simt_spec
from nbflash.cuda import score_params
from nbflash.inputs import arrays
from nbflash.schedule.tile_schedule import TileSchedule


class SimtScoreBackward(SimtExecutor):
    """Those of one problem and mask; `SimtExecutor` has the parameters."""

    def __init__(self, problem, mask, score, **how):
        super().__init__(problem, mask, score=score, **how)
        parts = [part for parts in score.parts for part in parts]
        self._more = {
            "parts": score_params.part_functions(score, problem, self._device.capability),
            "axes": tuple(len(part.shape) for part in parts),
            "alone": tuple(part.alone(problem) for part in parts),
        }
        self._kernels = {}

    def _kernel(self, vectors):
        """The bound kernel for the table's walk over rows."""
        if vectors not in self._kernels:
            p, found = self._problem, self._backward_configs(True, vectors)
            if not found:
                raise self._does_not_fit("backward")
            rows = self._complete(found[0])
            given = {f.name: getattr(rows, f.name) for f in fields(SimtBackwardConfig)}
            config = ScoreBackwardConfig(**given, **self._more)
            schedule = TileSchedule.from_mask(self._mask, config.tile_m, config.tile_n)
            work = schedule.work(p.batch, p.heads)
            bound = self._bind(dscore_simt_spec(config), schedule, work, (p.scale,))
            self._kernels[vectors] = bound
        return self._kernels[vectors]

    def __call__(self, dout, q, k, v, out, lse, dlse, sums, seed=None):
        """Write every array of ``sums``, which are contiguous."""
        kernel = self._kernel(self._vectors_with(dout))
        lse, delta = self._statistics(dout, out, lse, dlse)
        for total in sums:
            total.fill(0)
        strides = *self._qkv_strides, arrays.strides(dout)
        places = self._device.places(sums)
        tensors = q, k, v, dout, lse, delta
        kernel(self._device.words(tensors, *strides, self._state(seed), places))
