"""What a task gives to a model; without torch."""

from dataclasses import dataclass

import numpy as np

PAD = 0


@dataclass(frozen=True)
class Dataset:
    """Sequences of tokens with a class each.

    Attributes
    ----------
    tokens : uint16 (examples, parts, n)
        `PAD` behind the end; one part, or the two of a pair.
    labels : int64 (examples,)
    vocabulary, classes : int
        Tokens and labels are below.
    """

    tokens: np.ndarray
    labels: np.ndarray
    vocabulary: int
    classes: int

    def __len__(self):
        return len(self.labels)


def stacked(sequences, n):
    """uint16 (examples, n): sequences, each padded to a length."""
    found = np.full((len(sequences), n), PAD, np.uint16)
    for row, sequence in zip(found, sequences, strict=True):
        row[: len(sequence)] = sequence
    return found
