"""Commands end to end: how tests run them, and what they read of what is left behind."""

import csv

import numpy as np
from matplotlib.image import imread

from experiments import cli
from experiments.harness.backends import Backend
from experiments.harness.provenance import provenance

PROVENANCE = {"commit", "date", "device", "driver", "python", "nbflash", "numpy", "scipy", "numba"}


class FakeClock:
    """One millisecond for every call."""

    def __init__(self, sample_ms=None):
        self.sample_ms = sample_ms

    def prepare(self, call):
        return call

    def measure(self, task):
        return 1.0, task()


def run(capsys, *args):
    """Exit status, standard output and standard error of one command."""
    status = 0
    try:
        command(*args)
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def command(*args):
    """Run a command line."""
    cli.main(" ".join(map(str, args)).split())


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def assert_figure(path, panels):
    """A PNG with marks all over it: no panel is empty."""
    image = imread(path)[..., :3].mean(axis=2)
    for part in np.array_split(image, panels, axis=1):
        assert part.shape[1] > 150
        assert part.std() > 0.02


def stand_in(monkeypatch, clock=FakeClock, origin=None):
    """NumPy in the place of a CUDA device that has all kernels."""
    backend, origin = Backend("cuda", np, None), origin or provenance("cpu")
    monkeypatch.setattr("experiments.harness.setup.open_backend", lambda device: backend)
    monkeypatch.setattr("experiments.harness.setup.provenance", lambda device: origin)
    monkeypatch.setattr("nbflash.planning.dispatch.why_not_here", lambda impl, device_id=0: [])
    monkeypatch.setattr("experiments.harness.setup.QueuedEvents", clock)
