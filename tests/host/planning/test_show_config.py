"""What runs here and why not, in processes with and without the optional packages."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import nbflash
from nbflash import environment
from nbflash.cuda import availability
from nbflash.cuda import simulator as sim
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import check_forward
from nbflash.planning import dispatch
from nbflash.testing import make_qkv

OPTIONAL = ("cupy", "numba_cuda", "ml_dtypes", "cuda")
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
"""


def python(code, blocked=(), **environ):
    """Standard output of ``code`` in a process without the packages in ``blocked``."""
    source = BLOCK.format(blocked=set(blocked) or {""}) + code
    # Warnings are errors, as everywhere in the tests.
    command = [sys.executable, "-W", "error", "-c", source]
    root = os.path.dirname(os.path.dirname(nbflash.__file__))
    environ = {**os.environ, "PYTHONPATH": root, **environ}
    result = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


RUN_MODULE = "import runpy; runpy.run_module('nbflash', run_name='__main__')"


@pytest.mark.parametrize("blocked", [(), OPTIONAL], ids=["as-installed", "bare"])
def test_module_prints_the_configuration(blocked, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "kernel.cubin").write_bytes(bytes(1_500_000))
    text = python(RUN_MODULE, blocked, NBFLASH_CACHE_DIR=str(tmp_path))
    lines = text.splitlines()
    assert lines[0] == f"nbflash {nbflash.__version__}"
    for heading in ("versions", "devices", "implementations", "kernel cache"):
        assert heading in lines
    first_words = [line.split()[0] for line in lines if line.startswith("  ")]
    for name in ("python", "numpy", "scipy", "numba", "numba-cuda", "cupy", "cuda-bindings"):
        assert name in first_words
    for impl in dispatch.IMPLEMENTATIONS:
        assert impl in first_words
    assert lines[-1] == f"  {tmp_path}: 1 files, 1.5 MB"
    assert any(line.split() == ["cpu", "yes"] for line in lines)
    if blocked:
        (simt,) = (line for line in lines if line.split()[0:1] == ["simt"])
        assert "numba-cuda, CuPy, cuda-core not installed: pip install 'nbflash[cuda12]'" in simt


def test_module_prints_the_configuration_without_numba():
    code = f"import sys; sys.modules['numba'] = None\n{RUN_MODULE}"
    lines = python(code).splitlines()
    assert any(line.split()[:3] == ["cpu", "no:", "numba"] for line in lines)
    assert "kernel cache" in lines
    assert "BLAS of the cpu implementation" not in lines


def test_module_knows_its_arguments():
    for argument, code, said in (
        ("--help", 0, "usage: nbflash"),
        ("--version", 0, nbflash.__version__),
        ("x", 2, "invalid choice: 'x'"),
    ):
        command = [sys.executable, "-m", "nbflash", argument]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == code
        assert said in result.stdout + result.stderr


def test_show_config_writes_to_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("NBFLASH_CACHE_DIR", str(tmp_path / "none"))
    with open(tmp_path / "config.txt", "w") as file:
        nbflash.show_config(file)
    lines = (tmp_path / "config.txt").read_text().splitlines()
    assert lines == environment.describe()
    assert lines[-1].endswith("none: 0 files, 0.0 MB")


def test_show_config_names_the_simulator():
    assert "simulator      on" in python(RUN_MODULE, NUMBA_ENABLE_CUDASIM="1")


def test_import_needs_no_optional_package():
    code = """
import nbflash
heavy = {"numba", "cupy", "ml_dtypes", "numba_cuda", "cuda", "matplotlib"}
heavy |= {"scipy.stats", "scipy.sparse.csgraph"}
print(sorted(heavy & set(sys.modules)))
"""
    assert python(code, OPTIONAL) == "[]\n"


def test_import_takes_little_more_than_that_of_scipy():
    """Processor time in turns, so that a slow or busy machine does not matter; the best of five.

    Numba, which is imported when a kernel is compiled, would more than double it.
    """
    code = "import time, {}; print(time.process_time())"
    times = [
        [float(python(code.format(name))) for name in ("numpy, scipy.sparse", "nbflash")]
        for _ in range(5)
    ]
    scipy, own = map(min, zip(*times, strict=True))
    assert own < 1.5 * scipy


