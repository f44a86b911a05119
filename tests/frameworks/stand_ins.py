"""CuPy where there is none."""

import contextlib
from types import SimpleNamespace


class Cupy(SimpleNamespace):
    """Notes in ``log`` the arrays that are made, and the contexts that are entered and left.

    Its memory and pointers are tuples of what made them.
    """

    def __init__(self):
        super().__init__(log=[])
        self.cuda = SimpleNamespace(
            Device=lambda n: self.context("device", n),
            ExternalStream=lambda *given: self.context("stream", *given),
            Stream=SimpleNamespace(),
            using_allocator=lambda f: self.context("allocator", f),
            runtime=SimpleNamespace(getDevice=lambda: 1),
            UnownedMemory=lambda *given: ("memory", *given),
            MemoryPointer=lambda memory, offset: ("pointer", memory, offset),
        )

    def ndarray(self, *given):
        self.log.append(("ndarray", *given))

    @contextlib.contextmanager
    def context(self, *what):
        self.log.append(what)
        yield
        self.log.append(("left", what[0]))
