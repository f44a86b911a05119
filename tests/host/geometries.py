"""Configurations of kernels as numbers: ``python tests/host/geometries.py`` writes the table anew.

The rows of the tables have been measured, and kernels are laid out by what follows from them. So
the table holds of each configuration the numbers that are not 0, and of properties those, too.
"""

import dataclasses
import inspect
import itertools
import textwrap
from pathlib import Path

from nbflash.backends.simt import configs as simt
from nbflash.backends.simt.decode_configs import decode_config as simt_decode
from nbflash.backends.sm80 import config as sm80
from nbflash.backends.sm80.decode.config import decode_config as sm80_decode
from nbflash.backends.sm90.backward import config as sm90_backward
from nbflash.backends.sm90.backward.dq_config import completed, dq_configs
from nbflash.backends.sm90.decode.config import decode_config as sm90_decode
from nbflash.backends.sm90.forward.config import forward_configs

TABLE = Path(__file__).parent / "geometries.txt"
LIMITS = 48, 64, 99, 163, 227  # KB of shared memory that a block may have
# What is no number, is in smem too, or is the same everywhere.
LEFT_OUT = {"accumulator", "barriers", "cleaned", "copy", "tile", "ds_tile", "score", "unroll"}
LEFT_OUT |= {"dropout", "vectors", "negate", "edge", "full_tiles", "masks_in_place", "p_at"}
LEFT_OUT |= {"quantised", "kept", "stage_bytes", "itemsize", "masked", "placed", "sloped"}


def _words(x):
    """A number, or numbers; in words what is neither."""
    if isinstance(x, tuple):
        return "/".join(map(_words, x))
    return str(x) if isinstance(x, str) else f"{float(x):.6g}"


def columns(cls):
    """The names of its fields and properties."""
    fields = [field.name for field in dataclasses.fields(cls)]
    properties = inspect.getmembers(cls, lambda x: isinstance(x, property))
    names = dict.fromkeys([*fields, *(name for name, _ in properties)])
    return [name for name in names if name not in LEFT_OUT]


def described(config):
    """The values, in the order of `columns`."""
    return " ".join(_words(getattr(config, name)) or "-" for name in columns(type(config)))


def of_simt():
    """The first choice for every limit, forward and backward, and for decode."""
    how = itertools.product(("float32", "float64"), (64, 72, 128, 192, 256))
    for dtype, head_dim in how:
        for limit in LIMITS:
            common = {"vectors": dtype != "float64", "smem_limit": limit << 10}
            yield limit, simt.forward_config(dtype, head_dim, cp_async=True, **common)
            more = {"deterministic": limit < LIMITS[-1], "vector_red": True}
            for config in simt.backward_configs(dtype, head_dim, **common, **more):
                yield limit, config
    for dtype, head_dim in (("float16", 40), ("float32", 128), ("float64", 256)):
        for group, nq in ((1, 1), (1, 2), (4, 1), (6, 3), (16, 5)):
            more = {"nq": nq, "group": group, "masked": False, "vectors": True}
            yield f"{group}*{nq}", simt_decode(dtype, dtype, head_dim, **more)


def of_sm80():
    """The same, for every combination of what there is."""
    for head_dim, limit in itertools.product((16, 40, 64, 128, 192, 256), LIMITS[2:]):
        room = limit << 10
        for config in sm80.forward_configs("float16", head_dim, smem_limit=room):
            yield limit, config
        for dropout in (False, True):
            more = {"deterministic": limit == LIMITS[3], "vector_red": True, "dropout": dropout}
            rows = sm80.backward_configs("float16", head_dim, smem_limit=room, **more)
            for config in itertools.chain.from_iterable(rows):
                yield f"{limit}{'d' * dropout}", config
        for stored, scored in (("", False), ("int8", False), ("int8", True)):
            if not stored or head_dim % 16 == 0:
                more = {"smem_limit": room, "scored": scored}
                yield f"{limit}{'s' * scored}", sm80_decode("float16", head_dim, stored, **more)


def of_sm90():
    """All rows of the tables, with and without dropout."""
    for head_dim in (16, 64, 128, 192, 256):
        for dropout in (False, True):
            found = forward_configs("float16", head_dim, dropout=dropout)
            found += [completed(x, dropout=dropout) for x in dq_configs("float16", head_dim)]
            yield from (("", config) for config in found)
        found = sm90_backward.columns_configs("float16", head_dim)
        found += sm90_backward.backward_configs("float16", head_dim)
        yield from (("", config) for config in found)
        for stored, masked in (("", False), ("int8", False), ("int8", True)):
            page_size = 16 if masked else None
            yield "", sm90_decode("float16", head_dim, page_size, stored, masked=masked)


def text():
    """By class: columns, and each configuration once, with what it is chosen for."""
    tables = {}
    for what, config in (*of_simt(), *of_sm80(), *of_sm90()):
        if config is not None:
            places = tables.setdefault(type(config), {}).setdefault(described(config), [])
            places.append(str(what))
    found = []
    for cls, rows in tables.items():
        found += textwrap.wrap(f"{cls.__name__}: {' '.join(columns(cls))}", 98)
        found += [f"  {row} [{' '.join(dict.fromkeys(what))}]" for row, what in rows.items()]
    return "\n".join(found) + "\n"


if __name__ == "__main__":
    TABLE.write_text(text())
