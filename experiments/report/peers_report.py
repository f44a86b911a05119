"""Tables and figure of nbflash beside other libraries."""

import math

from matplotlib.figure import Figure

from experiments.harness.passes import NBFLASH
from experiments.report.figures import COLOURS, save
from experiments.report.tables import show, size_of

#: What makes two rows comparable.
KEYS = ("pass", "head_dim", "seqlen", "mask")


def ratios(rows):
    """Speed of nbflash over that of each other library, where both ran.

    Parameters
    ----------
    rows : list of dict
        As in ``peers.csv``.

    Returns
    -------
    dict of (pass, head_dim, seqlen, mask) to dict of library to float
        Above 1 where nbflash is faster.
    """
    own = {_key(row): row["tflops"] for row in rows if is_own(row)}
    found = {key: {} for key in own}
    for row in rows:
        if not is_own(row) and _key(row) in own:
            found[_key(row)][row["library"]] = own[_key(row)] / row["tflops"]
    return found


def is_own(row):
    """Whether a row is nbflash's, of whichever implementation."""
    return row["library"].split()[0] == NBFLASH


def _key(row):
    return tuple(row[key] for key in KEYS)


def show_rows(rows):
    """Print the rows of one shape, the ratio of nbflash to each library last."""
    columns = {"pass": "", "mask": "", "": "", "ms": ".3f", "p10": ".3f", "p90": ".3f"}
    columns |= {"TFLOP/s": ".0f", "error": ".1e", "nbflash ×": ".2f"}
    keys = ("pass", "mask", "library", "median_ms", "p10_ms", "p90_ms", "tflops", "error")
    of = ratios(rows)
    cells = [
        [*(row[key] for key in keys), of.get(_key(row), {}).get(row["library"])] for row in rows
    ]
    show(size_of(rows[0]), columns, cells)


def show_ratios(rows):
    """Print the speed of nbflash over that of each library, and the geometric means."""
    found = {key: of for key, of in ratios(rows).items() if of}
    names = list(dict.fromkeys(name for of in found.values() for name in of))
    if not names:
        return
    columns = {"pass": "", "d": "d", "N": "d", "mask": ""} | dict.fromkeys(names, ".2f")
    cells = [[*key, *(of.get(name) for name in names)] for key, of in found.items()]
    means = [_geometric_mean([of[name] for of in found.values() if name in of]) for name in names]
    cells.append(["geometric mean", None, None, None, *means])
    show("nbflash's speed over that of each library", columns, cells)


def _geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def draw(rows, path):
    """TFLOP/s per mask and library: a row of panels per length, a column per pass and head_dim."""
    lengths = list(dict.fromkeys(row["seqlen"] for row in rows))
    columns = list(dict.fromkeys((row["pass"], row["head_dim"]) for row in rows))
    names = list(dict.fromkeys(row["library"] for row in rows))
    size = (5.4 * len(columns), 0.8 + 4.6 * len(lengths))
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    axes = figure.subplots(len(lengths), len(columns), squeeze=False)
    for line, n in zip(axes, lengths, strict=True):
        for ax, (which, head_dim) in zip(line, columns, strict=True):
            at = {"seqlen": n, "pass": which, "head_dim": head_dim}
            group = [row for row in rows if all(row[key] == value for key, value in at.items())]
            if not group:
                ax.set_axis_off()
                continue
            _draw_bars(ax, group, names)
            ax.set_title(f"{which}, d={head_dim}, N={n}", fontsize=9)
    first, commits = rows[0], ", ".join(dict.fromkeys(row["commit"] for row in rows))
    figure.legend(*_legend(names), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(
        f"{first['dtype']} attention on {first['device']}, commit {commits}", fontsize=9
    )
    save(figure, path)


def _draw_bars(ax, rows, names):
    """One group of bars per mask, one bar per library that ran it."""
    labels = list(dict.fromkeys(row["mask"] for row in rows))
    height = 0.8 / len(names)
    for row in rows:
        place = names.index(row["library"])
        y = labels.index(row["mask"]) + (place - (len(names) - 1) / 2) * height
        bar = ax.barh(y, row["tflops"], height, color=COLOURS[place % len(COLOURS)])
        ax.bar_label(bar, fmt="%.0f", padding=2, fontsize=6)
    ax.set_yticks(range(len(labels)), labels, fontsize=8)
    ax.set_axisbelow(True)
    ax.grid(axis="x", color="#dddddd", linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.set_xlabel("TFLOP/s", fontsize=8)


def _legend(names):
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[i % len(COLOURS)]) for i in range(len(names))]
    return handles, names
