"""NcclCommunicator on a stand-in for CuPy: what it asks of NCCL, in which order, on what stream."""

import sys
import threading
import time
import types

import pytest

from nbflash.cuda import graphs, pause
from nbflash.distributed import NcclCommunicator, run

IDENTITY = bytes([0, 3, 127, 255])


class Stream:
    def __init__(self, log, name, capturing=False, priority=0):
        self.log, self.name, self.ptr, self.capturing = log, name, hash(name), capturing
        self.priority = priority

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.name))

    def is_capturing(self):
        return self.capturing


class Event:
    done = False

    def __init__(self, log):
        self.log, self.name = log, None

    def record(self, stream):
        self.name = f"all before on {stream.name}"
        self.log.append((stream.name, "records"))


class Communicator:
    """`cupy.cuda.nccl.NcclCommunicator`."""

    def __init__(self, log, size, identity, rank):
        self.log = log
        log.append(("made", size, identity, rank))

    def __getattr__(self, name):
        return lambda *args: self.log.append((name, *args))


class Array:
    """Of CuPy, as far as it is read."""

    def __init__(self, ptr, nbytes):
        self.data, self.nbytes = types.SimpleNamespace(ptr=ptr), nbytes


class Host:
    """One of two ranks; the other one has the same notes, or does not answer."""

    rank, size, answers = 1, 2, True

    def agree(self, note):
        if not self.answers:
            raise TimeoutError("rank 1 has heard nothing of rank 0")
        return [note or IDENTITY.hex(), note]


@pytest.fixture
def cupy(monkeypatch):
    """Modules in the place of CuPy's, which log."""
    log = []
    current = Stream(log, "current")
    nccl = types.ModuleType("cupy.cuda.nccl")
    nccl.NCCL_UINT8, nccl.get_unique_id = 1, lambda: IDENTITY
    nccl.groupStart, nccl.groupEnd = (
        lambda name=name: log.append((name,)) for name in ("groupStart", "groupEnd")
    )
    nccl.NcclCommunicator = lambda *args: Communicator(log, *args)
    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl, cuda.get_current_stream = nccl, lambda: current
    cuda.Stream = lambda non_blocking, priority: Stream(log, "own", priority=priority)
    cuda.Event = lambda disable_timing: Event(log)
    module = types.ModuleType("cupy")
    module.used_by = []
    cuda.Device = lambda: types.SimpleNamespace(
        id=3, use=lambda: module.used_by.append(threading.current_thread())
    )
    module.relaxed = []
    monkeypatch.setattr(
        graphs, "ask_beside_recording", lambda: module.relaxed.append(threading.current_thread())
    )
    monkeypatch.setattr(
        pause, "pause_of", lambda device, steps: lambda: log.append(("pause", device))
    )
    module.cuda, module.log, module.current, module.ndarray = cuda, log, current, Array
    for each in (module, cuda, nccl):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return module


def test_messages_are_one_group_on_a_stream_of_their_own(cupy):
    """It begins when what they are made of is there; the caller's stream waits, not the host."""
    comm = NcclCommunicator(Host())
    assert cupy.log == [("made", 2, IDENTITY, 1)]
    cupy.log.clear()
    sends, receives = {0: Array(64, 10)}, {0: Array(128, 6)}
    exchange = comm.exchange(sends, receives)
    assert exchange._held == (sends, receives)  # alive while NCCL reads them
    stream = hash("own")
    assert cupy.log == [
        ("current", "records"),
        ("own", "waits for", "all before on current"),
        ("own", "records"),
        ("groupStart",),
        ("recv", 128, 6, 1, 0, stream),
        ("send", 64, 10, 1, 0, stream),
        ("groupEnd",),
        ("own", "records"),
    ]
    cupy.log.clear()
    exchange.wait()
    assert cupy.log == [("current", "waits for", "all before on own")]
    assert comm._stream.priority < cupy.current.priority
    comm.close()
    assert cupy.log[1:] == [("destroy",)]


def test_kernels_that_follow_let_messages_begin(cupy):
    """They wait for what comes before the messages, and a little more; not for the messages."""
    comm = NcclCommunicator(Host())
    exchange = comm.exchange({0: Array(64, 10)}, {0: Array(128, 6)})
    exchange._begun.name = "before the messages"
    cupy.log.clear()
    exchange.begun()
    assert cupy.log == [("current", "waits for", "before the messages"), ("pause", 3)]
    cupy.log.clear()
    comm.exchange({}, {}).begun()
    assert cupy.log == []
    comm.close()


