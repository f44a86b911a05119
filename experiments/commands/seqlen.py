"""Runtime against sequence length, and beside the FlashAttention paper's at its own problem.

The masks of a length are checked and timed against each other as in
:mod:`experiments.harness.comparison`, one length after the other.
"""

from functools import partial

from experiments.harness.comparison import measure_all, refuse
from experiments.harness.console import say
from experiments.harness.passes import DENSE, NBFLASH, PASSES, over_base
from experiments.harness.setup import set_up
from experiments.libraries.nbflash import Nbflash
from experiments.report.tables import show, write_csv, wrote

PAPER = "paper"
COLUMNS = {"mask": "", "d": "d", "N": "d", "density": ".1%", "ms": ".3f", "p10": ".3f"}
COLUMNS |= {"p90": ".3f", "TFLOP/s": ",.3g", "/ dense": ".3f", "error": ".1e"}
KEYS = ("mask", "head_dim", "seqlen", "density", "median_ms", "p10_ms", "p90_ms", "tflops")
KEYS += ("time_over_dense", "error")


def beside_dense(rows):
    """The rows of a shape with their time relative to the dense mask's, None without one."""
    times = over_base(rows, "mask", DENSE, ("pass",))
    return [row | {"time_over_dense": x} for row, x in zip(rows, times, strict=True)]


def peak_ratio(peaks, device, other):
    """How many times faster a device is than another on paper; None for one without a peak.

    Parameters
    ----------
    peaks : dict of str to float
        Part of a device's name to its peak.
    """
    found = [next((x for name, x in peaks.items() if name in of), None) for of in (device, other)]
    return None if None in found else found[0] / found[1]


def beside_paper(rows, section, device):
    """Rows with the paper's time, alone and divided by the ratio of the devices' peaks.

    Parameters
    ----------
    section : dict
        ``paper`` of ``seqlen.toml``.
    device : str
    """
    figures = section["figures"]
    ratio = peak_ratio(section["peak_tflops"], device, figures["device"])
    found = []
    for row in rows:
        paper = None
        if row["mask"] == figures["mask"] and row["seqlen"] in figures["seqlen"]:
            paper = figures[row["pass"]][figures["seqlen"].index(row["seqlen"])]
        scaled = paper / ratio if paper and ratio else None
        found.append(
            row
            | {
                "paper_device": figures["device"],
                "paper_ms": paper,
                "speedup_over_paper": paper and paper / row["median_ms"],
                "peak_ratio": ratio,
                "paper_at_peak_ratio_ms": scaled,
                "speedup_at_peak_ratio": scaled and scaled / row["median_ms"],
            }
        )
    return found


def show_passes(rows):
    """A table for each pass, mask after mask and length after length."""
    for which in dict.fromkeys(row["pass"] for row in rows):
        of_pass = [row for row in rows if row["pass"] == which]
        of_pass.sort(key=lambda row: (row["mask"] != DENSE, row["mask"], row["head_dim"]))
        cells = [[row[key] for key in KEYS] for row in of_pass]
        show(f"\n{which}: runtime against sequence length", COLUMNS, cells)


def show_paper(rows, section):
    """The paper's times beside those measured."""
    ratio, figures = rows[0]["peak_ratio"], section["figures"]
    device = figures["device"]
    columns = {"pass": "", "N": "d", "keys of a query": ".0f", "ms": ".3f", f"{device} ms": ".2f"}
    columns |= {"× paper": ".2f", f"{device} ms / peak ratio": ".3f", "× that": ".2f"}
    keys = ("pass", "seqlen", "keys", "median_ms", "paper_ms", "speedup_over_paper")
    keys += ("paper_at_peak_ratio_ms", "speedup_at_peak_ratio")
    of_paper = [row | {"keys": row["density"] * row["seqlen"]} for row in rows if row["paper_ms"]]
    show(f"\nbeside {figures['source']}", columns, [[row[key] for key in keys] for row in of_paper])
    if ratio:
        peaks = section["peak_tflops"]
        name = next(name for name in peaks if name in rows[0]["device"])
        say(
            f"peak ratio: {name} over {device}, {peaks[name]} / {peaks[device]} dense float16 "
            f"TFLOP/s = {ratio:.2f}."
        )
    say(
        "The paper's times grow with N alone from 4096 on, as for a fixed number of keys of each "
        "query; here their number grows with log N: the problem is the same by name, not by scores."
    )


def run(
    out, section, device="auto", impl="auto", dtype=None, seed=0, passes=tuple(PASSES), **chosen
):
    """Measure, print the tables, write ``seqlen.csv`` and ``seqlen.png`` to the directory ``out``.

    Takes the options of the command; ``chosen`` are ``names``, ``head_dims`` and ``seqlens`` of
    `read_cases`. Files of the section ``paper`` are named ``seqlen-paper``.
    """
    from experiments.report.figures import draw_seqlen

    setup = set_up("seqlen", section, device, dtype, seed, **chosen)
    stem, rows = f"seqlen-{PAPER}" if section == PAPER else "seqlen", []
    paper = setup.sweep[PAPER]

    def keep(found):
        found = beside_dense(found)
        if section == PAPER:
            found = beside_paper(found, paper, setup.origin["device"])
        rows.extend(row | setup.origin for row in found)
        write_csv(out / f"{stem}.csv", rows)

    factories = {NBFLASH: partial(Nbflash, impl=impl)}
    wrong = measure_all(setup, factories, passes, keep)
    if rows:
        show_passes(rows)
        if section == PAPER:
            show_paper(rows, paper)
        draw_seqlen(rows, out / f"{stem}.png")
        wrote(out / f"{stem}.csv", out / f"{stem}.png")
    refuse(wrong, rows)
    return rows
