"""The page on the simulator: its example runs."""

import pytest
from snippets import SIMULATOR, pages, run

PAGES = pages(SIMULATOR)


@pytest.mark.parametrize("name", SIMULATOR)
def test_snippets_run(name, capsys):
    assert run(PAGES[name], capsys) > 0
