"""Where in the kernel's source something happened, cheap to record and readable when shown."""

import sys
from pathlib import Path

_OWN_FILES = {str(path) for path in Path(__file__).parent.glob("*.py")}


def capture(depth=1, limit=8):
    """The call chain of the running device code, innermost first.

    Parameters
    ----------
    depth : int
        Callers to skip: frames that are known to belong to this package.
    limit : int
        Frames to keep at most.

    Returns
    -------
    tuple of (code, instruction offset)
        Equal for two threads at the same place. Frames of this package are left out, so
        that the chain starts at the line of the kernel or of a helper of its own.
    """
    frame, chain = sys._getframe(depth), []
    while frame is not None and len(chain) < limit:
        code = frame.f_code
        if code.co_filename not in _OWN_FILES:
            chain.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(chain)


def _line(code, offset):
    for start, stop, line in code.co_lines():
        if start <= offset < stop:
            return line
    return code.co_firstlineno


def show(site):
    """``inner.py:12 < kernel.py:40`` for a chain from :func:`capture`."""
    return " < ".join(f"{Path(code.co_filename).name}:{_line(code, at)}" for code, at in site)
