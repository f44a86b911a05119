"""Files that processes write and read at once: whole, as they were written, or not there."""

import hashlib
import os
import tempfile

#: Of a kind: the oldest go first.
FILES = 512


def read(path):
    """What `write` wrote; None if it cannot be read or is not as it was written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    content, seal = data[:-32], data[-32:]
    return content if hashlib.sha256(content).digest() == seal else None


def write(path, content):
    """Put a content and its digest in place in one step.

    Of files that begin with the same word and a hyphen, the last `FILES` stay.

    Raises
    ------
    OSError
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
    _forget(path)


def _forget(path):
    kind = path.name.partition("-")[0]
    ages = {other: _age(other) for other in path.parent.glob(f"{kind}-*{path.suffix}")}
    for other in sorted(ages, key=ages.get)[:-FILES]:
        other.unlink(missing_ok=True)


def _age(path):
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # another process was faster
        return 0
