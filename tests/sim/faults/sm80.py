"""The modules of the mma kernels and the faults of each."""

from faults.sm80_backward import BACKWARDS, OF_DQ, OF_ROWS, OF_WALKS
from faults.sm80_forward import (
    COPIES,
    DROPS,
    FORWARDS,
    FRAGMENTS,
    GRADIENTS,
    LAYOUTS,
    MASKS,
    NUMBERS,
    POISONS,
    PRODUCTS,
    SOFTMAXES,
)

SM80, MMA = "nbflash.backends.sm80", "nbflash.cuda.tile.mma"
LAYOUT, FRAGMENT, GEMM = f"{MMA}.layout", f"{MMA}.fragment", f"{MMA}.gemm"
SOFTMAX, MASK, POISON = f"{MMA}.softmax", f"{MMA}.mask", f"{MMA}.poison"
GRADIENT, COPY, ROWS = f"{MMA}.gradient", f"{MMA}.copy", f"{MMA}.rows"
SCORE, RANDOM, CONFIG = f"{SM80}.score", f"{SM80}.dropout", f"{SM80}.config"
FORWARD, ROW_KERNELS = f"{SM80}.forward", f"{SM80}.row_kernels"
DQ_PART, WALK = f"{SM80}.dq_part", f"{SM80}.walk"
BACKWARD, EXECUTOR = f"{SM80}.backward", f"{SM80}.executor"
# In the order of their imports.
CHAIN = (
    *(LAYOUT, FRAGMENT, GEMM, SOFTMAX, MASK, POISON, GRADIENT, COPY, ROWS),
    *(SCORE, RANDOM, CONFIG, FORWARD, ROW_KERNELS, DQ_PART, WALK, BACKWARD, EXECUTOR),
)
MUTANTS = [
    (target, mutant)
    for target, mutants in (
        (LAYOUT, LAYOUTS),
        (FRAGMENT, FRAGMENTS),
        (GEMM, PRODUCTS),
        (SOFTMAX, SOFTMAXES),
        (MASK, MASKS),
        (POISON, POISONS),
        (GRADIENT, GRADIENTS),
        (COPY, COPIES),
        (ROWS, NUMBERS),
        (RANDOM, DROPS),
        (FORWARD, FORWARDS),
        (ROW_KERNELS, OF_ROWS),
        (DQ_PART, OF_DQ),
        (WALK, OF_WALKS),
        (BACKWARD, BACKWARDS),
    )
    for mutant in mutants
]
