"""The gallery of masks, and its counts against closed forms."""

import pytest
from command_runs import PROVENANCE, assert_figure, read_csv, run

import masks
from experiments.commands.gallery import row_of
from experiments.harness.errors import OutOfBudget
from experiments.harness.patterns import PATTERNS


def test_masks_gallery(tmp_path, capsys):
    options = "--seqlen 64 --block 8 --only butterfly --only tree --only axial"
    status, out, _ = run(capsys, "masks", options, "--out", tmp_path)
    assert status == 0
    rows = {row["pattern"]: row for row in read_csv(tmp_path / "masks.csv")}
    assert list(rows) == ["butterfly", "axial", "tree"]
    assert rows["butterfly"]["cells"] == rows["butterfly"]["closed_form"] == str(64 * 8 * 4)
    assert rows["butterfly"]["layers"] == "3"
    assert rows["axial"]["cells"] == str(64 * 15)
    assert set(rows["tree"]) > PROVENANCE
    assert "██" in out
    assert_figure(tmp_path / "masks.png", 3)


@pytest.mark.parametrize(("n", "block"), [(64, 8), (96, 8), (160, 16), (336, 12)])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_every_pattern_has_its_closed_form(pattern, n, block):
    mask = pattern.build(n, block)
    row = row_of(pattern, mask, n, block)
    assert row["cells"] == row["closed_form"] == mask.dense().sum()


def test_every_generator_is_in_the_gallery():
    other = {"from_dense", "from_function", "from_scipy", "per_head", "per_batch"}
    other |= {"coverage", "load", "save", "reorder", "restrict", "documents_from_cu_seqlens"}
    generators = {name for name in masks.__all__ if name.islower()} - other
    assert {pattern.name for pattern in PATTERNS} == generators


def test_a_count_that_differs_from_its_closed_form_is_refused():
    causal = next(pattern for pattern in PATTERNS if pattern.name == "causal")
    with pytest.raises(OutOfBudget, match=r"causal: 1552 cells.*gives 2080"):
        row_of(causal, masks.window(64, left=31, right=0), 64, 8)
