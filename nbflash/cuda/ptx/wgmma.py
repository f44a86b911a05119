"""wgmma: matrix products of a warpgroup, asynchronous, accumulated in registers.

    D (64 × n) += A (64 × 16) B (16 × n)        fp16 or bf16 operands, float32 accumulators

A comes from shared memory (a descriptor) or from registers, B from shared memory. Thread
``t`` of the warpgroup (warp ``w = t // 32``, lane ``l = t % 32``) holds of D and of a register A

    rows      16 w + l // 4                     and 8 below
    columns   8 j + 2 (l % 4) + {0, 1}          j = 0 … n/8 − 1

    fragment   d[4 j + 2 i + e]  = D[16 w + l // 4 + 8 i,  8 j + 2 (l % 4) + e]
               a[2 i' + i]       = two neighbours of A[16 w + l // 4 + 8 i, 8 i' + 2 (l % 4)]

so the accumulators of S are, packed in pairs, the A fragments of P V: tuple elements
``8 k … 8 k + 7`` belong to its step ``k`` of 16 keys. Source: PTX ISA, "Asynchronous Warpgroup
Level Matrix Instructions".
"""

from nbflash.cuda.ptx._asm import SIM, hopper, instruction, types
from nbflash.cuda.ptx.traced import emit

wgmma_fence = instruction("wgmma_fence", "wgmma.fence.sync.aligned;", ())
wgmma_commit = instruction("wgmma_commit", "wgmma.commit_group.sync.aligned;", ())


def wgmma_wait(pending):
    """Device code that waits until at most ``pending`` committed groups are in flight."""
    text = f"wgmma.wait_group.sync.aligned {pending};"
    if SIM:
        return lambda: hopper().wgmma_wait(pending)
    return instruction("wgmma_wait", text, ())


def _in_place(acc, text, operands, **how):
    """Emit an instruction that changes a whole fragment in place."""
    return emit(text, operands, (types.float32,) * len(acc), tied=acc, **how)


def wgmma(
    dtype, acc, a, b, *, accumulate=True, transpose_b=False, negate_a=False, transpose_a=False
):
    """Issue ``wgmma.mma_async`` inside an ``@unrolled`` function; returns the fragment to come.

    Parameters
    ----------
    dtype : {"float16", "bfloat16"}
    acc : tuple of 2 n / 4 float32
        Not to be touched before :func:`wgmma_wait` and :func:`settle`.
    a : (uint32, int), or four uint32
        Descriptor in two halves, K-major in shared memory; or registers.
    b : (uint32, int)
        Descriptor in two halves, the upper one static; with ``transpose_b`` contiguous along n.
    accumulate : bool
        False: ``D = A B``.
    negate_a : bool
        ``D ± (−A) B``.
    transpose_a : bool
        A in shared memory is contiguous along its 64 rows.
    """
    if SIM:
        return hopper().wgmma(dtype, acc, a, b, accumulate, transpose_b, negate_a, transpose_a)
    n, kind = 2 * len(acc), {"float16": "f16", "bfloat16": "bf16"}[dtype]
    d = "{" + ",".join(f"${i}" for i in range(len(acc))) + "}"
    at, in_registers = 2 * len(acc), len(a) == 4
    values = [*a, b[0]] if in_registers else [a[0], b[0]]
    names = [f"${at + i}" for i in range(len(values))]
    if in_registers:
        first, operand, transposed = "", "{" + ",".join(names[:4]) + "}", f"{int(transpose_b)}"
    else:
        first, operand, transposed = (
            f"mov.b64 a, {{{names[0]}, {a[1]}}};",
            "a",
            f"{int(transpose_a)}, {int(transpose_b)}",
        )
    text = (
        f"{{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, {int(accumulate)}, 0;\n"
        f"{first} mov.b64 b, {{{names[-1]}, {b[1]}}};\n"
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {d}, {operand}, "
        f"b, p, {-1 if negate_a else 1}, 1, {transposed}; }}"
    )
    return _in_place(acc, text, [x.low_word() for x in values], keep=True)


def settle(acc):
    """The fragment after its wait, inside an ``@unrolled`` function; no instruction.

    The compiler does not know that :func:`wgmma_wait` writes the accumulators: nothing that
    reads them may move above this point.
    """
    if SIM:
        return hopper().settle(acc)
    return _in_place(acc, "", [], memory=True)
