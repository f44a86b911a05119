"""ListOps (Nangia and Bowman, arXiv 1804.06028) at the lengths of Long Range Arena.

An expression such as ``[MAX 2 9 [MIN 4 7 ] 0 ]`` is a tree of operators over digits; the class is
its value, a digit. Brackets are tokens: without the closing ones an expression has no value that
could be told. What differs from Long Range Arena: no parentheses that make the tree binary, which
double the length and tell nothing; an operator's token holds its opening bracket.
"""

import numpy as np

from experiments.papers.dataset import Dataset, stacked

OPERATORS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(np.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
CLOSE = "]"
#: Token 0 is padding.
TOKENS = ("", *map(str, range(10)), *OPERATORS, CLOSE)
_NUMBER = {token: i for i, token in enumerate(TOKENS)}
_FIRST_OPERATOR, _CLOSE = _NUMBER["[MIN"], _NUMBER[CLOSE]
#: Of an argument to be an operator: that of Long Range Arena.
NESTED = 0.25


def make(examples, n, seed, shortest=0, depth=10, arguments=10):
    """Draw expressions with ``shortest`` to ``n`` tokens.

    Parameters
    ----------
    examples, n, seed : int
    depth, arguments : int
        At most: operators within each other, and values of one.

    Returns
    -------
    Dataset
    """
    rng = np.random.default_rng(seed)
    found = []
    while len(found) < examples:
        expression = _Expression(rng, n, depth, arguments)
        if shortest <= len(expression.tokens) <= n:
            found.append(expression)
    tokens = stacked([x.tokens for x in found], n)[:, None]
    return Dataset(tokens, np.array([x.value for x in found]), len(TOKENS), 10)


class _Expression:
    """The tokens and the value of one tree; it ends early where it becomes too long."""

    def __init__(self, rng, longest, depth, arguments):
        self._rng, self._longest, self._arguments = rng, longest, arguments
        self.tokens = []
        self.value = self._operator(depth)

    def _operator(self, depth):
        name = list(OPERATORS)[self._rng.integers(len(OPERATORS))]
        self.tokens.append(_NUMBER[name])
        values = []
        for nested in self._rng.random(self._rng.integers(2, self._arguments + 1)):
            if len(self.tokens) > self._longest:
                return 0
            deeper = nested < NESTED and depth > 1
            values.append(self._operator(depth - 1) if deeper else self._digit())
        self.tokens.append(_CLOSE)
        return OPERATORS[name](values)

    def _digit(self):
        value = int(self._rng.integers(10))
        self.tokens.append(_NUMBER[str(value)])
        return value


def evaluate(tokens):
    """The value of an expression, read from its tokens.

    Raises
    ------
    ValueError
        If brackets do not match.
    """
    open_, values = [], [[]]
    for token in map(int, tokens):
        if _FIRST_OPERATOR <= token < _CLOSE:
            open_.append(TOKENS[token])
            values.append([])
        elif token == _CLOSE:
            if not open_:
                raise ValueError("a bracket is closed that was never opened")
            value = OPERATORS[open_.pop()](values.pop())
            values[-1].append(value)
        else:
            values[-1].append(token - 1)
    if open_ or len(values[0]) != 1:
        raise ValueError(f"{len(open_)} brackets are open at the end")
    return values[0][0]
