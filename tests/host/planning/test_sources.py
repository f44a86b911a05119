"""What decides a cubin: none of the definitions that a kernel is made of may be left out."""

import ast
import importlib
import sys
import textwrap

import pytest

from nbflash.cuda import sources
from nbflash.cuda.sources import BESIDES, WHOLE, definitions_of, digest_of

HOPPER = "nbflash.backends.sm90"
SCORES = {("nbflash.cuda.tile.score", "make_score"), ("nbflash.definitions.score_functions", "one")}
COMMON = {
    ("masks.tiles", "FULL"),
    ("nbflash.cuda.ptx._asm", "inlined"),
    ("nbflash.cuda.tile.tracing", "unrolled"),
    ("nbflash.definitions.constants", "LOG2_E"),
}
KERNELS = {
    ("nbflash.backends.simt.forward", "make_fwd_simt"): {
        ("nbflash.cuda.tile.simt.gemm", "make_gemm_tn"),
        *SCORES,
    },
    (f"{HOPPER}.forward.kernel", "make_fwd_sm90"): {
        (f"{HOPPER}.shared.dropout", "make_drawing"),
        ("nbflash.definitions.philox", "philox"),
        *SCORES,
    },
    (f"{HOPPER}.backward.kernel", "make_bwd_sm90"): {("nbflash.cuda.ptx.wgmma", "wgmma"), *SCORES},
    (f"{HOPPER}.decode.kernel", "make_decode_sm90"): {
        ("nbflash.cuda.tile.mma.quantised_gemm", "make_stored_scores")
    },
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel[1])
def test_definitions_of_a_kernel(kernel):
    found = set(definitions_of(kernel))
    assert COMMON | KERNELS[kernel] | {kernel} <= found
    modules = {module for module, _ in found}
    assert not {"nbflash", "nbflash.api", "nbflash.cuda.launch"} & modules
    assert not [name for name in modules if "simulator" in name or "planning" in name]


FILES = {
    "kernel": '''
        """A kernel."""
        import math as mathematics
        from made import tools
        from made.parts import COUNT as N, helper
        from made.parts import Tile
        if N:
            from made.more import chosen

        def make(config):
            """What it does."""
            # how
            def kernel(x):
                return helper(x) + tools.scale(x) + mathematics.sqrt(x) + chosen(x)
            return kernel

        def other():
            from made import unused
            return 2

        class Config(Tile):
            pass
        ''',
    "tools": "def scale(x, by=3):\n    return by * x\n\ndef unused(x):\n    return x",
    "parts": '''
        from made import tools
        COUNT = 1

        class Tile:
            """Of rows."""
            rows = 4

        def helper(x):
            return x - _deeper(x)

        def _deeper(x):
            return len(str(tools))
        ''',
    "more": "import warnings\nwarnings.simplefilter('default')\n\ndef chosen(x):\n    return -x",
    "unused": "assert True",
}
# What is replaced in which file.
NO_CHANGE = {
    "comment": ("kernel", "# how", "# why"),
    "docstring": ("kernel", "What it does.", "What it does best."),
    "docstring-of-a-class": ("parts", "Of rows.", "Of columns."),
    "docstring-of-a-module": ("kernel", "A kernel.", "Kernels."),
    "layout": ("kernel", "def make(config):", "def make(\n    config,\n):"),
    "what-nothing-uses": ("kernel", "return 2", "return 3"),
    "imported-inside-a-function": ("unused", "assert True", "assert 1"),
}
CHANGE = {
    "instruction": ("kernel", "helper(x) +", "helper(x) -"),
    "constant-default": ("tools", "by=3", "by=4"),
    "imported-module": ("kernel", "import math as", "import cmath as"),
    "imported-name": ("parts", "COUNT = 1", "COUNT = 2"),
    "class-beneath": ("parts", "rows = 4", "rows = 5"),
    "deeper": ("parts", "len(str", "len(repr"),
    "module-as-a-value": ("tools", "def unused(x):\n    return x", "def unused(x):\n    return -x"),
    "import-under-if": ("more", "return -x", "return +x"),
    "what-a-module-does-besides": ("more", "'default'", "'ignore'"),
    "condition": ("kernel", "if N:", "if not N:"),
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Write the package ``made`` with a change, and digest its kernel."""
    monkeypatch.setattr(sources, "OURS", ("made",))
    monkeypatch.syspath_prepend(tmp_path)

    def forget():
        for cached in (sources._statements, sources._is_module, sources.file_digest):
            cached.cache_clear()
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.partition(".")[0] == "made"]:
            del sys.modules[name]

    def digest(file=None, old="", new=""):
        folder = tmp_path / "made"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
        for name, text in FILES.items():
            text = textwrap.dedent(text)
            assert name != file or old in text
            (folder / f"{name}.py").write_text(text.replace(old, new) if name == file else text)
        forget()
        return digest_of(("made.kernel", "make"), ("made.kernel", "Config"))

    yield digest
    forget()


@pytest.mark.parametrize("change", NO_CHANGE)
def test_what_is_not_executed_does_not_count(change, planted):
    first, second = planted(), planted(*NO_CHANGE[change])
    assert first.digest == second.digest
    assert list(second.modules) == sorted(second.modules)
    assert not first.is_current or change == "imported-inside-a-function"
    assert second.is_current


@pytest.mark.parametrize("change", CHANGE)
def test_what_is_executed_counts(change, planted):
    first, second = planted(), planted(*CHANGE[change])
    assert first.digest != second.digest
    assert not first.is_current
    assert planted() == first


def test_values_that_are_false_are_told_apart():
    texts = "x = 0", "x = False", "x = None", "x = ''", "x = 0j"
    found = {repr(sources._executed(ast.parse(text))) for text in texts}
    assert len(found) == len(texts)


def test_the_unit_is_a_definition(planted):
    planted()
    found = definitions_of(("made.kernel", "make"))
    own = {name for module, name in found if module == "made.kernel"}
    assert own == {"make", "chosen", "mathematics", BESIDES}
    assert ("made.tools", WHOLE) in found  # a module that is handed on
    assert ("made.parts", "Tile") not in found


def test_names_of_a_package_are_its_modules(planted):
    """A name that a module does not bind may be any of it; ``__name__`` is what it does besides."""
    planted()
    assert {("made.tools", WHOLE), ("made.tools", "scale")} <= {*definitions_of(("made", "tools"))}
    assert {("made.tools", "scale")} <= {*definitions_of(("made.tools", "nothing"))}
    found = {*definitions_of(("made.tools", "__name__"))}
    assert found == {("made.tools", "__name__"), ("made.tools", BESIDES)}


def test_files_that_were_written_since_are_not_what_runs(planted, monkeypatch):
    modules = planted().modules
    assert not sources.are_as_imported(modules)
    monkeypatch.setattr(sources, "_STARTED", sources._STARTED + 1e6)
    assert sources.are_as_imported(modules)
