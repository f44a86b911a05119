"""Training that ends whenever it must and goes on as if it had not."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch


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


class Trainer:
    """A model and where it is kept.

    Parameters
    ----------
    model : torch.nn.Module
    task : object
        ``loss_at(step)`` is the loss on the batch of a step, which the step alone decides, so that
        a run that was interrupted takes the same ones; ``evaluate()`` is a number for the curve.
    settings : dict
        ``steps``, ``rate``, ``warmup``, ``evaluate`` (steps between two checkpoints).
    path : pathlib.Path, optional
        Of the checkpoint; without it nothing is kept.
    """

    UNTIMED = 3

    def __init__(self, model, task, settings, path):
        self.model, self._task = model, task
        self._settings, self._path = settings, path and Path(path)
        self._device = next(model.parameters()).device.type
        fused = self._device == "cuda"
        self._optimiser = torch.optim.AdamW(model.parameters(), lr=settings["rate"], fused=fused)
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
        for group in self._optimiser.param_groups:
            group["lr"] = self._settings["rate"] * self._schedule(self.progress.step)
        loss = self._task.loss_at(self.progress.step)
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimiser.step()
        self.progress.step += 1
        return loss

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
        self._optimiser.load_state_dict(state["optimiser"])
        self.progress = Progress(**state["progress"])
