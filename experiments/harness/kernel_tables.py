"""The tables of tensor-core configurations in the source, as ``experiments tune`` measures them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import partial

from experiments.harness.passes import BACKWARD, FORWARD

PROBLEM = ("dtype", "head_dim", "negate")  # attributes that are no choice


def schedule_of(config, mask):
    """The tiles of a mask that a configuration walks."""
    from nbflash.schedule.tile_schedule import TileSchedule

    return TileSchedule.from_mask(mask, config.tile_m, config.tile_n)


class KernelTables(ABC):
    """Those of an implementation; a pass is `FORWARD` or `BACKWARD`."""

    impl: str

    @abstractmethod
    def of(self, which, dtype, head_dim):
        """The configurations that the source has for a pass; none where it has no row."""

    @abstractmethod
    def made(self, which, dtype, head_dim, row):
        """The configuration of a candidate of the sweep."""

    @abstractmethod
    def why_not(self, config):
        """Reasons why a configuration does not run."""

    @abstractmethod
    def executor(self, which, config, spec):
        """The executor with one configuration for a pass and the table's for the other."""

    @abstractmethod
    def chosen(self, which, table, mask):
        """What the table chooses for a mask."""

    @abstractmethod
    def row(self, config, speed, first):
        """The row of the source's table for a configuration.

        ``speed``: TFLOP/s over its tiles; ``first``: that of the table's first row.
        """


class Sm90Tables(KernelTables):
    """Those of the Hopper kernels."""

    impl = "sm90"

    def of(self, which, dtype, head_dim):
        from nbflash.backends.sm90.backward.config import backward_configs
        from nbflash.backends.sm90.forward.config import forward_configs

        return (forward_configs if which == FORWARD else backward_configs)(dtype, head_dim)

    def made(self, which, dtype, head_dim, row):
        from nbflash.backends.sm90.backward.config import Sm90BackwardConfig
        from nbflash.backends.sm90.forward.config import Sm90Config

        if "registers" in row:
            row = row | {"registers": tuple(row["registers"])}
        return (Sm90Config if which == FORWARD else Sm90BackwardConfig)(dtype, head_dim, **row)

    def why_not(self, config):
        return config.why_not()

    def executor(self, which, config, spec):
        from nbflash.backends.sm90.executor import Sm90Executor

        return Sm90Executor(spec, **{"config" if which == FORWARD else "backward": config})

    def chosen(self, which, table, mask):
        from nbflash.backends.sm90.forward.choice import choose

        if which == BACKWARD:
            return table[0]  # the others are for slopes of scores
        return choose(table, mask, partial(schedule_of, mask=mask))[0]

    def row(self, config, speed, first):
        """Without defaults at its end; speeds of the forward are TFLOP/s, others are left out."""
        from nbflash.backends.sm90.forward.config import Sm90Config

        left_out = () if isinstance(config, Sm90Config) else ("speed",)
        row, kept = [], 0
        for field in fields(config):
            if field.name not in (*PROBLEM, *left_out):
                value = round(speed) if field.name == "speed" else getattr(config, field.name)
                row.append(value)
                kept = kept if value == field.default else len(row)
        return f"({config.head_dim}, {', '.join(map(str, row[:kept]))})"


@dataclass(frozen=True)
class Sm80Tables(KernelTables):
    """Those of the portable tensor-core kernels, on a device.

    Attributes
    ----------
    smem_limit : int
        Shared memory of a block, in bytes.
    vector_red : bool
    """

    smem_limit: int
    vector_red: bool
    impl = "sm80"

    def of(self, which, dtype, head_dim):
        """Of a backward the geometry, whatever its passes are."""
        from nbflash.backends.sm80.config import backward_configs, forward_configs

        how = {"smem_limit": self.smem_limit}
        if which == FORWARD:
            return forward_configs(dtype, head_dim, **how)
        how |= {"deterministic": False, "vector_red": self.vector_red}
        geometry = {"sums": "both", "atomic_dq": False, "vector_red": False}
        found = backward_configs(dtype, head_dim, **how)
        return [replace(passes[-1], **geometry) for passes in found]

    def made(self, which, dtype, head_dim, row):
        from nbflash.backends.sm80.config import Sm80BackwardConfig, Sm80Config

        return (Sm80Config if which == FORWARD else Sm80BackwardConfig)(dtype, head_dim, **row)

    def why_not(self, config):
        from nbflash.backends.sm80.config import Sm80BackwardConfig, fits

        passes = [config]
        if isinstance(config, Sm80BackwardConfig):
            passes = self._passes(config, deterministic=False)
        if all(fits(each, self.smem_limit) for each in passes):
            return []
        return [f"{config.min_blocks} blocks do not fit {self.smem_limit} bytes of shared memory"]

    def _passes(self, config, deterministic):
        from nbflash.backends.sm80.config import passes_of

        return passes_of(config, deterministic=deterministic, vector_red=self.vector_red)

    def executor(self, which, config, spec):
        from nbflash.backends.sm80.executor import Sm80Executor

        if which == FORWARD:
            return Sm80Executor(spec, config=config)
        return Sm80Executor(spec, backward=partial(self._passes, config))

    def chosen(self, which, table, mask):
        from nbflash.backends.sm80.executor import choose

        return choose(which, table, mask)

    def row(self, config, speed, first):
        from nbflash.backends.sm80.config import Sm80Config

        walked = config.tile_n if isinstance(config, Sm80Config) else config.length
        values = config.warps, config.m_tiles, walked, config.stages, config.min_blocks
        return f"({', '.join(map(str, [config.head_dim, *values]))}, {speed / first:.2f})"


def tables_of(impl):
    """The tables of an implementation, of the first CUDA device."""
    if impl == Sm90Tables.impl:
        return Sm90Tables()
    from nbflash.cuda.device import cuda_device

    device = cuda_device(0)
    return Sm80Tables(device.smem_limit, device.vector_red)
