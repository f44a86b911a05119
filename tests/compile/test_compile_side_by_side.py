"""Kernels that are bound are compiled in processes beside the one that runs first."""

import multiprocessing
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from unittest import mock

import pytest

from nbflash.backends.simt.row_statistics import RowConfig, delta_simt_spec
from nbflash.cuda import launch, side_by_side, workers

HOPPER = 9, 0
A, B, C = (delta_simt_spec(RowConfig("float32", d)) for d in (4, 8, 12))


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """No kernel is bound, kept or on its way."""
    monkeypatch.setenv("NBFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(side_by_side, "_bound", {})
    monkeypatch.setattr(side_by_side, "_coming", {})


class Noted:
    """Workers that note what they are asked for."""

    def __init__(self, result=None, error=None):
        self.asked, self._result, self._error = [], result, error

    def submit(self, spec, capability):
        found = Future()
        self.asked.append((spec, capability))
        if self._error:
            found.set_exception(self._error)
        else:
            found.set_result(self._result)
        return found


def use(monkeypatch, noted, beside=1):
    monkeypatch.setattr(side_by_side, "_workers", lambda: noted)
    monkeypatch.setattr(side_by_side, "most_beside", lambda: beside)
    here = []
    monkeypatch.setattr(launch, "compile_cubin", lambda spec, _: here.append(spec) or b"here")
    for spec in (A, B, C):
        side_by_side.expect(spec, HOPPER)
    return here


def test_the_others_are_compiled_beside_the_first_that_runs(monkeypatch):
    noted = Noted(b"beside")
    here = use(monkeypatch, noted)
    launch._keep(launch._path(C, launch.kernel_key.of(C, HOPPER)), b"kept")
    assert [side_by_side.cubin_of(spec, HOPPER) for spec in (A, B, C)] == [
        b"here",
        b"beside",
        b"kept",
    ]
    assert (noted.asked, here) == ([(B, HOPPER)], [A])
    assert (side_by_side._bound, side_by_side._coming) == ({}, {})


def test_nothing_begins_for_a_kernel_that_is_kept(monkeypatch):
    noted = Noted()
    here = use(monkeypatch, noted)
    launch._keep(launch._path(A, launch.kernel_key.of(A, HOPPER)), b"kept")
    assert side_by_side.cubin_of(A, HOPPER) == b"kept"
    assert (noted.asked, here) == ([], [])


def test_without_free_cores_each_is_compiled_when_it_runs(monkeypatch):
    noted = Noted()
    here = use(monkeypatch, noted, beside=0)
    assert {side_by_side.cubin_of(spec, HOPPER) for spec in (A, B, C)} == {b"here"}
    assert (noted.asked, here) == ([], [A, B, C])


def test_what_a_process_fails_at_is_compiled_here(monkeypatch):
    here = use(monkeypatch, Noted(error=RuntimeError("killed")))
    assert {side_by_side.cubin_of(spec, HOPPER) for spec in (A, B, C)} == {b"here"}
    assert here == [A, B, C]


def test_a_process_compiles_and_keeps():
    pool = workers.Workers(1)
    cubin = pool.submit(A, HOPPER).result(timeout=120)
    assert cubin.startswith(b"\x7fELF")
    assert not launch.is_cold(A, HOPPER)
    assert launch.cached_cubin(A, HOPPER) == cubin
    with pytest.raises(RuntimeError, match="Error: "):
        pool.submit(A, (1, 0)).result(timeout=120)
    pool.processes[0].kill()
    pool.processes[0].wait()
    assert pool.submit(B, HOPPER).result(timeout=120).startswith(b"\x7fELF")
    assert len(pool.processes) == 2
    pool.close()


def test_what_is_closed_starts_no_process_for_the_jobs_that_are_left(monkeypatch):
    pool, started, waiting = workers.Workers(1), [], threading.Event()

    def ask(process, job):
        waiting.wait(60)
        pool.close()
        process.poll.return_value = 1
        raise RuntimeError("it ended")

    monkeypatch.setattr(workers, "_start", lambda: started.append(mock.Mock()) or started[-1])
    monkeypatch.setattr(workers, "_ask", ask)
    first, _ = pool.submit(A, HOPPER), pool.submit(B, HOPPER)
    waiting.set()
    with pytest.raises(RuntimeError, match="it ended"):
        first.result(timeout=60)
    pool._threads[0].join(timeout=60)
    assert not pool._threads[0].is_alive()
    assert len(started) == 1


def nothing_starts():
    raise OSError("no memory")


def one_that_ends():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-S", "-c", ""], **pipes)


@pytest.mark.parametrize(
    ("start", "message"),
    [(nothing_starts, "no memory"), (one_that_ends, "a process that compiles kernels ended")],
)
def test_what_becomes_of_a_process_is_said(start, message, monkeypatch):
    monkeypatch.setattr(workers, "_start", start)
    pool = workers.Workers(1)
    with pytest.raises(RuntimeError, match=message):
        pool.submit(A, HOPPER).result(timeout=60)
    pool.close()


def test_a_fork_waits_for_no_process_of_its_parent(monkeypatch):
    monkeypatch.setattr(launch, "compile_cubin", lambda *_: b"here")
    side_by_side._coming[A, HOPPER] = Future()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=lambda: results.put(side_by_side.cubin_of(A, HOPPER)))
    process.start()
    assert results.get() == b"here"
    process.join()


def test_what_cannot_travel_is_not_handed_on():
    local = replace(A, make=lambda config: None)
    assert workers.Workers(1).submit(local, HOPPER) is None


@pytest.mark.parametrize(("quiet", "lines"), [("", 1), ("0", 1), ("1", 0)])
def test_what_takes_long_is_announced(quiet, lines, monkeypatch, capfd):
    monkeypatch.setattr(side_by_side, "SECONDS", 0.05)
    monkeypatch.setenv("NBFLASH_QUIET", quiet)
    use(monkeypatch, Noted(b"beside"))
    side_by_side.cubin_of(A, HOPPER)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(launch, "compile_cubin", lambda *_: time.sleep(0.5) or b"slow")
    side_by_side.cubin_of(B, (8, 0))
    err = capfd.readouterr().err
    assert err.count("\n") == lines
    assert err.startswith(
        "nbflash: compiling nbflash_delta_simt for sm_80, kept in" if lines else ""
    )
