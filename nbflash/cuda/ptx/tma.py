"""TMA: tiles described by tensor maps, and plain runs of bytes.

A tensor map arrives as a kernel argument; as device code sees it, it is its address. Source: PTX
ISA, "Data Movement and Conversion Instructions: Tensor copy" and "Bulk copy".
"""

from nbflash.cuda.kinds import int32, uint32, uint64
from nbflash.cuda.ptx._asm import instruction

# (to, map, column, row, head, batch, mbarrier): rows or columns beyond the tensor arrive as zeros.
tma_load_4d = instruction(
    "tma_load_4d",
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$0], [$1, {$2, $3, $4, $5}], [$6];",
    (uint32, uint64, int32, int32, int32, int32, uint32),
)
# The same for what is read once: its lines leave the L2 cache before others.
tma_load_4d_once = instruction(
    "tma_load_4d_once",
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[$0], [$1, {$2, $3, $4, $5}], [$6], $7;",
    (uint32, uint64, int32, int32, int32, int32, uint32, uint64),
)
# The policy of the lines that `tma_load_4d_once` reads.
evict_first = instruction(
    "evict_first", "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", (), uint64
)
# (map, column, row, head, batch, source): what is beyond the tensor is not written.
tma_store_4d = instruction(
    "tma_store_4d",
    "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [$0, {$1, $2, $3, $4}], [$5];",
    (uint64, int32, int32, int32, int32, uint32),
)
# (to, source, bytes, mbarrier): bytes of global memory into shared memory; addresses and the number
# of bytes are multiples of 16.
bulk_load = instruction(
    "bulk_load",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    (uint32, uint64, uint32, uint32),
)
# (target, source, bytes): float32 of shared memory added to global memory.
bulk_add = instruction(
    "bulk_add",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;",
    (uint64, uint32, uint32),
)
bulk_commit = instruction("bulk_commit", "cp.async.bulk.commit_group;", ())
# All of this thread's groups have read their source; or are done, too.
bulk_wait_read = instruction("bulk_wait_read", "cp.async.bulk.wait_group.read 0;", ())
bulk_wait = instruction("bulk_wait", "cp.async.bulk.wait_group 0;", ())
