"""The cases of a sweep that compares libraries, lengths or configurations, shape by shape."""

from dataclasses import dataclass, field

import masks
from experiments.harness.errors import BadInput
from experiments.harness.passes import DENSE
from nbflash import BlockMap

CAUSAL, BLOCKS = "causal", "blocks"

#: Tables of a sweep, and the keys of a mask that say where it is run in them.
SECTIONS = ("full", "quick", "paper")


@dataclass(frozen=True)
class Case:
    """One mask at one shape.

    Attributes
    ----------
    name : str
        Of the mask.
    kind : {"dense", "causal", "blocks"}
    mask : masks.Mask, nbflash.BlockMap or None
        None without one.
    density : float
        Share of the scores that count as work: a half for causal.
    tile : int or None
        Block size.
    shape : (batch, seqlen, heads, head_dim)
    """

    name: str
    kind: str
    mask: masks.Mask | BlockMap | None = field(hash=False)  # the contents of a map may change
    density: float
    tile: int | None
    shape: tuple[int, int, int, int]


def dense_case(shape):
    """The call without a mask."""
    return Case(DENSE, DENSE, None, 1.0, None, shape)


def block_density(mask, block):
    """Share of the block × block cells of a mask in which anything is attended."""
    kinds = mask.tiles(block, block).kinds
    return kinds.nnz / (kinds.shape[0] * kinds.shape[1])


def read_cases(sweep, section, names=(), head_dims=(), seqlens=()):
    """The cases of a section of the sweep, shape by shape.

    Parameters
    ----------
    sweep : dict
        As in ``peers.toml``.
    section : str
        Name of a table of the sweep, which has precedence over the sweep's own keys.
    names, head_dims, seqlens : sequence
        What the user chose; empty for the section's own.

    Returns
    -------
    dict of (batch, seqlen, heads, head_dim) to list of Case

    Raises
    ------
    BadInput
        If a name is none of the sweep's, or nothing is left to run.
    """
    sweep = sweep | sweep[section]
    known = [spec["name"] for spec in sweep["mask"]]
    for name in names:
        if name not in known:
            raise BadInput(f"--mask {name}: expected one of {', '.join(known)}")
    head_dims, seqlens = head_dims or sweep["head_dim"], seqlens or sweep["seqlen"]
    wanted = [
        (spec, n, head_dim)
        for head_dim in head_dims
        for n in seqlens
        for spec in sweep["mask"]
        if _chosen(spec, section, names, head_dim)
    ]
    if not wanted:
        raise BadInput(
            f"the {section} sweep has no mask at head_dim {head_dims[0]}: name one with --mask"
        )
    found = {}
    for spec, n, head_dim in wanted:
        if _has_room(spec, n):
            shape = _shape(sweep, n, head_dim)
            found.setdefault(shape, []).append(_case(spec, shape))
    if not found:
        rooms = dict.fromkeys(
            f"{spec['name']} takes multiples of {spec['tile']} from {_least(spec)} on"
            for spec, *_ in wanted
        )
        raise BadInput(f"no mask has room in {', '.join(map(str, seqlens))}: {'; '.join(rooms)}")
    return found


def _shape(sweep, n, head_dim):
    """By ``batch`` and ``heads``, or by how many ``tokens`` of which ``width`` there are in all."""
    if "batch" in sweep:
        return sweep["batch"], n, sweep["heads"], head_dim
    return max(1, sweep["tokens"] // n), n, max(1, sweep["width"] // head_dim), head_dim


def _chosen(spec, section, names, head_dim):
    """A mask may list, by section, the head dimensions that it is run at there."""
    if names:
        return spec["name"] in names
    return head_dim in spec.get(section, (head_dim,))


def _has_room(spec, n):
    """Whether the sequence is made of whole blocks, and of more than the mask is wide."""
    return n % spec["tile"] == 0 and n >= _least(spec)


def _least(spec):
    return (spec.get("width", 0) + 1) * spec["tile"]


def _case(spec, shape):
    pattern, n, tile = spec["pattern"], shape[1], spec["tile"]
    if pattern in (DENSE, CAUSAL):
        density = 1.0 if pattern == DENSE else 0.5
        return Case(spec["name"], pattern, getattr(masks, pattern)(n), density, tile, shape)
    own = {"name", "pattern", "tile", *SECTIONS}
    arguments = {key: value for key, value in spec.items() if key not in own}
    mask = getattr(masks, pattern)(n, block=tile, **arguments)
    return Case(spec["name"], BLOCKS, mask, block_density(mask, tile), tile, shape)
