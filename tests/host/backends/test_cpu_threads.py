"""Threads of the CPU implementation: calls side by side, processes that are forked, Ctrl-C."""

import subprocess
import sys
import threading

import numpy as np

import nbflash
from nbflash.backends.cpu import blas


def run(script):
    """What a script prints."""
    given = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(given, capture_output=True, text=True, timeout=280)
    assert not done.returncode, done.stderr
    return done.stdout


def test_calls_run_side_by_side_and_the_last_restores_the_thread_count():
    set_threads, get_threads = blas.thread_functions
    before, inside, done = get_threads(), threading.Event(), threading.Event()

    def hold():
        with blas.one_thread():
            inside.set()
            done.wait(60)

    set_threads(2)
    try:
        other = threading.Thread(target=hold)
        other.start()
        assert inside.wait(60)
        q = np.ones((1, 4, 1, 8), np.float32)
        call = threading.Thread(target=nbflash.attention, args=(q, q, q), daemon=True)
        call.start()
        call.join(60)
        waits, count = call.is_alive(), get_threads()
        done.set()
        other.join()
        assert not waits
        assert count == 1
        assert get_threads() == 2
    finally:
        set_threads(before)


FORKS = """
import os, signal, threading
import numpy as np
import nbflash
from nbflash.backends.cpu import blas

q = np.ones((1, 4, 1, 8), np.float32)
nbflash.attention(q, q, q)
count = blas.thread_functions[1]()
inside, done = threading.Event(), threading.Event()

def hold():
    with blas.one_thread():
        inside.set()
        done.wait()

thread = threading.Thread(target=hold)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    nbflash.attention(q, q, q, causal=True)
    os._exit(0 if blas.thread_functions[1]() == count else 3)
done.set()
thread.join()
print(os.waitpid(child, 0)[1])
"""


def test_a_fork_during_a_call_leaves_the_child_free():
    """The threads of other calls do not go on in it, nor does what they hold."""
    assert run(FORKS) == "0\n"


INTERRUPTED = """
import signal, threading, time
import numpy as np
import nbflash
from nbflash import scores

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's "&" takes away

def interrupt():
    global sent
    sent = time.perf_counter()
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

def waits(function, *given, **how):
    threading.Timer(0.3, interrupt).start()
    try:
        function(*given, **how)
    except KeyboardInterrupt:
        return time.perf_counter() - sent
    return "it ran to its end"

q = np.ones((1, 128, 128, 16), np.float32)
k = np.ones((1, 1 << 19, 1, 16), np.float32)
lse = np.ones((1, 128, 128), np.float32)
short, long = (q[:, :2], k[:, :2], lse[:, :, :2]), (q, k, lse)
relative = {"score": scores.relative(np.zeros((128, 1)))}

def results(q, k, lse):
    return q, q, k, k, q, lse

# Compiled, or read from disk: what the long calls need, too, since elements have several terms.
nbflash.attention_backward(*results(*short))
nbflash.score_backward(*results(*short), **relative)
nbflash.attention(*results(*short)[1:4])
print(waits(nbflash.attention, q, k, k))
print(waits(nbflash.attention_backward, *results(*long)))
print(waits(nbflash.score_backward, *results(*long), **relative))
"""


def test_ctrl_c_ends_a_call():
    """Of rows that take longer than that."""
    assert [float(seconds) < 0.2 for seconds in run(INTERRUPTED).split("\n")[:-1]] == [True] * 3
