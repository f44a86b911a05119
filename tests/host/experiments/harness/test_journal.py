"""Rows on disk, and runs that go on."""

import pytest
from command_runs import read_csv

from experiments.harness.errors import BadInput
from experiments.harness.journal import Journal

KEYS = ("method", "n")


def _row(method, n, ms=1.5):
    return {"method": method, "n": n, "ms": ms, "note": None}


def test_every_row_is_on_disk_at_once(tmp_path):
    journal = Journal(tmp_path / "x.csv", KEYS)
    for count, row in enumerate([_row("a", 1), _row("a", 2)], start=1):
        journal.add(row)
        assert len(read_csv(tmp_path / "x.csv")) == count
    assert read_csv(tmp_path / "x.csv")[1] == {"method": "a", "n": "2", "ms": "1.5", "note": ""}


def test_a_run_goes_on(tmp_path):
    Journal(tmp_path / "x.csv", KEYS).add(_row("a", 1))
    journal = Journal(tmp_path / "x.csv", KEYS, resume=True)
    assert _row("a", 1, ms=9.0) in journal
    assert _row("a", 2) not in journal
    journal.add(_row("a", 2))
    assert [row["n"] for row in read_csv(tmp_path / "x.csv")] == ["1", "2"]
    assert Journal(tmp_path / "x.csv", KEYS).rows == []


def test_another_file_is_refused(tmp_path):
    Journal(tmp_path / "x.csv", KEYS).add(_row("a", 1))
    with pytest.raises(BadInput, match="has no column heads"):
        Journal(tmp_path / "x.csv", ("heads",), resume=True)
    journal = Journal(tmp_path / "x.csv", KEYS, resume=True)
    with pytest.raises(BadInput, match="other columns"):
        journal.add(_row("a", 2) | {"more": 1})


def test_time_is_over(tmp_path, monkeypatch):
    assert not Journal(tmp_path / "x.csv", KEYS).is_late
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    journal = Journal(tmp_path / "x.csv", KEYS, minutes=2)
    monkeypatch.setattr("time.monotonic", lambda: 1119.0)
    assert not journal.is_late
    monkeypatch.setattr("time.monotonic", lambda: 1121.0)
    assert journal.is_late
