"""What a CUDA graph records is kept as long as the process lives: it may be replayed at any time.

Plans leave the cache, and temporary memory returns to CuPy's pool when a call is over. A graph
would go on reading the tables of the one and writing to the other, whoever has them by then.
"""

from __future__ import annotations

import contextlib
import sys

_NOTHING = contextlib.nullcontext()
_owners, _memory = {}, []


def recorded_by_torch(device_id, owner):
    """As `recorded`, on torch's stream: its memory belongs to the graph already."""
    stream = sys.modules["torch"]._C._cuda_getCurrentRawStream(device_id)
    if stream and sys.modules["cupy"].cuda.runtime.streamIsCapturing(stream):
        _owners[id(owner)] = owner
    return _NOTHING


def recorded(owner):
    """A context of what is launched: a CUDA graph that records it keeps its memory, and ``owner``.

    Memory of another library's allocator, torch's say, belongs to the graph already.
    """
    cuda = sys.modules["cupy"].cuda
    stream = cuda.get_current_stream().ptr
    # The legacy stream is never recorded.
    return _keeping(cuda, owner) if stream and cuda.runtime.streamIsCapturing(stream) else _NOTHING


def ask_beside_recording():
    """Let this thread query events while other threads record CUDA graphs."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    status, _ = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    if status != 0:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode failed: {status!r}")


@contextlib.contextmanager
def _keeping(cuda, owner):
    allocate = cuda.get_allocator()

    def kept(nbytes):
        memory = allocate(nbytes)
        if not isinstance(memory.mem, cuda.UnownedMemory):
            _memory.append(memory)
        return memory

    _owners[id(owner)] = owner
    with cuda.using_allocator(kept):
        yield
