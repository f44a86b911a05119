"""Gradients of a score's arrays on CUDA devices: the kernel with its arguments bound."""

from dataclasses import fields

from nbflash.backends.simt.configs import SimtBackwardConfig
from nbflash.backends.simt.executor import SimtLaunches
from nbflash.backends.simt.score_gradient import ScoreBackwardConfig, dscore_simt_spec
from nbflash.cuda import score_params
from nbflash.inputs import arrays


class SimtScoreBackward:
    """Those of one `AttentionSpec`; ``backward`` as of `SimtLaunches`."""

    def __init__(self, spec, *, backward=None):
        self._launches = launches = SimtLaunches(spec, backward)
        parts = [part for parts in spec.score.parts for part in parts]
        problem, capability = spec.problem, launches.device.capability
        self._of_parts = {
            "parts": score_params.part_functions(spec.score, problem, capability),
            "axes": tuple(len(part.shape) for part in parts),
            "alone": tuple(part.alone(problem) for part in parts),
        }
        self._kernels = {}

    def _kernel(self, vectors):
        """The bound kernel for the table's walk over rows."""
        if vectors not in self._kernels:
            shared = self._launches
            rows = shared.complete(shared.backward_configs(True, vectors)[0])
            common = {f.name: getattr(rows, f.name) for f in fields(SimtBackwardConfig)}
            config = ScoreBackwardConfig(**common, **self._of_parts)
            spec, schedule = dscore_simt_spec(config), shared.schedule_of(config)
            self._kernels[vectors] = shared.bind(spec, schedule, (shared.problem.scale,))
        return self._kernels[vectors]

    def __call__(self, dout, q, k, v, out, lse, dlse, sums, seed=None, lists=()):
        """Write every array of ``sums``, which are contiguous."""
        shared = self._launches
        kernel = self._kernel(shared.vectors_with(dout))
        lse, delta = shared.statistics(dout, out, lse, dlse)
        for total in sums:
            total.fill(0)
        strides = *shared.qkv_strides, arrays.strides(dout)
        tensors, places = (q, k, v, dout, lse, delta), shared.device.places(sums)
        kernel(shared.device.words(tensors, *strides, shared.state(seed), places), (), lists)
