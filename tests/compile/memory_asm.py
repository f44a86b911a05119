"""Inline PTX that the compiler may move past other accesses of memory, by a kernel's LLVM IR.

LLVM keeps the order of what has side effects, but for loads and stores of its own it needs to know
that an instruction reads or writes memory: its constraints say so.
"""

import re

from ptx_orders import ORDERS

_CALL = re.compile(r"\bcall [^\n]* asm ")
_ASM = re.compile(r'\basm\s+(?:\w+\s+)*"((?:[^"\\]|\\.)*)", "([^"]*)"')
_ADDRESS = re.compile(r"\[[$%]")
_RELAXED = re.compile(r"\b(red|atom)\.relaxed\.")  # nothing else follows from these sums
CLOBBER = "~{memory}"


def unordered(modules):
    """The texts of instructions that touch or order memory, and do not say so.

    Parameters
    ----------
    modules : iterable of str
        LLVM IR.
    """
    found = set()
    for text in modules:
        inline = _ASM.findall(text)
        assert len(inline) == len(_CALL.findall(text)), "inline PTX of another form"
        found |= {ptx for ptx, how in inline if CLOBBER not in how and _touches(ptx)}
    return sorted(found)


def _touches(ptx):
    return any(
        (_ADDRESS.search(x) or ORDERS.search(f"{x};")) and not _RELAXED.search(x)
        for x in ptx.split(";")
    )
