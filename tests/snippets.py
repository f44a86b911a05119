"""The Python of a documentation page, run in order in one namespace, as a reader would run it.

A block that imports CuPy runs with NumPy in its place. A block of text that follows one of Python
is what it prints. Tracebacks have the lines of the page.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n*```text\n(?P<prints>.*?)^```$)?", re.M | re.S
)

# What a page needs, other than nbflash on the CPU.
FRAMEWORKS = ("huggingface", "jax", "torch")
SIMULATOR = ("simulator",)


class Snippet(NamedTuple):
    line: int
    code: str
    prints: str | None


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(text.count("\n", 0, found.start("code")), found["code"], found["prints"])
        for found in FENCE.finditer(text)
    ]


def pages(names=None) -> dict[str, Path]:
    """The pages of these names; without names those that need nothing else."""
    special = (*FRAMEWORKS, *SIMULATOR)
    found = {path.stem: path for path in sorted(DOCS.glob("*.md"))}
    return {
        name: path
        for name, path in found.items()
        if (name in names if names else name not in special and snippets(path))
    }


def run(page: Path, capsys) -> int:
    """Run all snippets of a page and compare what they print; how many there were."""
    namespace = {"__name__": page.stem}
    found = snippets(page)
    for snippet in found:
        code = snippet.code.replace("import cupy as cp", "import numpy as cp")
        source = "\n" * snippet.line + code
        exec(compile(source, str(page), "exec", dont_inherit=True), namespace)
        printed = capsys.readouterr().out
        if snippet.prints not in (None, printed):
            raise AssertionError(f"{page.name}, line {snippet.line}: prints\n{printed}")
    return len(found)
