"""nbflash beside other attention libraries: the same inputs, masks and rounds for all of them.

Every library computes each mask that it can express, checked and timed as in
:mod:`experiments.harness.runner`. The inputs of the sweep are larger than the L2 cache.
"""

from functools import partial

from experiments.harness import sweeps
from experiments.harness.backends import open_backend, parse_dtype
from experiments.harness.errors import BadInput
from experiments.harness.grid import read_cases
from experiments.harness.passes import PASSES
from experiments.harness.provenance import provenance
from experiments.harness.runner import left_out, measure_all, refuse
from experiments.harness.timing import QueuedEvents
from experiments.libraries.peers import LIBRARIES, NBFLASH, why_not_here
from experiments.report.tables import say, write_csv, wrote

#: The columns of ``peers.csv``.
COLUMNS = (
    *("library", "version", "pass", "mask", "density", "tile", "head_dim", "heads", "heads_kv"),
    *("batch", "seqlen", "dtype", "median_ms", "p10_ms", "p90_ms", "tflops", "error", "device"),
    *("driver", "commit", "date"),
)


def open_factories(names, impl):
    """Adapters of the libraries that this machine has; a line for each that it lacks."""
    for name in names:
        if name not in LIBRARIES:
            raise BadInput(f"--library {name}: expected one of {', '.join(LIBRARIES)}")
    found = {}
    for name in LIBRARIES:
        if names and name not in names:
            continue
        if reason := why_not_here(name):
            left_out(name, "this machine", reason)
        else:
            found[name] = LIBRARIES[name]
    if NBFLASH in found:
        found[NBFLASH] = partial(found[NBFLASH], impl=impl)
    return found


def run(out, seed=0, quick=False, passes=tuple(PASSES), impl="auto", libraries=(), **chosen):
    """Measure, print the tables, write ``peers.csv`` and ``peers.png`` to the directory ``out``.

    Parameters
    ----------
    out : pathlib.Path
    seed : int
        Seed of the inputs and of the order of the rounds.
    quick : bool
        The section of the sweep.
    passes : sequence of {"forward", "backward", "both"}
    impl : str
        Implementation of nbflash.
    libraries : sequence of str
        Empty for all that are installed.
    **chosen
        ``names``, ``head_dims`` and ``seqlens`` of `read_cases`.
    """
    from experiments.report.peers_report import draw, show_ratios, show_rows

    section, sweep = "quick" if quick else "full", sweeps.load("peers")
    cases = read_cases(sweep, section, **chosen)
    backend, dtype = open_backend("cuda"), parse_dtype(sweep["dtype"])
    origin = provenance("cuda")
    say(f"[bold]{origin['device']}[/bold], {dtype.name}, commit {origin['commit']}")
    factories, clock = open_factories(libraries, impl), QueuedEvents(sweep["sample_ms"])
    settings = sweep | sweep[section] | {"seed": seed, "xp": backend.xp, "dtype": dtype}
    rows = []

    def keep(found):
        show_rows(found)
        rows.extend({key: (row | origin)[key] for key in COLUMNS} for row in found)
        write_csv(out / "peers.csv", rows)

    wrong = measure_all(cases, clock, factories, settings, passes, keep)
    if rows:
        show_ratios(rows)
        draw(rows, out / "peers.png")
        wrote(out / "peers.csv", out / "peers.png")
    refuse(wrong, rows)
    return rows
