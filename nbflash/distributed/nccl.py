"""GPUs of one or more machines, of CuPy arrays: NCCL, with a process for each."""

from __future__ import annotations

import threading
import time
from typing import Any

from nbflash.cuda import graphs
from nbflash.distributed.communicator import Communicator, Exchange, messages

_FIRST = -5  # the highest priority of a stream
_PAUSE = 10  # microseconds in which a kernel of NCCL that may run gets its multiprocessors


class NcclCommunicator:
    """Grouped sends and receives of `cupy.cuda.nccl` on a stream of their own.

    Parameters
    ----------
    host : Communicator
        Between the same ranks in host memory, such as `MpiCommunicator`. It connects the ranks, and
        compares their calls.
    timeout : float
        Seconds after which an exchange that is not done is given up: the communicator is aborted,
        which ends NCCL's kernels, and every later call raises `TimeoutError`.

    Notes
    -----
    The device that is current when this is made is the rank's. Arrays of every dtype are sent, as
    bytes. The host does not wait for the device: `Exchange.wait` makes the current stream wait for
    the messages.

    NCCL's kernels need multiprocessors on both ranks at the same time, and those of attention take
    all that are free until they end: messages that begin behind them on one rank hold those of the
    other one. So messages have the higher priority, and `Exchange.begun` lets them begin first. An
    event tells that NCCL's kernel may run, not that it does: a pause of some microseconds follows.

    In a CUDA graph the host compares the calls of the ranks once, while it is recorded; replays
    send and receive anew. All ranks replay in the same order. Replays are not watched: ``timeout``
    does not hold for them.
    """

    def __init__(self, host: Communicator, timeout: float = 300.0) -> None:
        import cupy
        from cupy.cuda import nccl

        from nbflash.cuda.pause import pause_of

        self._cupy, self._nccl, self.timeout = cupy, nccl, timeout
        self._host, self.rank, self.size = host, host.rank, host.size
        made = nccl.get_unique_id().hex() if host.rank == 0 else ""
        identity = bytes.fromhex(host.agree(made)[0])
        self._comm = nccl.NcclCommunicator(host.size, identity, host.rank)
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=_FIRST)
        self._pause = pause_of(cupy.cuda.Device().id, _PAUSE)
        self._watch = _Watch(self._comm, timeout, cupy.cuda.Device())

    def agree(self, note: str) -> list[str]:
        self._watch.check()
        try:
            return self._host.agree(note)
        except TimeoutError:
            self._watch.abort("a rank does not answer")
            raise

    def exchange(self, sends: dict[int, Any], receives: dict[int, Any]) -> Exchange:
        self._watch.check()
        cuda = self._cupy.cuda
        if sends or receives:
            ready, begun, done = (cuda.Event(disable_timing=True) for _ in range(3))
            ready.record(cuda.get_current_stream())
            self._stream.wait_event(ready)
            begun.record(self._stream)
            self._nccl.groupStart()
            for source, x in messages(receives):
                self._comm.recv(
                    x.data.ptr, x.nbytes, self._nccl.NCCL_UINT8, source, self._stream.ptr
                )
            for target, x in messages(sends):
                self._comm.send(
                    x.data.ptr, x.nbytes, self._nccl.NCCL_UINT8, target, self._stream.ptr
                )
            self._nccl.groupEnd()
            done.record(self._stream)
            if not cuda.get_current_stream().is_capturing():
                self._watch.add(done)
            return _NcclExchange(self, begun, done, (sends, receives))
        return _NcclExchange(self, None, None, None)

    def _after_beginning(self, begun):
        """The current stream waits until messages that begin behind an event have begun."""
        self._cupy.cuda.get_current_stream().wait_event(begun)
        self._pause()

    def close(self) -> None:
        """Free NCCL's memory. All ranks call this. Graphs that use it cannot be replayed then."""
        self._watch.close()
        self._comm.destroy()


class _NcclExchange(Exchange):
    """``held``: what NCCL reads and writes until the current stream has waited for it."""

    def __init__(self, comm, begun, done, held):
        self._comm, self._begun, self._done, self._held = comm, begun, done, held

    def begun(self):
        if self._begun is not None:
            self._comm._after_beginning(self._begun)

    def wait(self):
        self._comm._watch.check()
        if self._done is not None:
            self._comm._cupy.cuda.get_current_stream().wait_event(self._done)
        self._done = self._held = None


class _Watch:
    """A thread that gives up a communicator when an exchange takes longer than the timeout."""

    PAUSE = 0.05

    def __init__(self, comm, timeout, device):
        self._comm, self._timeout, self._device, self._why = comm, timeout, device, None
        self._lock, self._waiting, self._closed = threading.Lock(), [], threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, event):
        with self._lock:
            self._waiting.append((event, time.monotonic() + self._timeout))

    def check(self):
        """Raise TimeoutError if the communicator has been given up."""
        if self._why:
            raise TimeoutError(f"NCCL was aborted: {self._why}")

    def abort(self, why):
        with self._lock:
            if self._why is None:
                self._why = why
                self._comm.abort()

    def close(self):
        self._closed.set()
        self._thread.join()

    def _run(self):
        try:
            self._device.use()  # otherwise it takes memory of device 0, for a context there
            graphs.ask_beside_recording()
        except Exception as error:  # without a watch ranks may wait for ever
            self.abort(f"its watching thread could not begin: {error}")
            return
        while not self._closed.wait(self.PAUSE):
            with self._lock:
                self._waiting = [pair for pair in self._waiting if not pair[0].done]
                late = any(deadline < time.monotonic() for _, deadline in self._waiting)
            if late:
                self.abort(f"an exchange was not done after {self._timeout} s")
                return
