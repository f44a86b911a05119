"""A pause of some microseconds on a CUDA stream, in which kernels of other streams begin."""

import functools
from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.device import cuda_device
from nbflash.cuda.kernel_spec import KernelSpec
from nbflash.cuda.ptx._asm import cuda

#: Nanoseconds of one instruction, which takes up to twice as long.
STEP = 1000


@dataclass(frozen=True)
class PauseConfig:
    threads: int = 1
    min_blocks: int = 1
    smem_bytes: int = 0


def make_pause(cfg):
    """The kernel: one thread sleeps so many times."""

    def kernel(steps):
        for _ in range(steps):
            cuda.nanosleep(STEP)

    return kernel


def pause_spec():
    """How to compile and launch the kernel."""
    return KernelSpec("nbflash_pause", make_pause, PauseConfig(), (kinds.int32,))


@functools.lru_cache
def pause_of(device_id, steps):
    """``pause()``: the current stream of a device waits for about as many microseconds."""
    return functools.partial(cuda_device(device_id).bind(pause_spec(), 1, (steps,)), ())
