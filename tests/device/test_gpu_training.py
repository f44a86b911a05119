"""Training steps of the experiments, recorded as a CUDA graph."""

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

from experiments.papers.classifier import Classification, Classifier
from experiments.papers.dataset import Dataset
from experiments.papers.training import RecordedStep, Trainer

STEPS = 2 * (RecordedStep.WARM + 1)
HOW = {"steps": STEPS, "rate": 1e-3, "warmup": 2, "evaluate": 1}


def kernels(**parameters):
    """Compiled when they are needed."""
    return []


def _curve(method, graph):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 9, (64, 1, 200)).astype(np.uint16)
    data = Dataset(tokens, np.arange(64) % 2, 9, 2)
    sizes = {"layers": 1, "heads": 2, "width": 64}
    model = Classifier(9, 2, 1, 200, method, **sizes, device="cuda", seed=3)
    work = Classification(model, data, data, batch=8, dtype="float32", seed=7)
    trainer = Trainer(model, work, HOW | {"graph": graph}, None)
    trainer.run()
    return np.array([loss for _, loss, _ in trainer.progress.curve])


@pytest.mark.parametrize("method", ["pytorch", "nbflash", "nbflash-butterfly"])
def test_recorded_steps_are_the_eager_ones(method):
    eager, recorded = (_curve(method, graph) for graph in (False, True))
    assert len(set(recorded)) == STEPS
    # Gradients are summed in no fixed order: what each step of three passes may round, over at
    # most 8 * 200 terms.
    budget = STEPS * 3 * 8 * 200 * np.finfo(np.float32).eps
    assert (abs(recorded - eager) <= budget * eager).all()
