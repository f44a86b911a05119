"""Images as sequences of pixels: the digits that scikit-learn ships.

Long Range Arena has CIFAR-10, which no package ships. The digits have 8 × 8 pixels of 17 levels;
they are put, each pixel as a square, on a canvas of size × size, anywhere. Of the 1797 images 1200
are for training, 200 for validation and the rest for test; examples are draws from them.
"""

import numpy as np

from experiments.harness.errors import BadInput
from experiments.papers.dataset import Dataset

LEVELS = 17
ENDS = {"train": (0, 1200), "validation": (1200, 1400), "test": (1400, 1797)}


def why_not():
    """Why there are no images here; empty where there are."""
    try:
        import sklearn.datasets  # noqa: F401
    except ImportError as error:
        return f"the images are those of scikit-learn: {error}"
    return ""


def digits():
    """Images (1797, 8, 8) and their digits, in an order without a meaning."""
    if reason := why_not():
        raise BadInput(reason)
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    return found.images[order].astype(np.uint16), found.target[order]


def make(examples, size, seed, part):
    """Digits on a canvas of size × size pixels, a token each, row after row.

    Returns
    -------
    Dataset
    """
    rng, (images, labels) = np.random.default_rng(seed), digits()
    chosen = rng.integers(*ENDS[part], examples)
    zoom = max(1, size // 12)
    side = zoom * images.shape[1]
    tokens = np.zeros((examples, size, size), np.uint16)
    for canvas, i in zip(tokens, chosen, strict=True):
        y, x = rng.integers(size - side + 1, size=2)
        canvas[y : y + side, x : x + side] = np.kron(images[i], np.ones((zoom, zoom), np.uint16))
    tokens = tokens.reshape(examples, 1, size * size) + np.uint16(1)
    return Dataset(tokens, labels[chosen].astype(np.int64), LEVELS + 1, 10)
