"""Hopper's decode kernel: geometries and numbers of shares against each other.

For each size and dtype of the cache the table's row with the rule's number of shares; the same with
numbers that fill other whole waves; and the candidates of ``sweeps/tune-decode.toml`` with theirs.
All are checked, then timed in shuffled rounds. Table and rule agree where their choice is the
fastest, or is not told from it: its median is within the fastest one's 90th percentile.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from experiments.commands.decode import Problem, of_all, quantised
from experiments.commands.tune import judged, within_reach
from experiments.harness import sweeps
from experiments.harness.backends import open_backend, parse_dtype
from experiments.harness.errors import BadInput, OutOfBudget
from experiments.harness.provenance import provenance
from experiments.harness.runner import left_out
from experiments.harness.timing import QueuedEvents, interleave
from experiments.report.tables import progress, say, show, write_csv, wrote
from nbflash.backends.split_kv.splits import most_splits, splits_for
from nbflash.inputs.decode_problem import Cache, check_decode
from nbflash.testing import make_qkv

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


def others_of(config, specs):
    """The candidates of a sweep: those of the least reach that the head dimension is within."""
    for changed in within_reach(config.head_dim, specs):
        box = changed.get("tile_n", config.tile_n)  # all keys of a tile: caches are contiguous
        yield replace(config, box=box, **changed)


def candidates(problem, multiprocessors, sweep):
    """(config, splits): the table's row with the rule's number first."""
    from nbflash.backends.sm90.decode.host import config_for

    chosen, found = config_for(problem, None), []
    for config in (chosen, *others_of(chosen, sweep["stored" if chosen.quantised else "wide"])):
        if reasons := config.why_not():
            left_out(name_of(config), f"d={config.head_dim}", "; ".join(reasons))
            continue
        numbers = shares_of(problem, config, multiprocessors, sweep["waves"])
        found += [(config, splits) for splits in numbers]
    return list(dict.fromkeys(found))


def decoder_of(config, splits, problem, q, cache):
    """A decode with one geometry and number of shares: a function that gives ``out``."""
    from nbflash.backends.sm90.decode.host import Sm90Partial
    from nbflash.planning.decode_plan import CudaDecoder

    make = partial(Sm90Partial, config=config, splits=splits)
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


def compare(backend, clock, problem, name, sweep, seed):
    """Rows of one size and cache, the choice of table and rule first."""
    q, (cache, expected) = backend.array(problem.q), caches_of(backend, problem, name)
    checked, runs, dtype = check_decode(q, cache), {}, cache.k_cache.dtype.name
    choices = candidates(checked, multiprocessors_of(checked), sweep)
    for choice in choices:
        call = decoder_of(*choice, checked, q, cache)
        try:
            problem.check(name_of(*choice), backend.numpy(call()), expected)
            runs[choice] = clock.prepare(call)
        except OutOfBudget as error:
            if choice == choices[0]:
                raise
            left_out(name_of(*choice), f"{problem.batch} x {problem.keys}, {dtype}", error)
    how = {"rounds": sweep["rounds"], "seconds": sweep["seconds"], "seed": seed}
    title = f"Timing, {problem.batch} x {problem.keys}, {dtype}"
    with progress(title, len(runs) * (sweep["rounds"] + 1)) as advance:
        timings = interleave(runs, clock, **how, progress=advance)
    read = cache.k_cache, cache.v_cache, cache.k_scale, cache.v_scale
    nbytes, rows = sum(x.nbytes for x in read if x is not None), []
    for (config, splits), timing in timings.items():
        geometry = {key: getattr(config, key) for key in ("tile_n", "stages", "min_blocks")}
        row = problem.sizes | {"cache": dtype}
        row |= {"config": name_of(config, splits)} | geometry | {"splits": splits} | timing.columns
        rows.append(row | {"gb_per_s": nbytes / timing.median / 1e6})
    return judged(rows, name_of(*choices[0]))


def multiprocessors_of(problem):
    """Of the problem's device."""
    from nbflash.cuda.device import cuda_device

    return cuda_device(problem.device_id).multiprocessors


def show_rows(rows):
    """Those of one size and cache, the fastest first."""
    first, rows = rows[0], sorted(rows, key=lambda row: row["median_ms"])
    agrees = "agrees" if first["table_agrees"] else "differs"
    title = f"{first['batch']} × {first['keys']}, d={first['head_dim']}, {first['cache']}: {agrees}"
    marks = ["table" if row["table_chooses"] else "" for row in rows]
    cells = [[*(row[key] for key in KEYS), mark] for row, mark in zip(rows, marks, strict=True)]
    show(f"\n{title}", COLUMNS, cells)


def run(out, seed=0, quick=False):
    """Measure, print the tables, write ``tune-decode.csv`` to the directory ``out``.

    Raises
    ------
    OutOfBudget
        If what table and rule choose is wrong; a candidate that is wrong is left out.
    """
    from nbflash.planning.dispatch import why_not_here

    section, sweep = "quick" if quick else "full", sweeps.load("tune-decode")
    sweep |= sweep[section]
    backend, dtype = open_backend("cuda"), parse_dtype(sweep["dtype"])
    if reasons := why_not_here("sm90"):
        raise BadInput("; ".join(reasons))
    origin, clock, rows = provenance("cuda"), QueuedEvents(sweep["sample_ms"]), []
    say(f"[bold]{origin['device']}[/bold], {dtype.name}, commit {origin['commit']}")
    heads = sweep["heads"], sweep["heads_kv"]
    for head_dim in sweep["head_dim"]:
        for batch, keys in sweep["sizes"]:
            q, *_ = make_qkv(batch, 1, 1, *heads, head_dim, dtype, seed=seed)
            _, k, v, _ = make_qkv(1, 1, keys, *heads, head_dim, dtype, seed=seed + 1)
            problem = Problem(q, k[0], v[0])
            for name in ("", *sweep["quantised"]):
                found = compare(backend, clock, problem, name, sweep, seed)
                show_rows(found)
                rows += [row | origin for row in found]
                write_csv(out / "tune-decode.csv", rows)
    wrote(out / "tune-decode.csv")
    return rows
