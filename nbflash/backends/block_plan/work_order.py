"""The order in which rows of tiles are worked on: heads that share the L2 together, longest first.

A block ranks some of the items of one group of heads. The rank of an item is the number of items of
its group that are longer, or as long and before it: no sorting, no atomics, the same every time.

    for each stretch of the group's items
        their lengths to shared memory
        rank += how many of them come before this thread's own
"""

from dataclasses import dataclass

from nbflash.cuda import kinds
from nbflash.cuda.kernel_spec import INDEX, KernelSpec
from nbflash.cuda.ptx._asm import cuda, inlined, types
from nbflash.cuda.tile.ring import divmod_int32

THREADS = 256
UNROLLED = 8  # comparisons; divides a stretch
PAIRS, COLUMNS = 2, 4  # words of an item: row, head; or key tile, batch, head, whether it is masked


@dataclass(frozen=True)
class WorkOrderConfig:
    """``words`` of an item, `PAIRS` or `COLUMNS`; lengths that a block reads at a time."""

    words: int
    stretch: int = 4 * THREADS
    threads: int = THREADS
    min_blocks: int = 4

    @property
    def smem_bytes(self):
        return 4 * self.stretch


def make_work_order(cfg):
    """The kernel: counts and masked of every row of tiles; work; rows of a plane; units, groups and
    chunks, the heads of a unit and the query heads that an item goes over; heads of items of a
    batch element; plane_of.

    Heads of items are ``units`` times ``of_unit``, and unit u belongs to group u · groups // units.
    There are ``chunks`` blocks for each group. Item ``head · n_row + row`` goes over ``group``
    query heads from ``head · group`` on.
    """
    MASKED, STRETCH = cfg.words == COLUMNS, cfg.stretch

    @inlined
    def first_item(of_group, units, groups, items_of_unit):
        """Where the items of a group begin."""
        unit, _ = divmod_int32(types.int32(of_group * units + groups - 1), groups)
        return types.int32(unit * items_of_unit)

    @inlined
    def summed(values, plane_of, item, n_row, group):
        """Of the rows of tiles that an item goes over."""
        head, row = divmod_int32(item, n_row)
        total = types.int32(0)
        for h in range(types.int32(head * group), types.int32((head + 1) * group)):
            total = types.int32(total + values[plane_of[h] * n_row + row])
        return total

    def work_order(
        counts, masked, work, n_row, units, groups, chunks, of_unit, group, heads, plane_of
    ):
        smem = cuda.shared.array(0, types.int32)
        tid = types.int32(cuda.threadIdx.x)
        of_group, chunk = divmod_int32(types.int32(cuda.blockIdx.x), chunks)
        items_of_unit = types.int32(of_unit * n_row)
        begin = first_item(of_group, units, groups, items_of_unit)
        end = first_item(types.int32(of_group + 1), units, groups, items_of_unit)
        item = types.int32(begin + chunk * THREADS + tid)
        own, rank = types.int32(-1), types.int32(0)
        if item < end:
            own = summed(counts, plane_of, item, n_row, group)
        for start in range(begin, end, STRETCH):
            for i in range(tid, STRETCH, THREADS):
                length = types.int32(-1)
                if start + i < end:
                    length = summed(counts, plane_of, types.int32(start + i), n_row, group)
                smem[i] = length
            cuda.syncthreads()  # the lengths are there
            before = types.int32(item - start)
            for i in range(0, min(types.int32(STRETCH), types.int32(end - start)), UNROLLED):
                for j in range(UNROLLED):  # of equal lengths the first one counts for more
                    at = types.uint64(i + j)  # Numba would look whether an int is below 0
                    length = types.int32(smem[at] + (j < before))
                    rank = types.int32(rank + (length > own))
                before = types.int32(before - UNROLLED)
            cuda.syncthreads()  # all have read them
        if item < end:
            at = types.int32(begin + rank)
            head, row = divmod_int32(item, n_row)
            if MASKED:
                work[COLUMNS * at] = row
                batch, head = divmod_int32(head, heads)
                work[COLUMNS * at + 1] = batch
                work[COLUMNS * at + 2] = head
                hidden = summed(masked, plane_of, item, n_row, group)
                work[COLUMNS * at + 3] = types.int32(1 if hidden > 0 else 0)
            else:
                work[PAIRS * at] = row
                work[PAIRS * at + 1] = head

    return work_order


def work_order_spec(cfg):
    """How to compile and launch the kernel of ``cfg``."""
    signature = (*(INDEX,) * 3, *(kinds.int32,) * 7, INDEX)
    return KernelSpec("nbflash_work_order", make_work_order, cfg, signature)
