"""The examples train, and so does the experiment on GPT-2, in a few steps."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def output_of(name, *options):
    """What an example prints."""
    command = [sys.executable, ROOT / "examples" / name, *options]
    given = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **given)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("mask", ["causal", "butterfly"])
def test_gpt_learns(mask):
    printed = output_of("gpt.py", "--tokens", "128", "--steps", "16", "--mask", mask)
    first, *_, last = map(float, re.findall(r"loss (\S+)", printed))
    assert last < 0.8 * first


def test_classifier_beats_chance():
    """One in three would be 20 of 60."""
    printed = output_of("classify.py", "--tokens", "256", "--steps", "40")
    assert int(re.search(r"(\d+) of 60 right", printed)[1]) > 30


def test_experiment(tmp_path, monkeypatch):
    from experiments import cli
    from experiments.harness import sweeps

    monkeypatch.setattr("experiments.harness.timing.SETTLE_SECONDS", 0)
    sweep = sweeps.load("train")
    sweep["quick"] |= {"rounds": 3, "sizes": [["tiny", 64, 1]]}
    monkeypatch.setattr(sweeps, "load", lambda name: sweep)
    cli.main(["train", "--quick", "--device", "cpu", "--out", str(tmp_path)])
    with (tmp_path / "train.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["attention"] for row in rows] == ["sdpa", "nbflash", "nbflash-sparse"]
    assert float(rows[0]["over_sdpa"]) == 1
    assert all(float(row["tokens_per_s"]) > 0 for row in rows)
