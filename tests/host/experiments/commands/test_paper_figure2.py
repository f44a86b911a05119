"""Figure 2 of the paper, end to end at tiny sizes."""

import pytest
from command_runs import assert_figure, read_csv, run

from experiments.harness import sweeps
from experiments.libraries import traffic


@pytest.fixture
def tiny(monkeypatch):
    sweep = sweeps.load("paper-figure2")
    size = {"batch": 1, "heads": 2, "head_dim": 16}
    sweep["cpu"] |= {"rounds": 3, "seconds": 0.0}
    sweep["cpu"]["quick"] = {
        "left": size | {"seqlen": 128},
        "middle": size | {"seqlen": 128, "tiles": [[32, 64], [64, 64], [128, 64]]},
        "right": size | {"seqlen": 128, "block": 32, "densities": [0.25, 1.0]},
    }
    monkeypatch.setattr("experiments.harness.sweeps.load", lambda name: sweep)


def test_figure2(tmp_path, capsys, tiny):
    status, printed, _ = run(
        capsys, "paper", "figure2", "--quick", "--device", "cpu", "--out", tmp_path
    )
    assert status == 0
    assert "R² = 1.0000" in printed  # two points
    rows = read_csv(tmp_path / "paper-figure2.csv")
    of = {panel: [x for x in rows if x["panel"] == panel] for panel in ("left", "middle", "right")}
    standard, own = of["left"]
    n, d, planes = 128, 16, 2
    # Algorithms 0 and 3: 12 n d and 11 n² elements of 4 bytes.
    assert float(standard["counted_gb"]) == planes * 4 * (12 * n * d + 11 * n * n) / 1e9
    assert float(own["counted_gb"]) < float(standard["counted_gb"])
    assert (standard["paper_gb"], own["paper_gb"]) == ("40.3", "4.4")
    assert standard["measured_gb"] == own["measured_gb"] == ""
    # One product more than the six of standard attention: S again.
    assert float(own["gflops"]) / float(standard["gflops"]) == pytest.approx(7 / 6)
    # Twice the queries of a tile, half the visits to K and V.
    once = planes * (2 * n * d * 4 + 4 * n) / 1e9
    streamed = [float(row["counted_gb"]) - once for row in of["middle"]]
    assert streamed == pytest.approx([streamed[2] * 4, streamed[2] * 2, streamed[2]])
    assert [float(row["density"]) for row in of["right"]] == [0.25, 1.0]
    assert all(float(row["error"]) <= float(row["budget"]) for row in rows)
    assert_figure(tmp_path / "paper-figure2.png", 3)


def test_traffic_by_hand():
    # n=4, d=2, float16, tiles 2 × 4: Q, O 16 bytes each; two rows of tiles read K and V, 32 bytes.
    assert traffic.forward_bytes(4, 2, 2, (2, 4)) == (16 + 2 * 32, 16 + 16)
    # O, dO; K, V; Q, dO and two statistics of 4 queries; dQ in float32 zeroed, added to, read.
    reads = 32 + 32 + 4 * (8 + 8) + 32 + 32
    assert traffic.backward_bytes(4, 2, 2, (2, 4)) == (reads, 16 + 3 * 16 + 32 + 32)
    # In two passes: nothing in float32; Q, dO and statistics once more, K and V for each row.
    reads = 32 + 32 + 4 * (8 + 8) + 32 + 32 + 2 * 32
    assert traffic.backward_bytes(4, 2, 2, (2, 4), two_passes=True) == (reads, 16 + 3 * 16)
    least = sum(x.total for x in traffic.once_bytes(4, 2, 2))
    assert least == 12 * 16 + 2 * 16
