"""Runtime against sequence length, and the paper's figures beside it, at tiny sizes."""

import pytest
from command_runs import command, read_csv, stand_in
from matplotlib.image import imread

from experiments.commands.seqlen import beside_paper, peak_ratio, run
from experiments.harness import sweeps
from experiments.harness.grid import read_cases
from nbflash.backends.reference import ReferenceExecutor

TINY = "seqlen --quick --device cpu --impl reference --seqlen 128 --seqlen 256 --head-dim 8"


def test_every_pass_of_every_mask_at_every_length(tmp_path, capsys):
    command(TINY, "--out", tmp_path)
    rows = read_csv(tmp_path / "seqlen.csv")
    # One block either side of one is dense: local needs three.
    cases = {(128, "dense"), (128, "causal"), (128, "butterfly")}
    cases |= {(256, name) for name in ("dense", "causal", "butterfly", "local-1")}
    found = {(int(row["seqlen"]), row["mask"], row["pass"]) for row in rows}
    assert found == {(*case, which) for case in cases for which in ("forward", "backward", "both")}
    assert len(rows) == len(found)
    assert {"commit", "date", "device", "driver", "numba_cuda", "cupy"} <= set(rows[0])
    for row in rows:
        assert (row["library"], row["dtype"]) == ("nbflash reference", "float32")
        assert 0 < float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"])
        if row["mask"] == "dense":
            assert float(row["time_over_dense"]) == 1
    printed = capsys.readouterr().out
    for which in ("forward", "backward", "both"):
        assert f"{which}: runtime against sequence length" in printed
    assert imread(tmp_path / "seqlen.png")[..., :3].std() > 0.02


def test_one_pass_and_one_mask_can_be_chosen(tmp_path):
    command(TINY, "--passes both --mask butterfly --dtype bfloat16 --out", tmp_path)
    rows = read_csv(tmp_path / "seqlen.csv")
    assert [(row["pass"], row["mask"], row["seqlen"]) for row in rows] == [
        ("both", "butterfly", "128"),
        ("both", "butterfly", "256"),
    ]
    assert {(row["dtype"], row["time_over_dense"]) for row in rows} == {("bfloat16", "")}


def test_the_paper_is_reported_beside_its_own_problem(tmp_path, capsys):
    options = "--paper --device cpu --impl cpu --seqlen 128 --seqlen 192 --passes forward,both"
    sizes = sweeps.load("seqlen")["paper"]
    assert (sizes["batch"], sizes["heads"], sizes["head_dim"]) == (16, 8, [64])
    command("seqlen", options, "--out", tmp_path)
    rows = read_csv(tmp_path / "seqlen-paper.csv")
    assert [(row["seqlen"], row["pass"], row["paper_ms"]) for row in rows] == [
        ("128", "forward", "0.56"),
        ("128", "both", "0.74"),
    ]
    for row in rows:
        assert (row["batch"], row["heads"], row["head_dim"], row["dtype"]) == (
            *("16", "8", "64"),
            "float16",
        )
        speedup = float(row["paper_ms"]) / float(row["median_ms"])
        assert float(row["speedup_over_paper"]) == pytest.approx(speedup)
        assert row["peak_ratio"] == row["paper_at_peak_ratio_ms"] == ""
    assert "beside FlashAttention (arXiv 2205.14135)" in capsys.readouterr().out
    assert (tmp_path / "seqlen-paper.png").exists()


def test_the_ratio_of_the_peaks_scales_the_papers_times():
    paper = sweeps.load("seqlen")["paper"]
    row = {"mask": "butterfly", "seqlen": 65536, "pass": "both", "median_ms": 10.0}
    (found,) = beside_paper([row], paper, "NVIDIA H100 80GB HBM3")
    assert found["peak_ratio"] == 989 / 312
    assert found["paper_ms"] == 50.39
    assert found["speedup_over_paper"] == 50.39 / 10
    assert found["paper_at_peak_ratio_ms"] == pytest.approx(50.39 * 312 / 989)
    assert found["speedup_at_peak_ratio"] == pytest.approx(5.039 * 312 / 989)
    (other,) = beside_paper([row | {"mask": "dense"}], paper, "NVIDIA H100 80GB HBM3")
    assert other["paper_ms"] is None
    assert peak_ratio({"A100": 2.0}, "some other device", "A100") is None


def test_the_papers_figures_are_complete():
    paper = sweeps.load("seqlen")["paper"]
    cases = read_cases(sweeps.load("seqlen"), "paper")
    assert list(cases) == [(16, 2**k, 8, 64) for k in range(7, 17)]
    assert {case.name for of in cases.values() for case in of} == {"butterfly"}
    assert cases[16, 65536, 8, 64][0].density == 10 / 512
    figures = paper["figures"]
    assert figures["seqlen"] == paper["seqlen"]
    for which, last in {"forward": 11.77, "backward": 37.04, "both": 50.39}.items():
        assert len(figures[which]) == len(figures["seqlen"])
        assert figures[which][-1] == last


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("section", ["quick", "full"])
def test_sweeps_have_every_mask_and_grow(device, section):
    sweep = sweeps.load("seqlen")
    cases = read_cases(sweep | sweep[device], section)
    lengths = sorted({shape[1] for shape in cases})
    assert lengths[-1] >= 8 * lengths[0]
    names = {case.name for of in cases.values() for case in of}
    assert names == {"dense", "causal", "butterfly", "local-1"}


def test_a_wrong_result_is_refused(tmp_path, capsys, monkeypatch):
    def wrong(self, q, k, v, out, lse):
        out.fill(1)
        lse.fill(0)

    monkeypatch.setattr(ReferenceExecutor, "forward", wrong)
    with pytest.raises(SystemExit, match="1"):
        command(TINY, "--passes forward --mask dense --out", tmp_path)
    assert "nbflash is wrong: forward, dense, d=8, N=128" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_options_that_do_not_fit(tmp_path, capsys):
    for options, message in {
        "--quick --paper": "--quick and --paper exclude each other",
        "--dtype float64": "'float64' is not one of",
        "--device cpu --mask diagonal": "expected one of dense, causal, butterfly",
        "--device cpu --seqlen 100": "no mask has room in 100: ",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            command("seqlen", options, "--out", tmp_path)
        assert message in capsys.readouterr().err


def test_a_device_is_timed_by_runs_of_calls(tmp_path, monkeypatch):
    made = []

    class Clock:
        def __init__(self, sample_ms):
            made.append(sample_ms)

        def prepare(self, call):
            return call

        def measure(self, task):
            return 2.0, task()

    stand_in(monkeypatch, Clock, {"device": "H100", "commit": "0"})
    sweep = sweeps.load("seqlen")
    sweep["paper"] |= {"batch": 1, "heads": 2, "head_dim": [16]}
    monkeypatch.setattr(sweeps, "load", lambda name: sweep)
    rows = run(tmp_path, "paper", impl="cpu", seqlens=[128])
    assert made == [2.0]
    assert [row["median_ms"] for row in rows] == [2.0, 2.0, 2.0]
    assert rows[0]["peak_ratio"] == 989 / 312
