"""The decode kernels of tensor cores: geometries and numbers of shares against each other.

For each size and dtype of the cache the table's row with the rule's number of shares; the same with
numbers that fill other whole waves; and the candidates of ``sweeps/tune-decode.toml`` with theirs.
All are checked, then timed in shuffled rounds. Table and rule agree where their choice is the
fastest, or is not told from it: its median is within the fastest one's 90th percentile.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from experiments.commands.decode import of_all, problems, quantised
from experiments.commands.tune import judged, within_reach
from experiments.harness.console import left_out
from experiments.harness.errors import OutOfBudget
from experiments.harness.runner import Runner, Task
from experiments.harness.setup import set_up
from experiments.report.tables import show, write_csv, wrote
from nbflash.backends.split_kv.splits import most_splits, splits_for
from nbflash.inputs.decode_problem import Cache, check_decode

COLUMNS = {"keys a tile": "d", "stages": "d", "blocks": "d", "shares": "d", "ms": ".4f"}
COLUMNS |= {"p10": ".4f", "p90": ".4f", "GB/s": ",.0f", "× fastest": ".3f", "": ""}
KEYS = ("tile_n", "stages", "min_blocks", "splits", "median_ms", "p10_ms", "p90_ms", "gb_per_s")
KEYS += ("over_fastest",)


def shares_of(problem, config, multiprocessors, waves):
    """Numbers of shares for a geometry, the rule's first."""
    items, tiles = problem.batch * problem.heads_kv, -(-problem.capacity // config.tile_n)
    slots, most = multiprocessors * config.min_blocks, most_splits(tiles)
    filling = (min(max(count * slots // items, 1), most) for count in waves)
    return list(dict.fromkeys([splits_for(items, tiles, slots), *filling]))


def name_of(config, *splits):
    """What the candidates differ in."""
    of_config = f"{config.tile_n} keys, {config.stages} stages, {config.min_blocks} blocks"
    return ", ".join([of_config, *(f"{n} shares" for n in splits)])


class Kernel(NamedTuple):
    """A decode kernel for one problem: what binds it, the table's row, and other geometries."""

    binding: type
    chosen: Any
    others: list
    why_not: Callable


def hopper(problem, device, sweep):
    """The `Kernel` of ``sm90``."""
    from nbflash.backends.sm90.decode.host import Sm90Partial, config_for

    chosen = config_for(problem, None)
    specs = within_reach(chosen.head_dim, sweep["stored" if chosen.quantised else "wide"])
    # A box has all keys of a tile: caches are contiguous.
    boxed = ({"box": changed.get("tile_n", chosen.tile_n)} | changed for changed in specs)
    others = [replace(chosen, **changed) for changed in boxed]
    return Kernel(Sm90Partial, chosen, others, type(chosen).why_not)


def portable(problem, device, sweep):
    """The `Kernel` of ``sm80``."""
    from nbflash.backends.sm80.config import fits
    from nbflash.backends.sm80.decode.host import Sm80Partial

    def why_not(config):
        fit = fits(config, device.smem_limit)
        return [] if fit else [f"{config.min_blocks} blocks do not fit shared memory"]

    chosen = Sm80Partial.config_for(device, problem, None)
    listed = sweep["portable_stored" if chosen.quantised else "portable"]
    specs = within_reach(chosen.head_dim, listed)
    others = [replace(chosen, **changed) for changed in specs]
    return Kernel(Sm80Partial, chosen, others, why_not)


KERNELS = {"sm90": hopper, "sm80": portable}


def candidates(kernel, problem, multiprocessors, waves):
    """(config, splits): the table's row with the rule's number first."""
    found = []
    for config in (kernel.chosen, *kernel.others):
        if reasons := kernel.why_not(config):
            left_out(name_of(config), f"d={config.head_dim}", "; ".join(reasons))
            continue
        found += [(config, n) for n in shares_of(problem, config, multiprocessors, waves)]
    return list(dict.fromkeys(found))


def decoder_of(binding, config, splits, problem, q, cache):
    """A decode with one geometry and number of shares: a function that gives ``out``."""
    from nbflash.planning.decode_plan import CudaDecoder

    make = partial(binding, config=config, splits=splits)
    decoder = CudaDecoder(problem, None, q, cache, make)
    return lambda: decoder(q, cache, False)[0]


def caches_of(backend, problem, name):
    """The cache of a dtype of one byte, or of the queries' for no name, and what is expected."""
    lengths = backend.array(np.full(problem.batch, problem.keys, np.int32))
    if name:
        caches, scales, expected = quantised(backend, problem, name)
        return Cache(*caches, lengths, None, *scales), expected
    caches = (of_all(backend, x, problem.batch) for x in (problem.k, problem.v))
    return Cache(*(x.view(problem.q.dtype) for x in caches), lengths), problem.plain


def compare(setup, problem, name, impl="sm90"):
    """Rows of one size and cache, the choice of table and rule first."""
    backend = setup.backend
    q, (cache, expected) = backend.array(problem.q), caches_of(backend, problem, name)
    checked, dtype = check_decode(q, cache), cache.k_cache.dtype.name
    device = device_of(checked)
    kernel = KERNELS[impl](checked, device, setup.settings)
    numbers = device.multiprocessors, setup.settings["waves"]
    choices = {name_of(*choice): choice for choice in candidates(kernel, checked, *numbers)}
    first = next(iter(choices))

    def check(out):
        return problem.check(backend.numpy(out), expected)

    def leave_out(key, error, stage):
        if key == first or not isinstance(error, OutOfBudget):
            return False
        left_out(key, f"{problem.batch} x {problem.keys}, {dtype}{stage}", error)
        return True

    makers = {
        key: lambda choice=choice: Task(
            decoder_of(kernel.binding, *choice, checked, q, cache), check
        )
        for key, choice in choices.items()
    }
    runner = Runner(setup.clock, setup.settings, leave_out)
    timed = runner.measure(makers, f"Timing, {problem.batch} x {problem.keys}, {dtype}")
    read = cache.k_cache, cache.v_cache, cache.k_scale, cache.v_scale
    nbytes, rows = sum(x.nbytes for x in read if x is not None), []
    for key, task in timed.items():
        config, splits = choices[key]
        geometry = {name: getattr(config, name) for name in ("tile_n", "stages", "min_blocks")}
        row = problem.sizes | {"cache": dtype, "config": key} | geometry | {"splits": splits}
        rows.append(row | task.timing.columns | {"gb_per_s": nbytes / task.timing.median / 1e6})
    return judged(rows, first)


def device_of(problem):
    """The problem's device."""
    from nbflash.cuda.device import cuda_device

    return cuda_device(problem.device_id)


def show_rows(rows):
    """Those of one size and cache, the fastest first."""
    first, rows = rows[0], sorted(rows, key=lambda row: row["median_ms"])
    agrees = "agrees" if first["table_agrees"] else "differs"
    title = f"{first['batch']} × {first['keys']}, d={first['head_dim']}, {first['cache']}: {agrees}"
    marks = ["table" if row["table_chooses"] else "" for row in rows]
    cells = [[*(row[key] for key in KEYS), mark] for row, mark in zip(rows, marks, strict=True)]
    show(f"\n{title}", COLUMNS, cells)


def run(out, seed=0, quick=False, impl="sm90"):
    """Measure, print the tables, write ``tune-decode.csv`` to the directory ``out``.

    OutOfBudget is raised where what table and rule choose is wrong; other candidates are left out.
    """
    section, rows = "quick" if quick else "full", []
    setup = set_up("tune-decode", section, "cuda", seed=seed, impl=impl)
    for problem in problems(setup.settings, setup.settings["head_dim"]):
        for name in ("", *setup.settings["quantised"]):
            found = compare(setup, problem, name, impl)
            show_rows(found)
            rows += [row | setup.origin for row in found]
            write_csv(out / "tune-decode.csv", rows)
    wrote(out / "tune-decode.csv")
    return rows
