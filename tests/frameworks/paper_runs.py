"""How tests run the commands of ``python -m experiments paper``."""

import csv

from experiments import cli
from experiments.harness import sweeps


def run(*args):
    """Exit status of a command line."""
    try:
        cli.main(["paper", *map(str, args)])
    except SystemExit as end:
        return end.code
    return 0


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def shrink(monkeypatch, name, section, **sizes):
    """Other sizes for a section of a sweep on a CPU, and no pauses before a call is timed."""
    sweep = sweeps.load(name)
    sweep["cpu"][section] |= sizes
    monkeypatch.setattr("experiments.harness.sweeps.load", {name: sweep}.__getitem__)
    monkeypatch.setattr("experiments.harness.timing.SETTLE_SECONDS", 0)
