"""Pathfinder (Linsley et al., arXiv 1805.08315): do two marks lie on one dashed curve?

Every image has two long curves and a few short ones, all dashed, none near another, and two discs
at ends of long curves: both on one, or one on each. Nothing but where the second disc lies tells
the classes apart. What differs from the generator that Long Range Arena uses: curves are walks with
a bounded turn instead of chains of paddles, and contrast does not vary. On an image of more than
64 × 64 pixels a curve is longer and turns as far, in all, as it does on one of 64 × 64.
"""

import numpy as np

from experiments.papers.dataset import Dataset

LEVELS, SMALLEST = 256, 24
#: Of a dash and of the gap behind it, and least distance of two curves, in pixels.
DASH, GAP, CLEARANCE = 3.0, 1.6, 6.0
STEP, TURN = 0.5, 0.12  # pixels, and standard deviation of radians, of a walk
TURN_SIZE = 64  # of the largest image with this turn
DISC = 1.4


def make(examples, size, seed, distractors=3):
    """Draw images of size × size pixels, a token each, row after row.

    Returns
    -------
    Dataset
        Classes: 1 where the discs lie on one curve.
    """
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(examples) % 2)
    images = np.stack([draw(rng, size, bool(label), distractors) for label in labels])
    tokens = images.reshape(examples, 1, size * size).astype(np.uint16) + 1
    return Dataset(tokens, labels.astype(np.int64), LEVELS + 1, 2)


def draw(rng, size, connected, distractors=3):
    """One image, uint8 (size, size)."""
    if size < SMALLEST:
        raise ValueError(f"{size=} leaves no room for two curves: at least {SMALLEST}")
    curves = None
    while curves is None:
        curves = _curves(rng, size, distractors)
    first, second = curves[:2]
    ends = (first[0], first[-1]) if connected else (first[0], second[-1])
    dashes = np.concatenate([_dashed(curve) for curve in curves])
    far, disc = _distance(dashes, size), _distance(np.stack(ends), size)
    light = np.maximum(np.clip(1.3 - far, 0, 1) * 0.6, np.clip(DISC + 0.5 - disc, 0, 1))
    return np.round(light * (LEVELS - 1)).astype(np.uint8)


def _distance(points, size):
    """float64 (size, size): of each pixel from the nearest point; of distant ones infinite."""
    around = np.stack(np.meshgrid(*2 * [np.arange(-2, 3)]), axis=-1).reshape(-1, 2)
    pixels = np.round(points).astype(int)[:, None] + around
    distance = np.linalg.norm(pixels - points[:, None], axis=-1)
    inside = ((pixels >= 0) & (pixels < size)).all(axis=-1)
    found = np.full((size, size), np.inf)
    x, y = pixels[inside].T
    np.minimum.at(found, (y, x), distance[inside])
    return found


def _dashed(curve):
    """The points of a curve that belong to dashes; it begins and ends with one."""
    along = STEP * np.arange(len(curve))
    return curve[(along % (DASH + GAP) < DASH) | (along > along[-1] - DASH)]


def _curves(rng, size, distractors):
    """Two long curves and short ones; None where there was no room."""
    found = []
    for i in range(2 + distractors):
        length = size * (0.9 if i < 2 else 0.3)
        for _ in range(60):
            curve = _walk(rng, size, round(length / STEP))
            if curve is not None and all(_apart(curve, other) for other in found):
                found.append(curve)
                break
        else:
            if i < 2:
                return None
    return found


def _apart(a, b):
    """Also their ends, where there may be discs."""
    ends = np.linalg.norm(a[[0, -1], None] - b[[0, -1]], axis=-1).min()
    return ends > CLEARANCE + DISC and np.linalg.norm(a[:, None] - b, axis=-1).min() > CLEARANCE


def _walk(rng, size, steps):
    """A curve that stays inside and does not come near itself; None where it does not."""
    scale = max(1.0, size / TURN_SIZE)
    turn = TURN / scale
    curvature = np.cumsum(rng.normal(0, turn / 4 / scale**0.5, steps)) + rng.normal(0, turn)
    angle = rng.uniform(0, 2 * np.pi) + np.cumsum(np.clip(curvature, -turn, turn))
    curve = np.cumsum(STEP * np.stack([np.cos(angle), np.sin(angle)], axis=1), axis=0)
    low, high = curve.min(axis=0), curve.max(axis=0)
    room = size - 1 - 2 * DISC - (high - low)
    if (room < 0).any():
        return None
    curve += rng.uniform(0, 1, 2) * room + DISC - low
    skip = round(2.5 * CLEARANCE / STEP)
    distance = np.linalg.norm(curve[:, None] - curve, axis=-1)
    place = np.arange(steps)
    near = (distance < CLEARANCE) & (abs(place[:, None] - place) > skip)
    return None if near.any() else curve
