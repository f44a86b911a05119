"""The pages of the site: their snippets run, and they name what is public."""

import re

import pytest
from snippets import DOCS, ROOT, Snippet, pages, run, snippets

import masks
import nbflash
import nbflash.scores
import nbflash.testing

PAGES = pages() | {"README": ROOT / "README.md"}


@pytest.mark.parametrize("name", PAGES)
def test_snippets_run(name, capsys):
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
    public = {*nbflash.__all__, *masks.__all__} - {"scores"}
    public |= {"softcap", "alibi", "relative", "bias", "custom", "compose", "Score"}
    assert public - documented() == set()
    assert {"nbflash.scores", "nbflash.testing"} <= documented()
