"""The tasks of Long Range Arena by name, drawn once and kept on disk; without torch."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np

from experiments.papers import listops, pathfinder, pictures, texts
from experiments.papers.dataset import Dataset

PARTS = texts.PARTS


#: Examples that are drawn from one seed; those of several are drawn by several processes.
CHUNK = 1000


def _by_seed(make):
    """A generator without files: each part has seeds of its own."""

    def draw(examples, seed, part, **size):
        counts = [min(CHUNK, examples - start) for start in range(0, examples, CHUNK)]
        seeds = [[seed, PARTS.index(part), i] for i in range(len(counts))]
        call = partial(make, **size)
        if len(counts) == 1:
            return call(counts[0], seed=seeds[0])
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            made = list(pool.map(_Seeded(call), counts, seeds))
        tokens, labels = (
            np.concatenate([getattr(x, y) for x in made]) for y in ("tokens", "labels")
        )
        return Dataset(tokens, labels, made[0].vocabulary, made[0].classes)

    return draw


@dataclass(frozen=True)
class _Seeded:
    """A generator that a process takes, called with its two arguments in order."""

    call: partial

    def __call__(self, examples, seed):
        return self.call(examples, seed=seed)


#: Name to ``make(examples, seed, part, **size)``.
TASKS = {
    "listops": _by_seed(listops.make),
    "text": lambda examples, seed, part, n: texts.classification(examples, n, seed, part),
    "retrieval": lambda examples, seed, part, n: texts.retrieval(examples, n, seed, part),
    "image": lambda examples, seed, part, size: pictures.make(examples, size, seed, part),
    "pathfinder": _by_seed(pathfinder.make),
}


def why_not(task):
    """Why a task cannot be made here; empty where it can."""
    return pictures.why_not() if task == "image" else ""


def load(folder, task, part, examples, size, seed=0):
    """A part of a task, from a file of ``folder`` if it was made before.

    Parameters
    ----------
    folder : pathlib.Path
    task : str
    part : {"train", "validation", "test"}
    examples : int
    size : dict
        What the generator takes beside.
    seed : int
        Of the data: runs with different seeds of the model share it.
    """
    name = "-".join(f"{key}{value}" for key, value in sorted(size.items()))
    path = folder / f"{task}-{part}-{examples}-{name}-{seed}.npz"
    if path.exists():
        with np.load(path) as file:
            return Dataset(file["tokens"], file["labels"], *map(int, file["counts"]))
    made = TASKS[task](examples, seed=seed, part=part, **size)
    folder.mkdir(parents=True, exist_ok=True)
    counts = np.array([made.vocabulary, made.classes])
    with path.with_suffix(".new").open("wb") as file:
        np.savez_compressed(file, tokens=made.tokens, labels=made.labels, counts=counts)
    path.with_suffix(".new").replace(path)
    return made
