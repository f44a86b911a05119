"""What is needed to compile and launch a kernel, besides the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbflash.cuda import kinds

INDEX = kinds.pointer(kinds.int32)
STRIDES = kinds.several((kinds.int64,) * 3)  # batch, sequence, head; in elements
SCHEDULE = (*(INDEX,) * 7, kinds.pointer(kinds.uint32))


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of one configuration.

    Attributes
    ----------
    name : str
        Symbol of the kernel in the cubin.
    make : callable
        ``make(config)`` returns the kernel as a Python function.
    config : frozen dataclass
        With ``threads``, ``min_blocks`` and ``smem_bytes``.
    signature : tuple of Kind
    maps : int
        The first arguments that are tensor maps, passed by value.
    whole_program : bool
        Assemble with ptxas: nvJitLink ignores ``setmaxnreg``, and takes more registers before
        compute capability 9.0.
    """

    name: str
    make: Callable[[Any], Callable]
    config: Any
    signature: tuple
    maps: int = 0
    whole_program: bool = False

    @property
    def launch_bounds(self):
        return self.config.threads, self.config.min_blocks