def test_the_watching_thread_uses_the_device_of_the_rank(cupy):
    """The device of a new thread is 0, where a context of every rank would take memory."""
    comm = NcclCommunicator(Host())
    comm.close()
    assert cupy.used_by == [comm._watch._thread]


def test_a_thread_beside_a_recording_says_that_it_may_ask(monkeypatch):
    given, answers = [], [(0, "global"), (801, "global")]
    driver = types.SimpleNamespace(
        CUstreamCaptureMode=types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed"),
        cuThreadExchangeStreamCaptureMode=lambda mode: given.append(mode) or answers.pop(0),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(driver=driver))
    graphs.ask_beside_recording()
    assert given == ["relaxed"]
    with pytest.raises(RuntimeError, match="cuThreadExchangeStreamCaptureMode failed: 801"):
        graphs.ask_beside_recording()


def test_without_a_watch_nothing_is_sent(cupy, monkeypatch):
    """Ranks would wait for ever for one that has ended."""

    def refuse():
        raise RuntimeError("no such mode")

    monkeypatch.setattr(graphs, "ask_beside_recording", refuse)
    comm = NcclCommunicator(Host())
    comm._watch._thread.join()
    with pytest.raises(TimeoutError, match="watching thread could not begin: no such mode"):
        comm.exchange({}, {})


def test_the_watching_thread_does_not_end_a_recording(cupy):
    """It asks for events while another thread may record a CUDA graph."""
    comm = NcclCommunicator(Host())
    comm.close()
    assert cupy.relaxed == [comm._watch._thread]


def test_nothing_to_send_asks_nothing_of_nccl(cupy):
    comm = NcclCommunicator(Host())
    cupy.log.clear()
    comm.exchange({}, {}).wait()
    assert cupy.log == []
    comm.close()


def test_the_identity_is_that_of_the_first_rank(cupy):
    """Two threads as ranks: both make their communicator of what rank 0 has drawn."""
    for comm in run(NcclCommunicator, 2, timeout=20):
        comm.close()
    made = {entry for entry in cupy.log if entry[0] == "made"}
    assert made == {("made", 2, IDENTITY, 0), ("made", 2, IDENTITY, 1)}


def test_an_exchange_that_is_never_done_is_aborted(cupy):
    comm = NcclCommunicator(Host(), timeout=0.05)
    exchange = comm.exchange({0: Array(64, 10)}, {})
    deadline = time.monotonic() + 10
    while ("abort",) not in cupy.log and time.monotonic() < deadline:
        time.sleep(0.01)
    for call in (exchange.wait, lambda: comm.exchange({}, {}), lambda: comm.agree("")):
        with pytest.raises(TimeoutError, match=r"an exchange was not done after 0\.05 s"):
            call()
    assert cupy.log.count(("abort",)) == 1


def test_an_exchange_that_is_done_is_not_aborted(cupy):
    cupy.cuda.Event = lambda disable_timing: types.SimpleNamespace(
        done=True, name="", record=lambda stream: None
    )
    comm = NcclCommunicator(Host(), timeout=0.02)
    exchange = comm.exchange({0: Array(64, 10)}, {})
    time.sleep(0.2)
    exchange.wait()
    comm.close()
    assert ("abort",) not in cupy.log


def test_within_a_graph_no_event_is_asked_whether_it_is_done(cupy):
    cupy.current.capturing = True
    comm = NcclCommunicator(Host(), timeout=0.01)
    exchange = comm.exchange({0: Array(64, 10)}, {})
    time.sleep(0.15)
    exchange.wait()
    comm.close()
    assert ("abort",) not in cupy.log


def test_a_rank_that_does_not_answer_on_the_host_ends_nccl_too(cupy):
    host = Host()
    comm = NcclCommunicator(host)
    host.answers = False
    with pytest.raises(TimeoutError, match="heard nothing of rank 0"):
        comm.agree("")
    with pytest.raises(TimeoutError, match="NCCL was aborted: a rank does not answer"):
        comm.agree("")
    assert cupy.log[-1] == ("abort",)
    comm.close()
