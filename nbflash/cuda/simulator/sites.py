"""Where in the kernel's source something happened, cheap to record and readable when shown."""

import functools
import itertools
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
        To be compared with :func:`same`. Frames of this package are left out, so that the
        chain starts at the line of the kernel or of a helper of its own.
    """
    frame, own, chain = sys._getframe(depth), _OWN_FILES, []
    while frame is not None:  # as in `chain_of`, a call of which takes a tenth of the time
        code = frame.f_code
        if code.co_filename not in own:
            chain.append((code, frame.f_lasti))
            limit -= 1
            if not limit:
                break
        frame = frame.f_back
    return tuple(chain)


def known(site, depth=1, limit=8):
    """The chain that :func:`capture` gives; ``site`` itself where it equals it.

    That takes half of the time, since no chain is made.
    """
    frame, own, left = sys._getframe(depth), _OWN_FILES, limit
    for code, offset in site:
        while frame is not None and frame.f_code.co_filename in own:
            frame = frame.f_back
        if frame is None or frame.f_code is not code or frame.f_lasti != offset:
            return capture(depth + 1, limit)
        frame = frame.f_back
        left -= 1
    while left and frame is not None:
        if frame.f_code.co_filename not in own:
            return capture(depth + 1, limit)
        frame = frame.f_back
    return site


def chain_of(frame, limit=8):
    """The same from a frame on; no frame, no chain."""
    chain = []
    while frame is not None and len(chain) < limit:
        code = frame.f_code
        if code.co_filename not in _OWN_FILES:
            chain.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(chain)


@functools.cache
def _position(code, offset):
    return next(itertools.islice(code.co_positions(), offset // 2, None))


def place(site):
    """A hashable name of a site: source positions instead of instruction offsets.

    An offset is not one: the interpreter stops at another code unit of the same call once
    it has specialised the instruction.
    """
    return tuple((code, _position(code, offset)) for code, offset in site)


def same(a, b):
    """Whether two sites are the same place in the source, reached by the same calls."""
    return a == b or place(a) == place(b)


def show(site):
    """``inner.py:12 < kernel.py:40`` for a chain from :func:`capture`."""
    return " < ".join(
        f"{Path(code.co_filename).name}:{_position(code, offset)[0]}" for code, offset in site
    )
