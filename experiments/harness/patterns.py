"""Every pattern of `masks` with the closed form of its number of cells.

``n`` tokens, ``b`` tokens per block, ``m = n / b`` blocks; the sources are named by the generators.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import masks

DENSITY = 0.2


@dataclass(frozen=True)
class Pattern:
    """A generator with arguments scaled to the sequence, and how many cells it must have."""

    name: str
    build: Callable
    formula: str
    count: Callable


def triangle(n):
    """Cells of a causal mask of ``n`` tokens."""
    return n * (n + 1) // 2


def band(n, left, right):
    """Cells of a sliding window, both sides inclusive."""
    return n * (1 + left + right) - triangle(left) - triangle(right)


def toeplitz(n, offsets):
    """Cells whose distance to the diagonal is in ``offsets``, on either side."""
    return sum((n - d) * (2 if d else 1) for d in offsets)


def butterfly(m):
    """Blocks of a butterfly over any number of blocks: the diagonal and two per set bit."""
    digits = range((m - 1).bit_length())
    ones = ((m >> (k + 1) << k) + max(0, m % 2 ** (k + 1) - 2**k) for k in digits)
    return m + 2 * sum(ones)


def document_lengths(n):
    """Unequal documents: an eighth, a half, a quarter, the rest."""
    parts = [n // 8, n // 2, n // 4]
    return [*parts, n - sum(parts)]


def strided_offsets(m):
    return [d for d in range(m) if d <= 1 or d % 4 == 0]


def log_offsets(m):
    return [0, *(2**k for k in range((m - 1).bit_length()))]


def verticals(n):
    return [0, n // 3, n // 2]


def slashes(n):
    return [*range(n // 16), n // 4]


def parents(n):
    """A complete binary tree of ``n`` nodes."""
    return [(i + 1) // 2 - 1 for i in range(n)]


def vertical_slash_count(n, vertical, slash):
    """Cells of the columns and diagonals, less those that lie on both."""
    both = sum(v + s < n for v in vertical for s in slash)
    return sum(n - v for v in vertical) + sum(n - s for s in slash) - both


def depths(n):
    """Nodes on the way from the root to each node of the complete binary tree, both included."""
    return np.log2(np.arange(1, n + 1)).astype(int) + 1


def fixed_count(m, s):
    """Groups of ``s`` blocks, the last one shorter, and one summary column per whole group."""
    groups, rest = divmod(m, s)
    return groups * s * s + rest * rest + (m - s) * groups


def global_local_count(m, g, w):
    return 2 * g * m - g * g + band(m - g, w, w)


def bigbird_count(m, r):
    """First and last block row and column, a band of one either side, ``r`` more in each row."""
    return 2 * m + (m - 2) * (2 + 3 + r) - 2


PATTERNS = (
    Pattern("dense", lambda n, b: masks.dense(n), "n²", lambda n, b: n * n),
    Pattern("causal", lambda n, b: masks.causal(n), "n(n+1)/2", lambda n, b: triangle(n)),
    Pattern(
        "window",
        lambda n, b: masks.window(n, left=n // 4, right=n // 16),
        "n(1+l+r) - l(l+1)/2 - r(r+1)/2",
        lambda n, b: band(n, n // 4, n // 16),
    ),
    Pattern(
        "prefix",
        lambda n, b: masks.prefix(n, n // 4),
        "n(n+1)/2 + p(p-1)/2",
        lambda n, b: triangle(n) + triangle(n // 4 - 1),
    ),
    Pattern(
        "documents",
        lambda n, b: masks.documents(document_lengths(n), causal=True),
        "Σ L(L+1)/2",
        lambda n, b: sum(map(triangle, document_lengths(n))),
    ),
    Pattern(
        "padding",
        lambda n, b: masks.padding([5 * n // 8], n),
        "n L",
        lambda n, b: n * (5 * n // 8),
    ),
    Pattern(
        "chunked",
        lambda n, b: masks.chunked(n, 2 * b),
        "n/c · c(c+1)/2, c=2b",
        lambda n, b: sum(triangle(min(2 * b, n - start)) for start in range(0, n, 2 * b)),
    ),
    Pattern("block_diagonal", masks.block_diagonal, "n b", lambda n, b: n * b),
    Pattern(
        "butterfly",
        masks.butterfly,
        "b² m(1 + log₂m) for m = 2ᵏ",
        lambda n, b: b * b * butterfly(n // b),
    ),
    Pattern(
        "local",
        lambda n, b: masks.local(n, b, 2),
        "b² (m(2w+1) - w(w+1)), w=2",
        lambda n, b: b * b * band(n // b, 2, 2),
    ),
    Pattern(
        "strided",
        lambda n, b: masks.strided(n, b, 4, 1),
        "b² Σ (m-D), |D| ≤ 1 or 4 | D",
        lambda n, b: b * b * toeplitz(n // b, strided_offsets(n // b)),
    ),
    Pattern(
        "toeplitz",
        lambda n, b: masks.toeplitz(n, log_offsets(n // b), b),
        "b² Σ (m-D), |D| in 0, 1, 2, 4, ...",
        lambda n, b: b * b * toeplitz(n // b, log_offsets(n // b)),
    ),
    Pattern(
        "dilated",
        lambda n, b: masks.dilated(n, 8, 4),
        "n(2w+1) - d w(w+1), w=8, d=4",
        lambda n, b: n * 17 - 4 * 8 * 9,
    ),
    Pattern(
        "fixed",
        lambda n, b: masks.fixed(n, b, 4, 1),
        "b² (m s + (m-s) c m/s), s=4, c=1",
        lambda n, b: b * b * fixed_count(n // b, 4),
    ),
    Pattern(
        "global_local",
        lambda n, b: masks.global_local(n, b, 1, 1),
        "b² (2gm - g² + (m-g)(2w+1) - w(w+1))",
        lambda n, b: b * b * global_local_count(n // b, 1, 1),
    ),
    Pattern(
        "bigbird",
        lambda n, b: masks.bigbird(n, b, n_random=2),
        "b² (2m + (m-2)(5+r) - 2), r=2",
        lambda n, b: b * b * bigbird_count(n // b, 2),
    ),
    Pattern(
        "random",
        lambda n, b: masks.random(n, b, DENSITY),
        "b² round(m² density)",
        lambda n, b: b * b * round(DENSITY * (n // b) ** 2),
    ),
    Pattern(
        "sinks",
        lambda n, b: masks.sinks(n, n // 16, n // 4),
        "t(t+1)/2 + (n-t)t, t=s+w",
        lambda n, b: triangle(n // 16 + n // 4) + (n - n // 16 - n // 4) * (n // 16 + n // 4),
    ),
    Pattern(
        "vertical_slash",
        lambda n, b: masks.vertical_slash(n, verticals(n), slashes(n)),
        "Σ(n-v) + Σ(n-s) - #{v+s<n}",
        lambda n, b: vertical_slash_count(n, verticals(n), slashes(n)),
    ),
    Pattern(
        "axial",
        lambda n, b: masks.axial(n // b, b),
        "n(h+w-1)",
        lambda n, b: n * (n // b + b - 1),
    ),
    Pattern(
        "tree",
        lambda n, b: masks.tree(parents(n // 2), prefix=n // 2),
        "Σ(depth+1) + t p",
        lambda n, b: int(depths(n // 2).sum()) + (n // 2) ** 2,
    ),
    Pattern(
        "neighborhood",
        lambda n, b: masks.neighborhood((n // b, b), (5, 5)),
        "n k, k=5·5",
        lambda n, b: n * 25,
    ),
)
