"""The copy engine: tiles between global and shared memory, described by tensor maps.

A tensor map arrives as a kernel argument; as device code sees it, it is its address. Source: PTX
ISA, "Data Movement and Conversion Instructions: Tensor copy".
"""

from nbflash.ptx._asm import instruction, types

I32, U32, U64 = types.int32, types.uint32, types.uint64

# (to, map, column, row, head, batch, mbarrier): rows or columns beyond the tensor arrive as zeros.
tma_load_4d = instruction(
    "tma_load_4d",
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$0], [$1, {$2, $3, $4, $5}], [$6];",
    (U32, U64, I32, I32, I32, I32, U32),
)