def test_attention_runs_without_optional_packages():
    code = """
import numpy as np, nbflash
q = np.ones((1, 3, 1, 4), np.float32)
out, pullback = nbflash.plan(q, q, q, causal=True).vjp(q, q, q)
print(out.sum(), *(x.shape for x in pullback(q)))
"""
    assert python(code, OPTIONAL) == "12.0 (1, 3, 1, 4) (1, 3, 1, 4) (1, 3, 1, 4)\n"


@pytest.fixture
def problem():
    return check_forward(*make_qkv(1, 4, 4, 1, 1, 4)[:3])


def test_missing_numba_is_a_reason(monkeypatch, problem):
    monkeypatch.setattr(availability, "installed", lambda module: module != "numba")
    reason, spec = "numba is not installed: pip install numba", AttentionSpec(problem)
    assert dispatch.why_not("cpu", spec) == [reason]
    assert dispatch.why_not("auto", spec) == [f"cpu: {reason}"]
    with pytest.raises(ValueError, match=r"impl='auto' cannot run \(q .*\n  cpu: numba is not"):
        dispatch.choose("auto", AttentionSpec(problem))


def test_simulator_takes_host_arrays(monkeypatch, problem):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    monkeypatch.setattr(availability, "installed", lambda module: True)
    monkeypatch.setattr(sim, "installed", lambda: True)
    assert dispatch.why_not("simt", AttentionSpec(problem)) == []
    assert dispatch.choose("simt", AttentionSpec(problem)) == "simt"


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ((), "numba-cuda is not installed: pip install numba-cuda"),
        (("numba_cuda",), "greenlet, of the simulator, is not installed: pip install 'nbflash["),
        (
            ("numba_cuda", "greenlet"),
            "the simulator's engine is not installed: call nbflash.cuda.simulator.",
        ),
    ],
    ids=["numba-cuda", "greenlet", "engine"],
)
def test_simulator_needs_its_packages_and_its_engine(monkeypatch, problem, there, reason):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    monkeypatch.setattr(availability, "installed", lambda module: module in there)
    monkeypatch.setattr(sim, "installed", lambda: False)
    (why,) = dispatch.why_not("simt", AttentionSpec(problem))
    assert why.startswith(reason)


def test_engine_of_the_simulator_is_found_without_importing_numba():
    code = """
import sys
from dataclasses import replace
from types import SimpleNamespace
from nbflash.planning import dispatch as config; from nbflash.cuda import simulator as sim
(why,) = config.why_not_here("simt")
assert why.startswith("the simulator's engine is not installed"), why
assert "numba" not in sys.modules
import numba.cuda
assert config.why_not_here("simt") == [why]
import numpy as np, nbflash
q, k = np.ones((1, 1, 2, 8)), np.ones((1, 8, 2, 8))
try:
    nbflash.decode(q, k, k, [8], impl="simt")
except ValueError as error:
    assert why in str(error), error
sim.install()
print(config.why_not_here("simt"))
"""
    assert python(code, NUMBA_ENABLE_CUDASIM="1") == "[]\n"


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("0", False), ("", False), ("00", False), ("yes", False)]
)
def test_simulator_follows_the_variable_of_numba(monkeypatch, value, on):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", value)
    assert availability.simulator() is on


