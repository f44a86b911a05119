"""Files that several processes write and read at once: a reader gets the whole content, or none.

They hold code that is executed without further checks, so a file is read only if its user or root
owns it and nobody else may write to it.
"""

import hashlib
import os
import stat
import tempfile

#: Of a kind: the oldest go first.
FILES = 512
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_POSIX = hasattr(os, "geteuid")


def read(path):
    """What `write` wrote; None if it cannot be read, is damaged, or is not to be trusted."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            if not _is_trusted(os.fstat(file.fileno())):
                return None
            data = file.read()
    except OSError:
        return None
    content, seal = data[:-32], data[-32:]
    return content if hashlib.sha256(content).digest() == seal else None


def _is_trusted(status):
    """Whether a file or folder is that of the user or of root, and only they may write to it."""
    if not _POSIX:
        return True
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & _OTHERS_WRITE


def write_private(path, content):
    """`write` to a folder that only its user may use (mode 0700), which is made so.

    Raises
    ------
    OSError
        Also if the folder is another's, or is no folder.
    """
    folder = path.parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is not a directory")
    if _POSIX and status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user, of uid {status.st_uid}")
    if _POSIX and stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)
    write(path, content)


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
