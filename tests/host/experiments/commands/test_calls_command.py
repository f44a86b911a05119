"""Host time of calls, warm and in new processes."""

import numpy as np
from command_runs import PROVENANCE, read_csv, run

from experiments.commands import calls
from experiments.harness import sweeps
from experiments.harness.timing import Timing

WARM = [
    "attention(q, k, v)",
    "attention(q, k, v, mask)",
    "plan(...)(q, k, v)",
    "attention_backward(...)",
    "attention_backward(..., mask)",
    "plan.backward(...)",
    "decode(q, k_cache, v_cache, lengths)",
]


def test_the_table(tmp_path, capsys, monkeypatch):
    started = []

    def first_calls(script, variable, cached, names):
        started.append((variable, cached))
        compile(script, "script", "exec")
        states = "compiled", "cached"
        return {f"{name}, {state}": Timing((1.0,)) for state in states for name in names}

    monkeypatch.setattr(calls, "first_calls", first_calls)
    monkeypatch.setattr(calls, "why_not_torch", lambda: "not here")
    status, out, _ = run(capsys, "calls", "--quick", "--device", "cpu", "--out", str(tmp_path))
    assert status == 0
    rows = read_csv(tmp_path / "calls.csv")
    assert [row["what"] for row in rows if row["kind"] == "warm"] == WARM
    starts = [row["what"] for row in rows if row["kind"] == "new process"]
    assert starts == [f"{x}, {s}" for s in ("compiled", "cached") for x in calls.PARTS]
    assert {row["implementation"] for row in rows} == {"numpy"}
    assert all(float(row["median_ms"]) > 0 for row in rows)
    assert set(rows[0]) > PROVENANCE
    assert started == [("NUMBA_CACHE_DIR", 1)]
    assert "1,000.0" in out


def test_every_call_is_one_of_the_library():
    found = calls.calls_of(np.array, np.dtype(np.float32), sweeps.load("calls"), 0)
    assert list(found) == WARM
    results = [call() for call in found.values()]
    np.testing.assert_array_equal(results[1], results[2][0])
    for got, same in zip(results[4], results[5], strict=True):
        np.testing.assert_array_equal(got, same)
    assert results[6].shape == (1, 1, 2, 64)


def test_scripts_of_all_libraries():
    shape = sweeps.load("calls")["shape"]
    for library, device in (
        ("numpy", "cpu"),
        ("cupy", "cuda"),
        ("torch", "cuda"),
        ("torch", "cpu"),
    ):
        script = calls.start_of(library, device, "float16", shape)
        compile(script, library, "exec")
        assert f"dtype={library}.float16" in script
        assert ("synchronize" in script) == (device == "cuda")
