"""Python's cyclic garbage collector, out of the way of what allocates very many objects."""

import contextlib
import gc


@contextlib.contextmanager
def collector_off():
    """A context without it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
