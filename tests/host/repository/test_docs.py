"""The pages of the site: their snippets run, and they name what is public."""

import re

import numpy as np
import pytest
import scipy.sparse
from snippets import DOCS, ROOT, Snippet, pages, run, snippets

import masks
import nbflash
import nbflash.scores
import nbflash.testing
from experiments.harness.patterns import PATTERNS

PAGES = pages() | {"README": ROOT / "README.md"}


@pytest.mark.parametrize("name", PAGES)
def test_snippets_run(name, capsys, monkeypatch):
    monkeypatch.delenv("NBFLASH_CACHE_DIR", raising=False)  # a page prints its default
    assert run(PAGES[name], capsys) > 0


def test_a_snippet_has_its_line_and_what_it_prints(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n```bash\nls\n```\n")
    assert snippets(page) == [Snippet(3, "print(1)\n", "1\n")]
    assert run(page, capsys) == 1


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [("print(1)", AssertionError, "line 1: prints\n1\n"), ("1 / 0", ZeroDivisionError, "division")],
)
def test_a_wrong_snippet_fails(tmp_path, capsys, code, error, says):
    page = tmp_path / "page.md"
    page.write_text(f"```python\n{code}\n```\n```text\n2\n```\n")
    with pytest.raises(error, match=says):
        run(page, capsys)


def test_code_for_cupy_runs_on_numpy(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("```python\nimport cupy as cp\nprint(cp.ones(2).sum())\n```\n")
    assert run(page, capsys) == 1


def documented() -> set[str]:
    """Names that the API pages give, of their modules."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.rst"))
    return set(re.findall(r"^\.\. (?:auto\w+|py:data):: ([\w.]+)", text, flags=re.M))


def test_every_public_name_is_on_an_api_page():
    public = {*nbflash.__all__, *masks.__all__} - {"scores", "selection"}
    public |= {"softcap", "alibi", "relative", "bias", "custom", "compose", "Score"}
    assert public - documented() == set()
    modules = {f"nbflash.{name}" for name in ("scores", "selection", "distributed", "testing")}
    assert modules <= documented()


MASKS = (DOCS / "masks.md").read_text(encoding="utf-8")
GALLERY = MASKS.partition("## Gallery")[2]
EXPRESSIONS = re.findall(r"^(?:\| )?`(masks\.\w+\(.+?\))`(?: \||:)", GALLERY, flags=re.M)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_mask_of_the_gallery_can_be_made(expression):
    mask = eval(expression, {"masks": masks, "np": np, "scipy": scipy})
    assert mask.shape == (4096, 4096)
    assert all(0 < plane.tiles(128, 128).kinds.nnz <= 32 * 32 for plane in mask.planes)


def test_the_gallery_has_every_pattern_and_every_generator():
    drawn = re.findall(r"^### (\w+)\n\n`masks\.\1\(.+?^:::\{mask\} \1$", MASKS, flags=re.M | re.S)
    assert sorted(drawn) == sorted(pattern.name for pattern in PATTERNS)
    generators = {name for name in masks.__all__ if name.islower()}
    assert {name for name in generators if not re.search(rf"\b{name}\b", MASKS)} == set()
    assert len(EXPRESSIONS) >= len(PATTERNS) + 4
