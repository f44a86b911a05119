"""Tables and figure of nbflash beside other libraries."""

from experiments.harness.passes import FORWARD
from experiments.report.peers_report import draw, ratios, show_ratios, show_rows


def rows_of():
    speeds = {"nbflash sm90": 600.0, "flex-attention": 300.0, "sdpa-flash": 400.0}
    rows = [
        {"pass": FORWARD, "head_dim": d, "seqlen": 8192, "mask": mask, "library": name}
        | {"tflops": speed if d == 128 else 75.0, "median_ms": 1.0, "p10_ms": 0.9, "p90_ms": 1.1}
        | {"error": 2e-3, "dtype": "bfloat16", "batch": 2, "heads": 16}
        for d in (64, 128)
        for mask in ("dense", "butterfly")
        for name, speed in speeds.items()
        if mask == "dense" or name != "sdpa-flash"
    ]
    return [row | {"device": "GPU", "commit": "0"} for row in rows]


def test_ratios_compare_the_same_case(capsys):
    found = ratios(rows_of())
    assert found[FORWARD, 128, 8192, "dense"] == {"flex-attention": 2.0, "sdpa-flash": 1.5}
    assert found[FORWARD, 64, 8192, "butterfly"] == {"flex-attention": 1.0}
    show_rows(rows_of())
    show_ratios(rows_of())
    last = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert last == ["geometric", "mean", "1.41", "1.22"]


def test_figure(tmp_path):
    shorter = rows_of()[-1] | {"seqlen": 512}  # at one head_dim: the other has no panel
    draw([*rows_of(), shorter], tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 10_000
