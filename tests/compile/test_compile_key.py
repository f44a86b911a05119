"""What a cubin is known by: planted changes of kernels and of score functions, and what runs."""

import inspect
import sys
from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.cuda.core import bytecode
from score_cases import code_of

import nbflash
from nbflash import scores
from nbflash.backends.simt.configs import forward_config
from nbflash.backends.simt.forward import fwd_simt_spec
from nbflash.backends.simt.row_statistics import RowConfig, delta_simt_spec
from nbflash.backends.sm80.config import forward_configs as forward_sm80
from nbflash.backends.sm80.forward import fwd_sm80_spec
from nbflash.backends.sm90.forward.config import forward_configs
from nbflash.backends.sm90.forward.kernel import fwd_sm90_spec
from nbflash.cuda import kernel_key, launch, score_params, sources
from nbflash.cuda.ptx import _shared
from nbflash.cuda.tile.score import ScoreCode

HERE = Path(nbflash.__file__).parents[1]
SIMT = forward_config("float32", 64, vectors=True, smem_limit=99 << 10)
SPECS = {
    "simt": fwd_simt_spec(SIMT),
    "delta": delta_simt_spec(RowConfig("float32", 4)),
    "sm80": fwd_sm80_spec(forward_sm80("bfloat16", 64, smem_limit=99 << 10)[0]),
    "sm90": fwd_sm90_spec(forward_configs("bfloat16", 64)[0]),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NBFLASH_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache" / "cubins"
    forget()


def forget():
    """As a process that begins."""
    for cached in (sources._statements, sources.file_digest, kernel_key._digest_of_sources):
        cached.cache_clear()


def ran_while(spec, monkeypatch):
    """(module, name at its top level) of all functions of ours that ran or were compiled."""
    codes, identity = set(), bytecode.FunctionIdentity.from_function

    def watch(frame, event, _):
        if event == "call":
            codes.add(frame.f_code)

    def compiled(pyfunc):
        codes.add(inspect.unwrap(getattr(pyfunc, "py_func", pyfunc)).__code__)
        return identity(pyfunc)

    monkeypatch.setattr(bytecode.FunctionIdentity, "from_function", compiled)
    monkeypatch.setattr(_shared, "_known", {})  # what was made before would not run
    sys.setprofile(watch)
    try:
        launch.compile_ptx(spec, (9, 0))
    finally:
        sys.setprofile(None)
    return {at for code in codes if (at := definition_of(code))}


def definition_of(code):
    """Where a code object is from; None if not from ours, nor from a definition."""
    path = Path(code.co_filename)
    if not path.is_relative_to(HERE / "nbflash") and not path.is_relative_to(HERE / "masks"):
        return None
    module = ".".join(path.relative_to(HERE).with_suffix("").parts)
    name = code.co_qualname.partition(".")[0]
    return None if name.startswith("<") else (module, name)


@pytest.mark.parametrize("kernel", ["delta", "sm80", "sm90"])
def test_all_that_runs_while_a_kernel_is_compiled_counts(kernel, monkeypatch):
    """And functions of ours that are compiled into it."""
    spec = SPECS[kernel]
    roots = [(x.__module__, x.__name__) for x in (spec.make, type(spec.config))]
    counts = set(sources.definitions_of(("nbflash.cuda.launch", "compile_cubin"), *roots))
    ran = ran_while(spec, monkeypatch)
    assert (spec.make.__module__, spec.make.__name__) in ran
    of_the_key = {("nbflash.cuda.kernel_spec", "KernelSpec")}  # its attributes
    assert ran - counts == of_the_key


# Module, what is replaced by what, and whether it changes each kernel.
CHANGES = {
    "comment": ("nbflash.cuda.tile.tracing", "\n", "\n# another comment\n", ()),
    "docstring": ("nbflash.cuda.tile.tracing", "Sum left to right.", "Sum.", ()),
    "beside-what-is-used": (
        "nbflash.cuda.tile.guarded_max",
        "def guarded(",
        "X = 1\n\n\ndef guarded(",
        (),
    ),
    "score-function": ("nbflash.definitions.score_functions", "math.tanh(", "math.tan(", ()),
    "launch": ("nbflash.cuda.launch", "KERNELS = 1024", "KERNELS = 512", ()),
    "compile": ("nbflash.cuda.launch", "spec.maps)", "spec.maps + 0)", tuple(SPECS)),
    "config": (
        "nbflash.backends.sm80.config",
        "return WARP * self.warps",
        "return self.warps * WARP",
        ("sm80",),
    ),
    "deep": ("nbflash.cuda.ptx.wgmma", "wait_group", "wait_group ", ("sm90",)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_planted_change_counts_where_it_is_used(change, monkeypatch):
    module, old, new, changed = CHANGES[change]
    before = {name: kernel_key.of(spec, (9, 0)) for name, spec in SPECS.items()}
    source = sources.source_of(module)
    assert old in source
    given = sources.source_of
    monkeypatch.setattr(
        sources, "source_of", lambda m: source.replace(old, new, 1) if m == module else given(m)
    )
    forget()
    after = {name: kernel_key.of(spec, (9, 0)) for name, spec in SPECS.items()}
    assert {name for name in SPECS if before[name] != after[name]} == set(changed)


def test_a_measured_speed_and_another_architecture():
    spec = SPECS["sm90"]
    key = kernel_key.of(spec, (9, 0))
    faster = replace(spec, config=replace(spec.config, speed=2.0 * spec.config.speed))
    assert (faster, kernel_key.of(faster, (9, 0))) == (spec, key)
    assert kernel_key.of(spec, (10, 0)) != key
    assert kernel_key.of(replace(spec, config=replace(spec.config, k_stages=2)), (9, 0)) != key


def test_an_edited_comment_compiles_nothing(monkeypatch, compiled):
    """And an edited instruction does."""
    spec, module = SPECS["delta"], SPECS["delta"].make.__module__
    first, given = launch.cached_cubin(spec, (8, 0)), sources.source_of

    def edited(old, new):
        source = given(module)
        assert old in source
        monkeypatch.setattr(
            sources, "source_of", lambda m: source.replace(old, new) if m == module else given(m)
        )
        forget()
        return launch.cached_cubin(spec, (8, 0))

    assert edited("\n", "\n# a comment\n") == first
    assert compiled.count("compile_cubin") == 1
    edited("row < rows", "row <= rows")
    assert compiled.count("compile_cubin") == 2


@pytest.fixture
def compiled(monkeypatch):
    """The specs that were compiled, and the functions that were checked."""
    found = []
    for module, name in ((launch, "compile_cubin"), (score_params.cuda, "compile_ptx")):
        real = getattr(module, name)

        def noted(*given, real=real, name=name, **how):
            found.append(name)
            return real(*given, **how)

        monkeypatch.setattr(module, name, noted)
    return found


OWN = """
    import math
    from numba import cuda

    WEIGHT = 0.5

    @cuda.jit(device=True)
    def helper(x):
        return x + WEIGHT

    def make(step):
        def fn(s, b, h, q_idx, kv_idx):
            # a comment
            return helper(s) + step * q_idx + math.sqrt(4.0)
        return fn

    fn = make(1)
"""
OWN_CHANGES = {
    "a constant": ("math.sqrt(4.0)", "math.sqrt(9.0)"),
    "a variable around it": ("make(1)", "make(2)"),
    "what it calls": ("x + WEIGHT", "x - WEIGHT"),
    "a global of what it calls": ("WEIGHT = 0.5", "WEIGHT = 0.25"),
}


def key_of(fn):
    code = ScoreCode(((fn, None),), ((),), (None,))
    return kernel_key.of(fwd_simt_spec(replace(SIMT, score=code)), (8, 0))


@pytest.mark.parametrize("change", OWN_CHANGES)
def test_a_users_function_is_known_by_its_content(change, load):
    key = key_of(load(OWN).fn)
    assert key is not None
    assert key_of(load(OWN.replace("# a comment", "# another\n")).fn) == key
    assert key_of(load(OWN.replace(*OWN_CHANGES[change])).fn) not in (None, key)


def test_what_was_compiled_with_other_globals_is_not_known(load):
    module = load(OWN)
    assert key_of(module.fn) is not None
    module.WEIGHT = 7.0
    assert key_of(module.fn) is None
    module.WEIGHT = 0.5
    assert key_of(module.fn) is not None
    with_array = "import numpy as np\nX = np.zeros(3)\ndef fn(s, *_): return s + X[0]"
    assert key_of(load(with_array).fn) is None


@pytest.mark.parametrize(("weight", "files"), [(0.5, 1), (7.0, 0)])
def test_what_changes_while_it_is_compiled_is_not_kept(weight, files, load, folder, monkeypatch):
    module = load("WEIGHT = 0.5\ndef fn(s, *_): return s + WEIGHT")

    def compile_cubin(spec, capability):
        module.WEIGHT = weight
        return b"cubin"

    monkeypatch.setattr(launch, "compile_cubin", compile_cubin)
    code = ScoreCode(((module.fn, None),), ((),), (None,))
    spec = fwd_simt_spec(replace(SIMT, score=code))
    assert launch.cached_cubin(spec, (8, 0)) == b"cubin"
    assert len(list(folder.glob("*.cubin"))) == files


def test_a_kernel_of_a_users_function_is_compiled_once(load, compiled):
    """Its check by itself, too."""

    def cubin(source):
        before = len(compiled)
        code = code_of(scores.custom(load(source).fn))
        spec = fwd_simt_spec(replace(SIMT, score=code))
        return launch.cached_cubin(spec, (9, 0)), compiled[before:]

    first, done = cubin(OWN)
    assert done[0] == "compile_ptx"
    assert "compile_cubin" in done
    assert cubin(OWN) == (first, [])
    changed, done = cubin(OWN.replace("4.0", "9.0"))
    assert changed != first
    assert "compile_cubin" in done
    assert np.array_equal(cubin(OWN)[0], first)


def test_a_function_that_was_compiled_before_has_no_key():
    """Of which globals its code is, nobody knows."""
    fresh, compiled = (numba.njit(lambda x: 2 * x) for _ in range(2))
    compiled(1.0)
    assert kernel_key.fresh_content(fresh) is not None
    fresh(1.0)
    assert kernel_key.fresh_content(fresh) is not None  # which it was seen before
    assert kernel_key.fresh_content(compiled) is None
