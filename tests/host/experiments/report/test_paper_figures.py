"""The figures of the paper, from rows in any order."""

import numpy as np

from experiments.harness import sweeps
from experiments.report import paper_figures


def test_lines_go_on_by_length(tmp_path, monkeypatch):
    """Rows of a run that went on are behind those of longer sequences."""
    figures = []
    monkeypatch.setattr(paper_figures, "save", lambda figure, path: figures.append(figure))
    origin = {"device": "GPU", "commit": "abc", "dtype": "float16", "batch": 1, "heads": 1}
    kind = {"variant": "", "pass": "both", "method": "nbflash", "status": "", "head_dim": 64}
    rows = [
        origin | kind | {"seqlen": str(n), "median_ms": str(n / 64), "memory_mb": str(2 * n)}
        for n in (512, 1024, 128)
    ]
    paper_figures.draw_figure3(rows, sweeps.load("paper-figure3")["paper"], tmp_path / "x.png")
    for ax, scale in zip(figures[0].axes, (1 / 64, 2), strict=True):
        line = next(x for x in ax.lines if x.get_label() == "nbflash")
        assert np.array_equal(line.get_xdata(), [128, 512, 1024])
        assert np.array_equal(line.get_ydata(), scale * line.get_xdata())
