"""Byte-level text: classification and retrieval on the sources of Python's standard library.

Long Range Arena has film reviews and papers that cite each other, which no package ships. Here a
document is a stretch of a source file: its class is the package that it is from, and two documents
belong together if they are from one file. Training, validation and test have different files. The
sources are those of the Python that runs: its version is in every row of results. The packages are
ones that no distribution splits off.

A model of language takes these packages as its text, or the whole standard library and torch:
`CORPORA`.
"""

import importlib.util
import os
import sysconfig
import zlib
from pathlib import Path

import numpy as np

from experiments.harness.errors import BadInput
from experiments.papers.dataset import Dataset, stacked

PACKAGES = (
    "asyncio",
    "email",
    "importlib",
    "multiprocessing",
    "json",
    "unittest",
    "xml",
    "encodings",
)
PARTS = ("train", "validation", "test")
VOCABULARY = 257
SHORTEST, FEWEST = 400, 5  # bytes of a file, and files of a package
#: Folders of other packages, of tests, and of what distributions leave out.
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter"}


def files_of(part):
    """By package, the bytes of the files of a part: seven, one and two tenths, at least one."""
    root, found = _root(), {}
    for package in PACKAGES:
        paths = _sources(root / package)
        if len(paths) < FEWEST:
            raise BadInput(
                f"{package}: {len(paths)} sources in {root}, at least {FEWEST} are needed"
            )
        found[package] = _of_part(part, paths, root)
    return found


def packages(part):
    """All bytes of a part of `PACKAGES`, file after file."""
    return b"".join(text for texts in files_of(part).values() for text in texts)


def library(part):
    """All bytes of a part of the standard library and of torch, without tests, file after file."""
    root, spec = _root(), importlib.util.find_spec("torch")
    if spec is None:
        raise BadInput("the text is that of torch's sources: torch is not installed")
    found = []
    for folder in (root, Path(spec.origin).parent):
        found += _of_part(part, _sources(folder, NOT_THE_LIBRARY), folder)
    return b"".join(found)


CORPORA = {"packages": packages, "library": library}


def _root():
    return Path(sysconfig.get_paths()["stdlib"])


def _sources(folder, without=()):
    paths = []
    for here, folders, names in os.walk(folder):
        folders[:] = [x for x in folders if x not in without]
        paths += [Path(here, name) for name in names if name.endswith(".py")]
    return [x for x in paths if x.stat().st_size >= SHORTEST]


def _of_part(part, paths, root):
    # An order that says nothing about a file, the same wherever the same files are.
    paths = sorted(paths, key=lambda path: zlib.crc32(path.relative_to(root).as_posix().encode()))
    few = max(1, len(paths) // 10)
    first = len(paths) - 3 * few
    bounds = {"train": (0, first), "validation": (first, first + few), "test": (first + few, None)}
    return [path.read_bytes() for path in paths[slice(*bounds[part])]]


def classification(examples, n, seed, part):
    """Stretches of n bytes with the package that they are from; all packages equally often.

    Returns
    -------
    Dataset
    """
    rng, files = np.random.default_rng(seed), files_of(part)
    labels = rng.permutation(np.arange(examples) % len(PACKAGES))
    texts = [_stretch(rng, _any(rng, files[PACKAGES[label]]), n) for label in labels]
    return Dataset(_tokens(texts, n)[:, None], labels, VOCABULARY, len(PACKAGES))


def retrieval(examples, n, seed, part):
    """Pairs of stretches of n bytes: 1 where they are of one file, 0 of two packages.

    Those of one file do not overlap where it is as long as both.
    """
    rng, files = np.random.default_rng(seed), files_of(part)
    labels = rng.permutation(np.arange(examples) % 2)
    pairs = []
    for label in labels:
        one, other = rng.choice(list(files), 2, replace=False)
        text = _any(rng, files[one])
        half = max(len(text) // 2, min(n, len(text)))
        if label:
            pairs.append((_stretch(rng, text[:half], n), _stretch(rng, text[-half:], n)))
        else:
            pairs.append((_stretch(rng, text, n), _stretch(rng, _any(rng, files[other]), n)))
    tokens = np.stack([_tokens(texts, n) for texts in zip(*pairs, strict=True)], axis=1)
    return Dataset(tokens, labels, VOCABULARY, 2)


def _any(rng, texts):
    return texts[rng.integers(len(texts))]


def _stretch(rng, text, n):
    start = rng.integers(max(1, len(text) - n + 1))
    return text[start : start + n]


def _tokens(texts, n):
    return stacked([np.frombuffer(text, np.uint8).astype(np.uint16) + 1 for text in texts], n)
