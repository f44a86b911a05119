"""Training that ends whenever it must and goes on as if it had not."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from experiments.harness.timing import uncollected


@dataclass
class Progress:
    """How far a model is.

    Attributes
    ----------
    step : int
    seconds : float
        Of training steps alone, over all runs.
    timed : int
        Steps that ``seconds`` is of: the first ones of each run are not.
    curve : list of (int, float, float)
        Step, loss of training, what the task's ``evaluate`` gave.
    """

    step: int = 0
    seconds: float = 0.0
    timed: int = 0
    curve: list = field(default_factory=list)


class RecordedStep:
    """A step that is run a few times, then recorded as a CUDA graph, which each later call replays.

    From then on every call returns the same tensor, which the next one overwrites.

    Parameters
    ----------
    step : callable
        Takes tensors on the current GPU, of the same shapes at every call, and returns one. It
        does not wait for the device.
    """

    #: Steps before the recording: they compile kernels and allocate what the optimiser keeps.
    WARM = 3

    def __init__(self, step):
        self._step, self._calls = step, 0
        self._stream, self._graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def __call__(self, *batch):
        self._calls += 1
        if self._calls <= self.WARM:
            return self._on_a_stream(batch)
        if self._calls == self.WARM + 1:
            self._batch = [x.clone() for x in batch]
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._result = self._step(*self._batch)
        for own, given in zip(self._batch, batch, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._result

    def _on_a_stream(self, batch):
        """A step where recording will happen: what a stream allocates first is there by then."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._step(*batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        return result


def _adamw(model, rate, device):
    """AdamW in one kernel on a GPU, where its rate is a tensor that a recorded step reads."""
    if device != "cuda":
        return torch.optim.AdamW(model.parameters(), lr=rate)
    rate = torch.tensor(rate, device=device)
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)


def _sent(array, device):
    """A tensor on the device. A GPU copies it when it comes to it: the host does not wait."""
    tensor = torch.from_numpy(array)
    if device != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Trainer:
    """A model and where it is kept.

    Parameters
    ----------
    model : torch.nn.Module
    task : object
        ``batch_at(step)`` is a tuple of NumPy arrays, which the step alone decides, so that a run
        that was interrupted takes the same ones; ``loss_of`` takes them as tensors;
        ``evaluate()`` is a number for the curve.
    settings : dict
        ``steps``, ``rate``, ``warmup``, ``evaluate`` (steps between two checkpoints). With
        ``graph`` a GPU replays its steps (`RecordedStep`): the host's launches do not bound them.
    path : pathlib.Path, optional
        Of the checkpoint; without it nothing is kept.
    """

    UNTIMED = RecordedStep.WARM + 1

    def __init__(self, model, task, settings, path):
        self.model, self._task = model, task
        self._settings, self._path = settings, path and Path(path)
        self._device = next(model.parameters()).device.type
        self._optimiser = _adamw(model, settings["rate"], self._device)
        self._learn = self._eager
        if self._device == "cuda" and settings.get("graph"):
            self._learn = RecordedStep(self._eager)
        self.progress = Progress()
        if self._path and self._path.exists():
            self._load()

    @property
    def is_done(self):
        return self.progress.step >= self._settings["steps"]

    @property
    def ms_a_step(self):
        """None before any step was timed."""
        done = self.progress
        return 1e3 * done.seconds / done.timed if done.timed else None

    def run(self, is_late=lambda: False):
        """Train to the end, or to a checkpoint after ``is_late()`` came true."""
        begin = self.progress.step
        while not self.is_done:
            end = min(self.progress.step + self._settings["evaluate"], self._settings["steps"])
            with uncollected():
                loss = self._stretch(begin, end)
            self.model.eval()
            with torch.no_grad():
                self.progress.curve.append((end, loss, self._task.evaluate()))
            if self._path:
                self._save()
            if is_late():
                return

    def _stretch(self, begin, end):
        """Steps up to a checkpoint; the loss of the last one."""
        start = None
        while self.progress.step < end:
            if start is None and self.progress.step - begin >= self.UNTIMED:
                self._wait()
                start, first = time.perf_counter(), self.progress.step
            loss = self._step()
        loss = loss.item()  # waits for the device
        if start is not None:
            self.progress.seconds += time.perf_counter() - start
            self.progress.timed += self.progress.step - first
        return loss

    def _step(self):
        self.model.train()
        rate = self._settings["rate"] * self._schedule(self.progress.step)
        for group in self._optimiser.param_groups:
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        batch = self._task.batch_at(self.progress.step)
        loss = self._learn(*(_sent(x, self._device) for x in batch))
        self.progress.step += 1
        return loss

    def _eager(self, *batch):
        """One step of the optimiser; the loss before it."""
        loss = self._task.loss_of(*batch)
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimiser.step()
        return loss.detach()

    def _schedule(self, step):
        """Linear up to ``warmup``, then a cosine down to nothing."""
        settings = self._settings
        done = max(0, step - settings["warmup"]) / max(1, settings["steps"] - settings["warmup"])
        return min(1.0, (step + 1) / settings["warmup"]) * (1 + math.cos(math.pi * done)) / 2

    def _wait(self):
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _save(self):
        """A new file takes the place of the old one: there is always a whole one."""
        state = {
            "model": self.model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "progress": vars(self.progress),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self._path)

    def _load(self):
        state = torch.load(self._path, map_location=self._device, weights_only=True)
        self.model.load_state_dict(state["model"])
        how = [(group["lr"], group["capturable"]) for group in self._optimiser.param_groups]
        self._optimiser.load_state_dict(state["optimiser"])
        for group, (rate, capturable) in zip(self._optimiser.param_groups, how, strict=True):
            group.update(lr=rate, capturable=capturable)  # the tensor that a step reads
        self.progress = Progress(**state["progress"])
