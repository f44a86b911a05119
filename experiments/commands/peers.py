"""nbflash beside other attention libraries: the same inputs, masks and rounds for all of them.

Every library computes each mask that it can express, checked and timed as in
:mod:`experiments.harness.comparison`. The inputs of the sweep are larger than the L2 cache.
"""

from functools import partial

from experiments.harness.comparison import measure_all, refuse
from experiments.harness.console import left_out
from experiments.harness.errors import BadInput
from experiments.harness.grid import CASES
from experiments.harness.passes import NBFLASH, PASSES
from experiments.harness.setup import set_up
from experiments.libraries.registry import LIBRARIES, why_not_here
from experiments.report.tables import write_csv, wrote

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


def run(out, section, seed=0, passes=tuple(PASSES), impl="auto", libraries=(), **chosen):
    """Measure, print the tables, write ``peers.csv`` and ``peers.png`` to the directory ``out``.

    Takes the options of the command; ``chosen`` are ``rounds`` of `set_up` and ``names``,
    ``head_dims`` and ``seqlens`` of `read_cases`. Files of the section ``cases`` are named
    ``peers-cases``.
    """
    from experiments.report.peers_report import draw, show_ratios, show_rows

    stem, rows = f"peers-{CASES}" if section == CASES else "peers", []
    setup = set_up("peers", section, "cuda", seed=seed, **chosen)
    factories = open_factories(libraries, impl)

    def keep(found):
        show_rows(found)
        rows.extend({key: (row | setup.origin)[key] for key in COLUMNS} for row in found)
        write_csv(out / f"{stem}.csv", rows)

    wrong = measure_all(setup, factories, passes, keep)
    if rows:
        show_ratios(rows)
        draw(rows, out / f"{stem}.png")
        wrote(out / f"{stem}.csv", out / f"{stem}.png")
    refuse(wrong, rows)
    return rows
