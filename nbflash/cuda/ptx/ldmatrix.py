"""``ldmatrix``: 8 × 8 matrices of 16-bit elements from shared memory to the registers of a warp.

Lane ``8 m + r`` gives the address of row ``r`` of matrix ``m``, 16 bytes; every lane gets one word
of each matrix, two neighbours of row ``lane // 4``, columns ``2 (lane % 4) + {0, 1}``, or with
``transposed`` of column ``lane // 4``, rows ``2 (lane % 4) + {0, 1}``: the operands of :mod:`.mma`.
Source: PTX ISA, "Warp-level matrix load instruction".
"""

from nbflash.cuda.ptx._asm import SIM, hopper, types
from nbflash.cuda.ptx.traced import emit


def ldmatrix(address, count=4, *, transposed=False):
    """``count`` matrices (1, 2 or 4) inside an ``@unrolled`` function: as many uint32."""
    if SIM:
        return hopper().ldmatrix(address, count, transposed)
    words = ", ".join(f"${i}" for i in range(count))
    form = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x{count}{form}.shared.b16 {{{words}}}, [${count}];"
    return emit(text, [address.converted(types.uint32)], (types.uint32,) * count, memory=True)
