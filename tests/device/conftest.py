"""The device tier: the kernels on a GPU. Without one it fails; the Makefile leaves it out."""

import os
import warnings

import pytest

# Warnings of other packages are theirs to mend; ours are errors, see setup.cfg.
FOREIGN = ("cupy", "cupyx", "cuda", "numba", "torch")


def _missing():
    """Why this machine cannot run the tier, or an empty string."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        return "Numba's CUDA simulator is on: unset NUMBA_ENABLE_CUDASIM"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import cupy
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no usable driver or GPU: {error}"
    return "" if count else "no CUDA device is visible"


if reason := _missing():
    raise pytest.UsageError(f"tests/device needs a GPU and CuPy: {reason}")

SANITIZING = bool(os.environ.get("NBFLASH_SANITIZE"))
if SANITIZING:
    import cupy

    cupy.cuda.set_allocator(None)  # the pool hides what lies outside an allocation
    cupy.cuda.set_pinned_memory_allocator(None)


def pytest_configure(config):
    for package in FOREIGN:
        config.addinivalue_line("filterwarnings", rf"default:::{package}(\..*)?")


@pytest.hookimpl(trylast=True)  # behind -k
def pytest_collection_modifyitems(config, items):
    """Compile what the tests will need on all cores, before the first of them waits for it."""
    if not items or SANITIZING or config.option.collectonly:
        return
    from compile_ahead import compile_ahead, once

    from nbflash.cuda.device import cuda_device

    def work():
        calls = dict.fromkeys(call for item in items for call in _kernels(item))
        specs = dict.fromkeys(spec for of, *given in calls for spec in of(*given))
        compile_ahead(specs, cuda_device(0).capability)

    if worker := getattr(config, "workerinput", None):  # of pytest-xdist
        once(worker["testrunuid"], work)
    else:
        work()


def _kernels(item):
    """Those that a test may need, by what its module says, or by its parameters and its case.

    Every tuple is a function of `compile_ahead` and what it takes.
    """
    from compile_ahead import SPECS, problem_of, simt_specs
    from device_runs import COMBINATIONS

    given = item.callspec.params if hasattr(item, "callspec") else {}
    if hasattr(item.module, "kernels"):
        return item.module.kernels(**given)
    given = {"impl": "simt"} | given | (vars(given["case"]) if "case" in given else {})
    if given["impl"] == "simt":
        return [(simt_specs, problem_of(*combination)) for combination in COMBINATIONS]
    sizes = given.get("dtype", "float16"), given.get("head_dim", 64)
    return [(SPECS[given["impl"]], problem_of(*sizes, scale=scale)) for scale in (1.0, -1.0)]


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Every allocation starts as NaN, so that nothing may rest on what was there before."""
    if SANITIZING:
        yield
        return
    import cupy
    from device_runs import poisoned_block

    with cupy.cuda.using_allocator(poisoned_block):
        yield


@pytest.fixture
def one_pass(monkeypatch):
    """The Hopper backward takes one pass wherever there is one, however short the rows."""
    from nbflash.backends.sm90.backward import choice
    from nbflash.planning import cache

    def only_two_passes(spec, score=None):
        return choice.one_pass_config(spec, score) is None

    # A plan has decided for good.
    monkeypatch.setattr(cache, "plans", cache.PlanCache())
    monkeypatch.setattr(choice, "in_two_passes", only_two_passes)
