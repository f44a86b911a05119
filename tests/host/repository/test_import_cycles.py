"""No module imports what imports it, directly or not: an order of modules, inside the rooms too.

`test_layers` has the order of the rooms. Imports inside functions count.
"""

import ast
import functools
from graphlib import CycleError, TopologicalSorter

import pytest
from test_layers import EXCEPTIONS, MODULES, SOURCES, imports

# Arrows back, inside functions alone: methods of every mask, of what is built upon masks; and a
# launch has what else is bound compiled beside it, by what compiles a single kernel.
BACK = {
    ("masks.base", "masks.algebra"),
    ("masks.base", "masks.block"),
    ("masks.base", "masks.io"),
    ("masks.base", "masks.restriction"),
    ("nbflash.cuda.launch", "nbflash.cuda.side_by_side"),
}


def named(module):
    """A package is the module that it is imported as."""
    return module.removesuffix(".__init__")


KNOWN = set(map(named, MODULES))


def module_of(name):
    """The module of ours that an imported name is, or is taken from; empty if there is none."""
    while name and name not in KNOWN:
        name = name.rpartition(".")[0]
    return name


@functools.cache
def arrows(module, source):
    """(Module that is imported, inside a function) of every import of ours."""
    found = ((module_of(name), lazy) for name, _, lazy in imports(ast.parse(source), module))
    return {(there, lazy) for there, lazy in found if there not in ("", named(module))}


def graph_of(sources):
    """Module to what it imports, but for `BACK` and the exceptions of the floors."""
    return {
        named(module): {
            there
            for there, is_lazy in arrows(module, source)
            if not ((named(module), there) in BACK and is_lazy)
            and (named(module), there) not in EXCEPTIONS
        }
        for module, source in sources.items()
    }


def cycle(sources):
    """Modules of which each is imported by the next; empty if there is none."""
    try:
        TopologicalSorter(graph_of(sources)).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.fixture(scope="module")
def sources():
    texts = (path.read_text(encoding="utf-8") for path in SOURCES)
    return dict(zip(MODULES, texts, strict=True))


def test_no_module_imports_what_imports_it(sources):
    assert cycle(sources) == []


def test_every_arrow_back_is_there(sources):
    found = {(named(m), there) for m in sources for there, lazy in arrows(m, sources[m]) if lazy}
    assert found >= BACK


TILE, FORWARD = "nbflash.cuda.tile", "nbflash.backends.sm90.forward"
PLANTED = {
    "the-other-way": (f"{FORWARD}.rings", f"from {FORWARD}.mainloop_overlap import make_halves"),
    "a-module-of-a-package": (f"{TILE}.tracing", f"from {TILE} import ring"),
    "relative": (f"{TILE}.tracing", "from .ring import make_ring"),
    "inside-a-function": (f"{TILE}.tracing", f"def f():\n    from {TILE} import ring"),
    "of-three": (f"{FORWARD}.epilogue", f"from {FORWARD} import kernel"),
    "by-its-package": ("masks.tiles", "from masks import causal"),
    "an-arrow-back-at-the-top": ("masks.base", "from masks.block import Block"),
}


@pytest.mark.parametrize(("module", "line"), PLANTED.values(), ids=PLANTED)
def test_planted_cycle_is_reported(sources, module, line):
    found = cycle(sources | {module: f"{sources[module]}\n{line}\n"})
    assert module in found
