"""Tests run with a fault planted in host code, each in a forked process of its own.

Host modules refer to each other by name, so the faulty one is imported in the place of the right
one before anything imports it. `Planter` starts this file as a server that has imported NumPy,
SciPy, Numba and pytest, and nothing of ours: a fault costs a fork, the import of nbflash, and the
test.
"""

import gc
import importlib.abc
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from mutants import Mutant

ROOT = Path(__file__).parent.parent
READY = "ready"
SECONDS = 60  # for a test with a fault planted
MEMORY = 16 * 2**30  # addresses that a faulty size may take
# What Numba compiles for the CPU. Its disk cache is keyed by source files, which have no fault.
COMPILED = "nbflash.backends.cpu", "nbflash.definitions.philox", "nbflash.definitions.score_chain"


class Planter:
    """The server, and what it answers.

    Parameters
    ----------
    simulated : bool
        Whether Numba's CUDA simulator is on, as tests/sim needs it.
    seconds : int
        Of wall clock for a test, and of processor time for all tests of an outcome.
    """

    def __init__(self, simulated, seconds=SECONDS):
        left_out = "PYTEST_", "NUMBA_ENABLE_CUDASIM"
        env = {name: x for name, x in os.environ.items() if not name.startswith(left_out)}
        env |= {"OPENBLAS_NUM_THREADS": "1", "NUMBA_ENABLE_CUDASIM": str(int(simulated))}
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=env,
            text=True,
        )
        assert self._server.stdout.readline().strip() == READY

    def outcome(self, module, mutant, *tests):
        """pytest's exit code, and its output, of tests with a fault planted (None: with none).

        Minus a signal where they take too much processor time.
        """
        planted = None if mutant is None else [module, vars(mutant)]
        self._server.stdin.write(json.dumps([planted, tests]) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self):
        with self._server:  # closes its pipes and waits
            pass


class _Planted(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module with a fault in its source."""

    def __init__(self, name, mutant):
        place = ROOT.joinpath(*name.split("."))
        package = place / "__init__.py"
        self._name = name
        self._path = package if package.exists() else place.with_suffix(".py")
        self._source = mutant.apply(self._path.read_text())

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        folders = [str(self._path.parent)] if self._path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, self._path, loader=self, submodule_search_locations=folders
        )

    def get_filename(self, name):
        return str(self._path)

    def get_data(self, path):
        return self._source.encode()


def _run(planted, tests, seconds, kernels):
    """In a fork: pytest's exit code. ``kernels`` is the disk cache of faulty kernels."""
    import numba
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if planted:
        module, mutant = planted
        if module.startswith(COMPILED):
            numba.config.CACHE_DIR = kernels
        sys.meta_path.insert(0, _Planted(module, Mutant(**mutant)))
    quiet = "-qx", "--assert=plain", "-pno:cacheprovider", "-pno:xdist", f"--timeout={seconds}"
    return int(pytest.main([*quiet, *tests]))


def _forked(planted, tests, seconds):
    """``_run`` in a process of its own: its exit code and the end of what it wrote."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory() as kernels:
        process = os.fork()
        if process == 0:
            code = 70  # no verdict
            try:
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                code = _run(planted, tests, seconds, kernels)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(process, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()[-3000:]


def _serve(seconds):
    import hypothesis  # noqa: F401 - before the forks
    import ml_dtypes  # noqa: F401
    import numba.cuda  # noqa: F401
    import pytest  # noqa: F401
    import scipy.sparse  # noqa: F401

    sys.path.insert(0, str(ROOT))
    gc.freeze()  # a fork collects what is its own
    print(READY, flush=True)
    for line in sys.stdin:
        print(json.dumps(_forked(*json.loads(line), seconds)), flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
