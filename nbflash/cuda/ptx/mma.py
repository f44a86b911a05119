"""mma: the product of two small matrices by a warp, in registers and at once.

    D (16 × 8) = A (16 × 16) B (16 × 8) + C        fp16 or bf16 operands, float32 accumulators

Lane ``l`` holds of D and C, in the order of wgmma's fragments (see :mod:`.wgmma`), and
of A and B, two neighbours along the contraction in a word:

    d[2 i + e]     D[l // 4 + 8 i,  2 (l % 4) + e]
    a[2 i' + i]    A[l // 4 + 8 i,  8 i' + 2 (l % 4) + {0, 1}]
    b[i']          B[8 i' + 2 (l % 4) + {0, 1},  l // 4]

Source: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
"""

from nbflash.cuda.ptx._asm import SIM, hopper, types
from nbflash.cuda.ptx.traced import emit


def mma(dtype, c, a, b):
    """``mma.sync`` inside an ``@unrolled`` function: ``A B + C`` of ``dtype`` "float16" or
    "bfloat16", of four float32, four words and two words.
    """
    if SIM:
        return hopper().mma(dtype, c, a, b)
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return emit(text, [*a, *b, *c], (types.float32,) * 4, keep=True)
