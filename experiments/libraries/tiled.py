"""nbflash with tiles of a given size instead of those that its tables choose."""

from experiments.harness.errors import BadInput
from experiments.libraries.nbflash import Nbflash
from nbflash import AttentionPlan
from nbflash.backends.cpu.executor import CpuExecutor
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import check_forward, check_mask
from nbflash.schedule.tile_schedule import TileSchedule


class Tiled(Nbflash):
    """nbflash, forward alone, on the CPU or by the Hopper kernels.

    Parameters
    ----------
    q, k, v : arrays
    tile : (int, int)
        Queries and keys of a tile.
    """

    def __init__(self, q, k, v, tile):
        super().__init__(q, k, v)
        self._tile = tile

    def _make_plan(self, case):
        problem = check_forward(*self._inputs)
        spec = AttentionSpec(problem, check_mask(case.mask, problem))
        if problem.device != "cpu":
            return AttentionPlan(spec, "sm90", _on_hopper(spec, self._tile))
        executor = CpuExecutor(spec)
        executor.schedule = TileSchedule.from_mask(spec.mask, *self._tile)
        return AttentionPlan(spec, "cpu", executor)


def _on_hopper(spec, tile):
    """The executor with the row of the table that has these tiles."""
    from nbflash.backends.sm90.executor import Sm90Executor
    from nbflash.backends.sm90.forward.config import forward_configs

    table = forward_configs(spec.problem.dtype, spec.problem.head_dim)
    found = [config for config in table if (config.tile_m, config.tile_n) == tile]
    if not found:
        sizes = ", ".join(f"{config.tile_m}×{config.tile_n}" for config in table)
        raise BadInput(f"the table has no tiles of {tile[0]}×{tile[1]}; it has {sizes}")
    return Sm90Executor(spec, config=found[0])
