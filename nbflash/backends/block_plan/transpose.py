"""The lists of a block map by columns of blocks: for dK and dV.

Two passes over all entries, a thread each: one counts those of every column, and behind running
sums of the counts (:mod:`.running_sum`) the other puts each row where its column's next one goes.
In which order they come there is not known, and what stands twice stands twice: :mod:`.list_tiles`
sorts them, and drops it.
"""

from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import INDEX, KernelSpec
from nbflash.cuda.ptx._asm import cuda, types
from nbflash.cuda.tile.atomic_int import fetch_add

THREADS = 256


@dataclass(frozen=True)
class TransposeConfig:
    """``write``: put rows in their places. Otherwise count."""

    write: bool
    threads: int = THREADS
    smem_bytes: int = 0
    min_blocks: int = 1


def make_transpose(cfg):
    """The kernel: counts and indices of the map; ``cursor``, of every column how many there are or
    where the next one goes; ``rows``, the rows of every column; entries of a row and of all, rows
    and columns of blocks.
    """
    WRITE, ONE = cfg.write, types.int32(1)

    def transpose(counts, indices, cursor, rows, width, entries, n_rows, n_cols):
        at = types.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if at >= entries:
            return
        of_all = types.int32(at // width)
        if at - types.int64(of_all) * width >= counts[of_all]:
            return
        col = types.int32(indices[at])
        if col < 0 or col >= n_cols:
            return
        plane = types.int32(of_all // n_rows)
        place = fetch_add(cursor, types.int32(plane * n_cols + col), ONE)
        if WRITE:
            rows[place] = types.int32(of_all - plane * n_rows)

    return transpose


def transpose_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    sizes = (kinds.int32, kinds.int64, kinds.int32, kinds.int32)
    name = "nbflash_transpose_lists" if cfg.write else "nbflash_count_columns"
    return KernelSpec(name, make_transpose, cfg, (*(INDEX,) * 4, *sizes))
