"""Running sums of counts: where each row's list begins. One block."""

from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import INDEX, KernelSpec
from nbflash.cuda.ptx._asm import cuda, types
from nbflash.cuda.tile.warp_math import sums_of_lanes
from nbflash.definitions.constants import WARP

MOST_THREADS = 1024
OF_THREAD = 4  # counts: as many reads under way


@dataclass(frozen=True)
class RunningSumConfig:
    """`OF_THREAD` counts a thread at a time; with ``cursor`` what begins is written twice."""

    threads: int
    cursor: bool = False
    min_blocks: int = 1

    @property
    def warps(self):
        return self.threads // WARP

    @property
    def smem_bytes(self):
        return 4 * self.warps


def running_sum_config(n, cursor=False):
    """Threads for ``n`` counts: enough for all of them at a time, up to `MOST_THREADS`."""
    threads = WARP
    while threads < MOST_THREADS and OF_THREAD * threads < n:
        threads *= 2
    return RunningSumConfig(threads, cursor)


def make_running_sum(cfg):
    """The kernel: counts, ``sums`` (n + 1), ``cursor`` (n) or none, and n, how many counts."""
    THREADS, WARPS, CURSOR = cfg.threads, cfg.warps, cfg.cursor

    def running_sum(counts, sums, cursor, n):
        smem = cuda.shared.array(0, types.int32)
        tid = types.int32(cuda.threadIdx.x)
        warp, lane, before_round = tid >> 5, tid & 31, types.int32(0)
        if tid == 0:
            sums[0] = 0
        for start in range(0, n, OF_THREAD * THREADS):
            first = types.int32(start + OF_THREAD * tid)
            own = types.int32(0)
            for i in range(OF_THREAD):
                # Without a branch the reads are issued together. Past the end the last count is
                # read again; no sum that is written contains it.
                own = types.int32(own + counts[min(first + i, types.int32(n - 1))])
            total = sums_of_lanes(own, lane)
            if lane == WARP - 1:
                smem[warp] = total
            cuda.syncthreads()  # the sums of all warps are there
            before, of_round = before_round, types.int32(0)
            for w in range(WARPS):
                x = types.int32(smem[w])
                if w < warp:
                    before = types.int32(before + x)
                of_round = types.int32(of_round + x)
            before = types.int32(before + total - own)
            for i in range(first, min(types.int32(first + OF_THREAD), n)):
                if CURSOR:
                    cursor[i] = before
                before = types.int32(before + counts[i])
                sums[i + 1] = before
            before_round = types.int32(before_round + of_round)
            cuda.syncthreads()  # all have read the sums of the warps

    return running_sum


def running_sum_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    signature = (INDEX, INDEX, INDEX, kinds.int32)
    return KernelSpec("nbflash_running_sum", make_running_sum, cfg, signature)
