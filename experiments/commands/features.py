"""features: what score functions, dropout and attention sinks cost over plain attention.

Each is checked and timed in shuffled rounds with plain attention as in
:mod:`experiments.harness.comparison`. A sink is `nbflash.merge_sink` after the kernel and
`nbflash.merge_sink_backward` before it. On Hopper softcap and ALiBi are to take at most 1.15 times
as long as plain attention, dropout at most 1.5 times.
"""

from functools import partial

from experiments.harness.comparison import measure_all, refuse
from experiments.harness.errors import BadInput
from experiments.harness.passes import BACKWARD, FORWARD, over_base
from experiments.harness.setup import set_up
from experiments.libraries.features import FEATURES, PLAIN, Featured
from experiments.report.tables import show, size_of, write_csv, wrote

AIMS = {
    "sm80": {"softcap": 1.25, "alibi": 1.25, "dropout": 1.5},
    "sm90": {"softcap": 1.15, "alibi": 1.15, "dropout": 1.5},
}
COLUMNS = {"mask": "", "feature": "", "impl": "", "config": "", "ms": ".3f"}
COLUMNS |= {"p10": ".3f", "p90": ".3f", "TFLOP/s": ",.3g", "/ plain": ".2f", "aim": ".2f"}
COLUMNS |= {"error": ".1e"}
KEYS = ("mask", "feature", "impl", "config", "median_ms", "p10_ms", "p90_ms", "tflops")
KEYS += ("time_over_plain", "aim", "error")


def beside_plain(rows):
    """The rows of a shape with their time relative to plain attention's, and what it is to be."""
    rows = [
        {"feature": row["library"]} | {key: x for key, x in row.items() if key != "library"}
        for row in rows
    ]
    times = over_base(rows, "feature", PLAIN, ("pass", "mask"))
    return [
        row | {"time_over_plain": x, "aim": AIMS.get(row["impl"], {}).get(row["feature"])}
        for row, x in zip(rows, times, strict=True)
    ]


def chosen_features(names):
    """The features of these names, all where there are none; plain is always one of them."""
    for name in names:
        if name not in FEATURES:
            raise BadInput(f"--feature {name}: expected one of {', '.join(FEATURES)}")
    return [name for name in FEATURES if not names or name in (PLAIN, *names)]


def show_passes(rows):
    """A table for each pass of the rows of a shape, mask after mask."""
    for which in dict.fromkeys(row["pass"] for row in rows):
        cells = [[row[key] for key in KEYS] for row in rows if row["pass"] == which]
        show(f"\n{which}, {size_of(rows[0])}", COLUMNS, cells)


def run(
    out,
    quick=False,
    device="auto",
    impl="auto",
    seed=0,
    passes=(FORWARD, BACKWARD),
    features=(),
    dtype=None,
    **chosen,
):
    """Measure, print the tables, write ``features.csv`` to the directory ``out``.

    Takes the options of the command; ``chosen`` are ``names``, ``head_dims`` and ``seqlens`` of
    `read_cases`.
    """
    names, section = chosen_features(features), "quick" if quick else "full"
    setup, rows = set_up("features", section, device, dtype, seed, **chosen), []

    def keep(found):
        found = beside_plain(found)
        show_passes(found)
        rows.extend(row | setup.origin for row in found)
        write_csv(out / "features.csv", rows)

    how = {"xp": setup.backend.xp, "impl": impl}
    factories = {name: partial(Featured, name=name, **how) for name in names}
    wrong = measure_all(setup, factories, passes, keep, own=names)
    if rows:
        wrote(out / "features.csv")
    refuse(wrong, rows)
    return rows
