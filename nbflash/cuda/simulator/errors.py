"""What the simulator reports. Every fault of a kernel that it finds is a :class:`SimError`."""


class SimError(RuntimeError):
    """A fault in device code, or a use of the simulator that cannot work."""


class OutOfBounds(SimError, IndexError):
    """An index or a vector access outside its array; negative indices never wrap."""


class BarrierDivergence(SimError):
    """Threads of one block at different barriers, or at none while others wait."""


class Deadlock(SimError):
    """No thread can go on. The message names what each waits for, and where."""


class Endless(SimError):
    """Threads go on and on. The message names what each waited for last, and where."""


class Race(SimError):
    """Two threads touched the same bytes, one of them wrote, and nothing orders them."""
