"""Sweeps are data: each ``sweeps/<command>.toml`` is read by the command of its name."""

import tomllib
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path

import masks


@dataclass(frozen=True)
class SweptMask:
    """One mask of a sweep: ``label`` tells it from the others of its family."""

    family: str
    label: str
    expression: str
    mask: masks.Mask


def load(name):
    """The sweep file of a command, parsed."""
    with (Path(__file__).parents[1] / "sweeps" / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)


def cases(families, seqlen, block):
    """The masks of some families, each distinct mask once.

    Parameters
    ----------
    families : list of dict
        As in ``sparsity.toml``: ``name``, ``union`` (patterns and their arguments), ``vary`` (the
        argument of the last pattern that varies) and ``values``.
    seqlen : int
        The masks are square.
    block : int
        Block size of every pattern.

    Returns
    -------
    list of SweptMask
    """
    found = {}
    for family in families:
        *fixed, last = family["union"]
        for value in family["values"]:
            if not _has_room(family["vary"], value, -(-seqlen // block)):
                continue
            terms = [*fixed, last | {family["vary"]: value}]
            mask = reduce(or_, (_pattern(term, seqlen, block) for term in terms))
            label = f"{family['vary']} {value:g}"
            expression = " | ".join(map(_expression, terms))
            found.setdefault(mask, SweptMask(family["name"], label, expression, mask))
    return list(found.values())


def _has_room(argument, value, blocks):
    """Whether a sequence of so many blocks is long enough for the value to mean anything new."""
    if argument == "stages":
        return 2**value <= blocks
    return argument != "width" or value < blocks


def _expression(term):
    arguments = (f"{name}={value:g}" for name, value in term.items() if name != "pattern")
    return " ".join([term["pattern"], *arguments])


def _pattern(term, seqlen, block):
    arguments = {name: value for name, value in term.items() if name != "pattern"}
    return getattr(masks, term["pattern"])(seqlen, block=block, **arguments)
