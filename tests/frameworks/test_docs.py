"""The pages on the frameworks: their examples run."""

import pytest
from snippets import FRAMEWORKS, pages, run

PAGES = pages(FRAMEWORKS)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_snippets_run(name, capsys):
    assert run(PAGES[name], capsys) > 0
