"""What a launch in the simulator exercises: the signatures of a parity test.

Kernel, configuration and race detection, for each kind of tiles; and, for each kernel, what its
inputs have: NaN, infinities, how a length lies to a tile's, rows without tiles. Values, lengths,
heads and strides do not count.
"""

import dataclasses
import functools
import inspect
import re

import ml_dtypes
import numpy as np
from suites import observe, watched

from masks import BITS, FULL
from nbflash.cuda import launch
from nbflash.cuda.simulator.hopper import SimTensorMap
from nbflash.cuda.simulator.launch import settings

_FUNCTION = re.compile(r"<function _?(\S+) at 0x\w+>")
_INPUTS = {"q", "k", "v", "dout", "dlse"}
_RESULTS = {"o_map", "dq_map"}  # which hold anything
_HALF = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@functools.lru_cache(maxsize=4096)
def _parameters(spec):
    return tuple(inspect.signature(spec.make(spec.config)).parameters)


def _text(value):
    """A field of a configuration, without addresses."""
    functions = getattr(value, "functions", None)
    if functions is not None:  # a ScoreCode
        return "+".join(fn.__name__.strip("_") for fn, _ in functions)
    return _FUNCTION.sub(r"\1", str(value)).replace(" ", "")


@functools.lru_cache(maxsize=4096)
def _kernel(spec):
    """Name and configuration: fields without a default, and those that differ from it."""
    words = [spec.name.removeprefix("nbflash_")]
    for field in dataclasses.fields(spec.config):
        value = getattr(spec.config, field.name)
        if field.default is dataclasses.MISSING:
            words.append(_text(value))
        elif value != field.default:
            words.append(f"{field.name}={_text(value)}")
    return " ".join(words)


def _kinds(named):
    """The kinds of tiles of a launch, of its whole schedule, as they are named."""
    kind = named.get("kind", named.get("kinds"))
    if kind is None:
        return [""]
    found = np.unique(np.minimum(np.asarray(kind), BITS))
    names = {FULL: " | full", BITS: " | bits"}
    return [names.get(int(x), " | interval") for x in found] or [" | nothing"]


def _values(name, value, dtype):
    """An input as floats; None of other arguments and of what is quantised."""
    if isinstance(value, SimTensorMap):
        value = value.array
    elif name not in _INPUTS:
        return None
    value = np.asarray(value)
    if value.dtype.kind == "u":
        return value.view(_HALF[dtype]) if value.dtype.itemsize == 2 and dtype in _HALF else None
    return value if value.dtype.kind in "fV" else None


def _hazards(named, config):
    """What is special about the inputs of a launch."""
    found = set()
    dtype = "" if getattr(config, "stored", "") else getattr(config, "dtype", "")
    for name, value in named.items():
        values = None if name in _RESULTS else _values(name, value, dtype)
        if values is not None:
            if np.isnan(values).any():
                found.add("NaN")
            if np.isinf(values).any():
                found.add("infinity")
    for size, tile in (("nq", "tile_m"), ("nk", "tile_n")):
        n, width = named.get(size), getattr(config, tile, None)
        if n is not None and width:
            found.add(f"{size} {_edge(n, width)}")
    row_ptr = named.get("row_ptr")
    if row_ptr is not None and (np.diff(np.asarray(row_ptr)) == 0).any():
        found.add("rows without tiles")
    return found


def _edge(n, width):
    """How a length lies to a tile's."""
    if n < width:
        return "below a tile"
    names = {0: "of whole tiles", 1: "beside a tile", width - 1: "short of a tile"}
    return names.get(n % width, "between tiles")


def signatures(spec, arguments):
    """The signatures of one launch, as text."""
    named = dict(zip(_parameters(spec), arguments, strict=True))
    race = " race" if settings().race else ""
    for kind in _kinds(named):
        yield _kernel(spec) + kind + race
    for hazard in _hazards(named, spec.config):
        yield f"{spec.name.removeprefix('nbflash_')}: {hazard}"


def install():
    """Have every launch of a kernel's spec observed."""
    simulate = launch.simulate

    @functools.wraps(simulate)
    def observed(spec, blocks, arguments):
        if watched():
            for signature in signatures(spec, arguments):
                observe(signature)
        return simulate(spec, blocks, arguments)

    launch.simulate = observed
