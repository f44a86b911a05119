"""The cases of a sweep that compares libraries, lengths or configurations, shape by shape."""

from dataclasses import dataclass, field

import numpy as np

import masks
from experiments.harness.errors import BadInput
from experiments.harness.passes import DENSE
from nbflash import BlockMap

CAUSAL, BLOCKS = "causal", "blocks"
WINDOW, DOCUMENTS, PREFIX = "window", "documents", "prefix"

#: Tables of a sweep, and the keys of a mask that say where it is run in them.
SECTIONS = ("full", "quick", "paper")

#: The table of a sweep whose cases have sizes of their own, and the tile of lists of blocks there.
CASES, TILE = "cases", 128


@dataclass(frozen=True)
class Case:
    """One mask at one shape.

    Attributes
    ----------
    name : str
        Of the mask.
    kind : {"dense", "causal", "window", "documents", "prefix", "blocks"}
    mask : masks.Mask, nbflash.BlockMap or None
        None without one.
    density : float
        Share of the scores that count as work: a half for causal, of blocks those that are touched.
    tile : int or None
        Block size.
    shape : (batch, seqlen, heads, head_dim)
    heads_kv : int, optional
        Unless there are as many as heads.
    arguments : dict
        Of the pattern.
    libraries : tuple of str
        Which are to run it; empty for all.
    """

    name: str
    kind: str
    mask: masks.Mask | BlockMap | None = field(hash=False)  # the contents of a map may change
    density: float
    tile: int | None
    shape: tuple[int, int, int, int]
    heads_kv: int | None = None
    arguments: dict = field(default_factory=dict, hash=False)
    libraries: tuple[str, ...] = ()


def random_rows(n, block, per_row, seed=0):
    """A mask of ``per_row`` random blocks in every row of blocks."""
    m = n // block
    columns = np.random.default_rng(seed).random((m, m)).argsort(axis=1)[:, :per_row]
    return BlockMap(columns[None, None], shape=(n, n), block=block).to_mask()


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
        In the section "cases" of (batch, seqlen, heads, head_dim, heads_kv).

    Raises
    ------
    BadInput
        If a name is none of the sweep's, or nothing is left to run.
    """
    sweep = sweep | sweep[section]
    known = [spec["name"] for spec in sweep["case" if section == CASES else "mask"]]
    for name in names:
        if name not in known:
            raise BadInput(f"--mask {name}: expected one of {', '.join(known)}")
    if section == CASES:
        return _cases_of_their_own(sweep, names, head_dims, seqlens)
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


def _cases_of_their_own(sweep, names, head_dims, seqlens):
    """Of the specs that have shapes; each choice leaves all in unless it names some."""
    found = {}
    for spec in sweep["case"]:
        for shape in map(tuple, spec["shapes"]):
            values = (names, spec["name"]), (seqlens, shape[1]), (head_dims, shape[3])
            if all(not chosen or value in chosen for chosen, value in values):
                case = _case({"tile": TILE, "libraries": sweep["libraries"]} | spec, shape)
                found.setdefault((*shape, case.heads_kv or shape[2]), []).append(case)
    if not found:
        raise BadInput("no case is of these masks, lengths and head dimensions")
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
    name, pattern, tile = spec["name"], spec["pattern"], spec["tile"]
    own = {"name", "pattern", "tile", "shapes", "heads_kv", "libraries", *SECTIONS}
    arguments = {key: value for key, value in spec.items() if key not in own}
    more = spec.get("heads_kv"), arguments, tuple(spec.get("libraries", ()))
    make = random_rows if pattern == "random_rows" else getattr(masks, pattern)
    n = shape[1]
    if pattern in (DENSE, CAUSAL):
        density = 1.0 if pattern == DENSE else 0.5
        return Case(name, pattern, make(n), density, tile, shape, *more)
    if pattern in (WINDOW, DOCUMENTS, PREFIX):
        mask = make(**arguments) if pattern == DOCUMENTS else make(n, **arguments)
        return Case(name, pattern, mask, mask.nnz / n**2, tile, shape, *more)
    mask = make(n, block=tile, **arguments)
    return Case(name, BLOCKS, mask, block_density(mask, tile), tile, shape, *more)
