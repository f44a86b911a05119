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


def _row(attention, tokens, values, steps="10", evaluate="4"):
    origin = {"device": "GPU", "commit": "abc", "model": "tiny", "seed": "0"}
    origin |= {"steps": steps, "evaluate": evaluate}
    text = " ".join(map(str, values))
    found = {"losses": text, "validations": text, "validation": str(values[-1])}
    return origin | {"attention": attention, "tokens": str(tokens)} | found


def _lines(ax):
    return {x.get_label(): (x.get_xdata().tolist(), x.get_ydata().tolist()) for x in ax.lines}


def test_curves_of_one_model_and_their_distance_from_eager(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(paper_figures, "save", lambda figure, path: figures.append(figure))
    rows = [_row("eager", 64, [4.0, 3.0, 2.0]), _row("nbflash", 64, [4.0, 3.5, 1.75])]
    rows += [_row("none", 64, [5.0, 5.0, 5.0]), _row("eager", 128, [1.0, 1.0, 1.0])]
    paper_figures.draw_curves(rows, tmp_path / "x.png")
    left, right = figures[0].axes
    steps = [4, 8, 10]
    assert _lines(left) == {
        "eager": (steps, [4.0, 3.0, 2.0]),
        "nbflash": (steps, [4.0, 3.5, 1.75]),
        "none": (steps, [5.0, 5.0, 5.0]),
    }
    assert [x.get_ydata().tolist() for x in right.lines] == [[0.0, 0.5, 0.25]]
    assert right.get_ylabel() == "difference from eager"


def test_curves_without_eager_are_compared_with_the_first(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(paper_figures, "save", lambda figure, path: figures.append(figure))
    rows = [_row("sdpa-flash", 64, [4.0, 3.0, 2.0]), _row("nbflash", 64, [4.0, 3.5, 1.75])]
    paper_figures.draw_curves(rows, tmp_path / "x.png")
    right = figures[0].axes[1]
    assert [x.get_ydata().tolist() for x in right.lines] == [[0.0, 0.5, 0.25]]
    assert right.get_ylabel() == "difference from sdpa-flash"


def test_validation_by_step_and_by_context(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(paper_figures, "save", lambda figure, path: figures.append(figure))
    rows = [_row("nbflash", n, [3.0, 64 / n], steps="8") for n in (128, 64)]
    rows.append(_row("nbflash-sparse", 64, [3.0, 1.5], steps="8"))
    paper_figures.draw_contexts(rows, tmp_path / "x.png")
    left, right = figures[0].axes
    assert _lines(left)["nbflash, 128, 0"] == ([4, 8], [3.0, 0.5])
    assert [x.get_text() for x in right.get_xticklabels()] == ["64", "128"]
    assert _lines(right) == {
        "nbflash, 0": ([64, 128], [1.0, 0.5]),
        "nbflash-sparse, 0": ([64], [1.5]),
    }


def test_accuracy_by_task_with_its_spread(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(paper_figures, "save", lambda figure, path: figures.append(figure))
    found = [("a", "nbflash", "0.25"), ("b", "nbflash", "0.5"), ("b", "nbflash", "0.75")]
    rows = [
        {"task": task, "method": method, "accuracy": x, "classes": "4", "device": "", "commit": "c"}
        for task, method, x in [*found, ("b", "linear", "0.5")]
    ]
    paper_figures.draw_accuracies(rows, tmp_path / "x.png")
    (ax,) = figures[0].axes
    ours, other = ax.containers
    assert ours.lines[0].get_xydata().tolist() == [[-1 / 32, 25.0], [31 / 32, 62.5]]
    (bars,) = ours.lines[2]
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [[25.0, 25.0], [50.0, 75.0]]
    assert other.lines[0].get_xydata().tolist() == [[33 / 32, 50.0]]
    assert _lines(ax)["by chance"][1] == [25.0, 25.0]
