"""The speed of the SIMT kernels: the part that any device runs."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.commands import simt
from experiments.harness import sweeps
from experiments.harness.backends import open_backend
from experiments.harness.errors import OutOfBudget
from experiments.harness.timing import Timing
from experiments.report.figures import draw_simt
from nbflash.testing import make_qkv


def test_simt_tasks_are_checked_and_callable():
    arrays = make_qkv(1, 40, 40, 2, 2, 8, np.float32)
    makers = simt.makers_of(open_backend("cpu"), arrays, check_rows=16, impl="reference")
    assert list(makers) == [(simt.NBFLASH, which) for which in ("forward", *simt.FORMS)]
    tasks = {which: make() for (_, which), make in makers.items()}
    assert tasks["forward"].call().shape == (1, 40, 2, 8)
    assert [verdict.array for verdict in tasks["forward"].verdicts] == ["out", "lse"]
    first, second = (tasks[form].call() for form in simt.FORMS)
    for got, same in zip(first, second, strict=True):
        np.testing.assert_array_equal(got, same)
    for which, task in tasks.items():
        result = task.call()
        task.verify(result)
        array, name = (result, "out") if which == "forward" else (result[0], "dq")
        array[0, :, 1] += 1
        with pytest.raises(OutOfBudget, match=f"^{name}: error"):
            task.verify(result)


def test_the_matrix_product_is_checked_and_counted():
    backend = open_backend("cpu")
    row = simt.product(backend, 300, rounds=3, seconds=1, seed=0)
    assert row["tflops"] == pytest.approx(2 * 300**3 / (row["median_ms"] * 1e-3) / 1e12)
    assert 0 < row["error"] <= row["budget"] < 1e-3
    assert set(row) == set(sweeps.load("simt")["shape"][0]) | set(
        simt._row("", "", "", Timing((1.0,)))
    )

    def tf32(a, b):
        return (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) @ b

    truncating = SimpleNamespace(matmul=tf32, array=np.array, __name__="truncating")
    with pytest.raises(OutOfBudget, match="no timing is reported, matrix product: error"):
        simt.product(replace(backend, xp=truncating), 300, rounds=3, seconds=1, seed=0)


def test_simt_figure(tmp_path):
    rows = [
        {"head_dim": d, "implementation": name, "what": what, "tflops": 30.0 + d / 10}
        | {"device": "GPU", "seqlen": 4096, "heads": 16, "batch": 2, "commit": "0"}
        for d in (64, 128)
        for what, name in (("forward", "ours"), ("forward", "theirs"), ("backward", "ours"))
    ]
    draw_simt(rows, tmp_path / "simt.png")
    assert (tmp_path / "simt.png").stat().st_size > 10_000
