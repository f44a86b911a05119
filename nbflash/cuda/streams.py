"""Streams of other libraries as CuPy's."""

from typing import NamedTuple


def external_stream(cupy, device: int, number: int):
    """The stream with a number, of the current device, which is ``device``."""
    cuda = cupy.cuda
    if hasattr(cuda.Stream, "from_external"):  # CuPy 14.2 deprecates the other
        return cuda.Stream.from_external(_Stream(number))
    return cuda.ExternalStream(number, device)


class _Stream(NamedTuple):
    """A stream by the protocol that libraries share."""

    number: int

    def __cuda_stream__(self):
        return 0, self.number