@pytest.mark.parametrize(
    ("platform", "environ", "expected"),
    [
        ("linux", {"NBFLASH_CACHE_DIR": "/chosen"}, "/chosen"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/nbflash"),
        ("linux", {}, "/home/me/.cache/nbflash"),
        ("darwin", {}, "/home/me/Library/Caches/nbflash"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/nbflash"),
        ("win32", {}, "/home/me/AppData/Local/nbflash"),
    ],
)
def test_cache_dir_follows_the_platform(monkeypatch, platform, environ, expected):
    for name in ("NBFLASH_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(availability.sys, "platform", platform)
    monkeypatch.setattr(availability.Path, "home", lambda: availability.Path("/home/me"))
    assert availability.cache_dir().as_posix() == expected


class Runtime:
    """`cupy.cuda.runtime` of a machine."""

    class CUDARuntimeError(Exception):
        pass

    def __init__(self, answer):
        self.answer = answer

    def getDeviceCount(self):
        if isinstance(self.answer, str):
            raise self.CUDARuntimeError(self.answer)
        return self.answer


@pytest.mark.parametrize(
    ("answer", "reasons"),
    [
        (1, []),
        (0, ["no CUDA device is visible"]),
        ("insufficient driver", ["no usable NVIDIA driver or GPU: insufficient driver"]),
    ],
)
def test_simt_needs_a_driver_and_a_device(monkeypatch, answer, reasons):
    cupy = type(sys)("cupy")
    cupy.cuda = type(sys)("cupy.cuda")
    cupy.cuda.runtime = Runtime(answer)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(availability, "installed", lambda module: True)
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    availability.why_not_cuda.cache_clear()
    assert dispatch.why_not_here("simt") == reasons
    availability.why_not_cuda.cache_clear()


def test_hopper_is_asked_of_the_device_of_the_arrays(monkeypatch):
    """Beside an A100, device 0, an H100."""
    cupy = type(sys)("cupy")
    cupy.cuda = type(sys)("cupy.cuda")
    cupy.cuda.Device = lambda i: SimpleNamespace(compute_capability=("80", "90")[i])
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(availability, "why_not_cuda", list)
    monkeypatch.setattr("nbflash.cuda.ptxas.find_ptxas", lambda: "ptxas")
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    problem = check_forward(*make_qkv(1, 8, 8, 1, 1, 16, "float16")[:3], None)
    on_device = [replace(problem, device="cuda", device_id=i, alignment=16) for i in range(2)]
    expected = ["needs compute capability 9.0 (Hopper), this device has 8.0"]
    assert [dispatch.why_not("sm90", AttentionSpec(p)) for p in on_device] == [expected, []]
    (why,) = dispatch.why_not("sm90", AttentionSpec(replace(on_device[1], alignment=8)))
    assert why.endswith("q, k and v that are multiples of 16 bytes, got 8")


def test_what_the_driver_is_asked_for():
    from cuda.bindings import driver

    names = driver.CUdevice_attribute
    asked = environment._MAJOR, environment._MINOR
    assert asked == (
        names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    )


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(environment, "_PACKAGES", ("numpy", "no-such-package"))
    found = environment.versions()
    assert found["no-such-package"] == "not installed"
    assert found["numpy"] == importlib.metadata.version("numpy")


@pytest.mark.parametrize("simulated", [False, True])
def test_versions_are_those_of_the_packages_that_are_there(simulated, monkeypatch):
    """A wheel of CuPy has the CUDA version in its name, and two may be there."""
    there = {"numpy": "2.1", "cupy-cuda12x": "13.0", "cupy": "12.5"}
    monkeypatch.setattr(environment, "_version", there.get)
    monkeypatch.setattr(environment, "_driver_version", lambda: "CUDA 12.4")
    monkeypatch.setattr(availability, "simulator", lambda: simulated)
    missing = "scipy", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "ml_dtypes"
    expected = {"python": platform.python_version(), "numpy": "2.1"}
    expected |= dict.fromkeys(missing, "not installed")
    expected |= {"cupy": "cupy-cuda12x 13.0, cupy 12.5", "driver": "CUDA 12.4"}
    expected |= {"simulator": "on (NUMBA_ENABLE_CUDASIM)"} if simulated else {}
    assert environment.versions() == expected
    there.clear()
    assert environment.versions()["cupy"] == environment.versions()["numpy"] == "not installed"


def test_the_lines_are_what_is_found(monkeypatch, tmp_path):
    """In this process, whatever is installed."""
    monkeypatch.setattr(environment, "versions", lambda: {"python": "3.14", "cupy": "13.0"})
    monkeypatch.setattr(environment, "cuda_devices", lambda: ["one", "two"])
    monkeypatch.setattr(environment, "cache_size", lambda: (2_340_000, 7))
    monkeypatch.setattr(availability, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(dispatch, "why_not_here", {"simt": ["no GPU", "no CuPy"]}.get)
    lines = environment.describe()
    assert lines[:5] == [
        f"nbflash {nbflash.__version__}",
        "",
        "versions",
        "  python         3.14",
        "  cupy           13.0",
    ]
    assert lines[5:7] == ["", "devices"]
    assert lines[7].startswith("  cpu            ")
    assert lines[8:12] == ["  cuda:0         one", "  cuda:1         two", "", "implementations"]
    answers = dict(
        line.split(maxsplit=1) for line in lines[12 : 12 + len(dispatch.IMPLEMENTATIONS)]
    )
    assert answers == dict.fromkeys(dispatch.IMPLEMENTATIONS, "yes") | {
        "simt": "no: no GPU; no CuPy"
    }
    assert "BLAS of the cpu implementation" in lines
    assert lines[-3:] == ["", "kernel cache", f"  {tmp_path}: 7 files, 2.3 MB"]
