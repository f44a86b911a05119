"""Figure 3 of the paper, end to end at tiny sizes."""

from dataclasses import replace

import pytest
import torch
from paper_runs import read_csv, run, shrink

import masks
from experiments.commands.paper.figure3 import paper_mb, paper_ms
from experiments.harness import sweeps
from experiments.papers import methods
from experiments.papers.methods import METHODS, PATTERNS, Problem, butterfly

COMMAND = ("figure3", "--quick", "--device", "cpu")


@pytest.fixture
def tiny(monkeypatch, one_thread):
    sizes = {"seqlen": [256], "variants": ["mask"], "passes": ["forward"]}
    shrink(monkeypatch, "paper-figure3", "quick", rounds=1, seconds=0.0, **sizes)


def test_every_method(tmp_path, capsys, tiny):
    """What has a mask is held to it; what a CPU has no kernel for is said so."""
    assert run(*COMMAND, "--out", tmp_path) == 0
    rows = {row["method"]: row for row in read_csv(tmp_path / "paper-figure3.csv")}
    assert list(rows) == list(METHODS)
    failed = {name for name, row in rows.items() if row["status"]}
    assert failed == {"sdpa-efficient", "sdpa-cudnn"}
    assert all(float(row["median_ms"]) > 0 for row in rows.values() if not row["status"])
    assert "forward, mask: ms" in capsys.readouterr().out
    assert (tmp_path / "paper-figure3.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["butterfly", *PATTERNS])
def test_sparse_methods_of_nbflash_attend_their_mask(name):
    """At a length where it is not dense."""
    n = 2048
    q, k, v = torch.randn(3, 1, 1, n, 8, dtype=torch.float64)
    got = METHODS[f"nbflash-{name}"].make(Problem(n, 8, 1))(q, k, v)
    attended = torch.from_numpy({"butterfly": butterfly, **PATTERNS}[name](n).dense())
    assert not attended.all()
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attended)
    torch.testing.assert_close(got, want)


def test_a_run_goes_on(tmp_path, tiny, capsys):
    some = ("--method", "pytorch", "--method", "nbflash", "--out", tmp_path)
    assert run(*COMMAND, "--minutes", 1e-9, *some) == 0
    assert not (tmp_path / "paper-figure3.csv").exists()
    assert run(*COMMAND, *some[:2], *some[4:]) == 0
    first = read_csv(tmp_path / "paper-figure3.csv")
    assert run(*COMMAND, "--resume", *some) == 0
    rows = read_csv(tmp_path / "paper-figure3.csv")
    assert rows[:1] == first
    assert [row["method"] for row in rows] == ["pytorch", "nbflash"]


def test_out_of_memory_is_a_result(tmp_path, capsys, tiny, monkeypatch):
    def make(problem):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(METHODS, "local", replace(METHODS["local"], make=make))
    some = ("--method", "local", "--method", "nbflash", "--out", tmp_path)
    assert run(*COMMAND, *some) == 0
    assert read_csv(tmp_path / "paper-figure3.csv")[0]["status"] == "out of memory"
    assert "OOM" in capsys.readouterr().out


def test_a_wrong_result_is_refused(tmp_path, capsys, tiny, monkeypatch):
    wrong = replace(METHODS["nbflash"], mask=lambda n: masks.causal(n))
    monkeypatch.setitem(METHODS, "nbflash", wrong)
    assert run(*COMMAND, "--method", "nbflash", "--out", tmp_path) == 1
    assert "out" in capsys.readouterr().err


def test_unknown_methods(tmp_path, capsys, tiny):
    assert run(*COMMAND, "--method", "mamba", "--out", tmp_path) == 2
    assert "--method mamba: expected one of pytorch" in capsys.readouterr().err


def test_scores_that_do_not_fit_are_left_out(tmp_path, capsys, tiny, monkeypatch):
    shrink(monkeypatch, "paper-figure3", "quick", seqlen=[256], most_score_bytes=2**10)
    assert run(*COMMAND, "--method", "pytorch", "--out", tmp_path) == 0
    rows = read_csv(tmp_path / "paper-figure3.csv")
    assert {row["status"] for row in rows} == {"left out: 0.0 GB of scores"}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_sparse_and_made_of_whole_blocks(name):
    """As FlexAttention is given them: no token of a live block is hidden."""
    tiles = PATTERNS[name](4096).tiles(methods.BLOCK)
    assert (tiles.kinds.data == masks.FULL).all()
    assert tiles.kinds.nnz <= 0.45 * 32 * 32


def test_the_paper_s_figures():
    paper = sweeps.load("paper-figure3")["paper"]
    row = {"variant": "", "pass": "both", "method": "nbflash", "seqlen": "65536"}
    assert paper_ms(paper, row) == 7492.85
    assert paper_mb(paper, row) == 13376
    assert paper_ms(paper, row | {"method": "pytorch"}) is None  # out of memory
    assert paper_ms(paper, row | {"variant": "dropout", "method": "local"}) is None
    for variant in ("", "mask", "dropout", "dropout mask"):
        for printed in paper[variant].values():
            assert set(printed) <= set(METHODS)
