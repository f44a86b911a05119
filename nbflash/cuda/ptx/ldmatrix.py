"""``ldmatrix``: 8 × 8 matrices of 16-bit elements from shared memory to the registers of a warp.

Lane ``8 m + r`` gives the address of row ``r`` of matrix ``m``, 16 bytes; every lane gets one word
of each matrix, two neighbours of row ``lane // 4``, columns ``2 (lane % 4) + {0, 1}``, or with
``transposed`` of column ``lane // 4``, rows ``2 (lane % 4) + {0, 1}``: the operands of :mod:`.mma`.
Source: PTX ISA, "Warp-level matrix load instruction".
"""

from nbflash.cuda.ptx._asm import SIM, hopper, inline_ptx, ir, types


def ldmatrix(address, count=4, *, transposed=False):
    """``count`` matrices (1, 2 or 4) inside an ``@unrolled`` function: as many uint32."""
    if SIM:
        return hopper().ldmatrix(address, count, transposed)
    words = ", ".join(f"${i}" for i in range(count))
    form = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x{count}{form}.shared.b16 {{{words}}}, [${count}];"
    builder, word = address.builder, ir.IntType(32)
    result = word if count == 1 else ir.LiteralStructType([word] * count)
    constraints = ",".join(["=r"] * count + ["r", "~{memory}"])
    found = inline_ptx(builder, text, constraints, result, [address.value], side_effect=True)
    if count == 1:
        return (address.new(types.uint32, found),)
    parts = (builder.extract_value(found, i) for i in range(count))
    return tuple(address.new(types.uint32, part) for part in parts)
