"""``stmatrix``: 8 × 8 matrices of 16-bit elements from the registers of a warp to shared memory.

A lane gives one word of every matrix (two neighbours of row ``lane // 4``, columns
``2 (lane % 4) + {0, 1}``: the fragments of :mod:`.wgmma`) and the address of one row of
16 bytes: lane ``8 m + r`` that of row ``r`` of matrix ``m``. Source: PTX ISA, "Warp-level matrix
store instruction".
"""

from nbflash.cuda.ptx._asm import SIM, hopper, types
from nbflash.cuda.ptx.traced import emit


def stmatrix4(address, words):
    """Store four matrices inside an ``@unrolled`` function."""
    if SIM:
        hopper().stmatrix4(address, words)
        return
    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
    emit(text, [address.converted(types.uint32), *words], memory=True)
