"""Inline PTX that the compiler may move past other accesses of memory, by a kernel's LLVM IR.

LLVM keeps the order of what has side effects, but for loads and stores of its own it needs to know
that an instruction reads or writes memory: its constraints say so.
"""

import re

_ASM = re.compile(r'\basm (?:sideeffect )?"((?:[^"\\]|\\.)*)", "([^"]*)"')
_TOUCHES = re.compile(r"\[\$|\b(fence|bar|mbarrier|wgmma\.(fence|commit|wait)|cp\.async)[._]")
_RELAXED = re.compile(r"\b(red|atom)\.relaxed\.")  # nothing else follows from these sums
CLOBBER = "~{memory}"


def unordered(modules):
    """The texts of instructions that touch or order memory, and do not say so.

    Parameters
    ----------
    modules : iterable of str
        LLVM IR.
    """
    found = {text for x in modules for text, how in _ASM.findall(x) if CLOBBER not in how}
    return sorted(x for x in found if _TOUCHES.search(x) and not _RELAXED.search(x))
