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
    if items and not SANITIZING and not config.option.collectonly:
        from compile_ahead import compile_ahead
        from device_runs import COMBINATIONS

        simt, sm90 = False, set()
        for item in items:
            given = _parameters(item)
            if given["impl"] == "sm90":
                sm90.add((given.get("dtype", "float16"), given.get("head_dim", 64)))
            else:
                simt = True
        compile_ahead(COMBINATIONS if simt else (), sorted(sm90))


def _parameters(item):
    """Those of a test, with those of the ``case`` among them; of which implementation it is."""
    impl = "sm90" if item.path.name.startswith("test_gpu_sm90") else "simt"
    given = item.callspec.params if hasattr(item, "callspec") else {}
    case = vars(given["case"]) if "case" in given else {}
    return {"impl": impl} | given | case


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
    from nbflash import planning, sm90_backward
    from nbflash.kernels.bwd_sm90_config import MOST_HEAD_DIM

    def only_way(problem, mask, score=None, dropout=0.0):
        return bool(dropout) or problem.head_dim > MOST_HEAD_DIM

    # A plan has decided for good.
    monkeypatch.setattr(planning, "_plans", planning._Cache(planning._LIMIT))
    monkeypatch.setattr(sm90_backward, "in_two_passes", only_way)
