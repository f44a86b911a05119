"""Figures, one function per command, drawn without a display."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.fit import SLOPE_LIMIT
from experiments.passes import BASELINE, DENSE, PASSES

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b")
GREY = "#555555"


def _axes(panels, width=5.0, height=4.4):
    figure = Figure(figsize=(width * panels, height), layout="constrained", dpi=150)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for ax in axes:
        ax.grid(which="major", color="#dddddd", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plain_ticks(axis, percent=False):
    """Ticks as 1, 2, 5, 10, ... in digits instead of powers of ten."""
    axis.set_major_locator(_log_locator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g} %" if percent else f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _log_locator():
    from matplotlib.ticker import LogLocator

    return LogLocator(base=10, subs=(1, 2, 5))


def draw_sparsity(rows, fits, path):
    """Runtime against density for both passes and, for a user's input, the fidelity."""
    fidelity = any(row["output_error"] is not None for row in rows)
    figure, axes = _axes(2 + fidelity)
    for ax, which in zip(axes, PASSES, strict=False):
        of_pass = [row for row in rows if row["pass"] == which]
        fit = next((f for f in fits if f["pass"] == which and f["masks"] == "all"), None)
        _draw_runtime(ax, of_pass, fit)
        ax.set_title(which)
    if fidelity:
        _draw_fidelity(axes[2], [row for row in rows if row["pass"] == "forward"])
    first = rows[0]
    figure.suptitle(
        f"Block-sparse attention, {first['impl']} on {first['device']}\n"
        f"{first['input']} input, {first['dtype']}, N={first['seqlen']}, d={first['head_dim']}, "
        f"{first['heads']} heads, batch {first['batch']}, blocks of {first['block']}, "
        f"commit {first['commit']}",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _families(rows):
    sparse = [row for row in rows if row["family"] not in (DENSE, BASELINE)]
    return {
        name: sorted((row for row in sparse if row["family"] == name), key=lambda r: r["density"])
        for name in dict.fromkeys(row["family"] for row in sparse)
    }


def _draw_runtime(ax, rows, fit):
    families = _families(rows)
    for (name, group), marker, colour in zip(families.items(), MARKERS, COLOURS, strict=False):
        s, t, low, high = (
            np.array([row[key] for row in group])
            for key in ("density", "median_ms", "p10_ms", "p90_ms")
        )
        spread = [np.maximum(t - low, 0), np.maximum(high - t, 0)]
        ax.errorbar(s, t, spread, fmt=marker, color=colour, markersize=6, capsize=2, label=name)
    dense = next(row["median_ms"] for row in rows if row["family"] == DENSE)
    s = np.geomspace(min(row["density"] for row in rows), 1, 100)
    ax.plot(s, s * dense, color=GREY, linewidth=1.2, label="ideal: density × own dense run")
    if fit is not None:
        bound = SLOPE_LIMIT * s * dense + fit["fixed_cost"]
        label = f"{SLOPE_LIMIT} × ideal + {fit['fixed_cost']:.2g} ms"
        ax.plot(s, bound, color=GREY, linewidth=1.2, linestyle=":", label=label)
    ax.plot(1, dense, marker="*", color="black", markersize=12, linestyle="", label="own dense run")
    for row in rows:
        if row["family"] == BASELINE:
            label = f"dense masked softmax, {row['impl']}"
            ax.axhline(row["median_ms"], color="black", linestyle="--", linewidth=1.2, label=label)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="density: share of live blocks",
        ylabel="median runtime (ms)",
    )
    _plain_ticks(ax.xaxis, percent=True)
    _plain_ticks(ax.yaxis)
    ax.legend(fontsize=7.5, frameon=False, loc="upper left")
    low, high = ax.get_ylim()
    ax.set_ylim(low, high * 4)


def _draw_fidelity(ax, rows):
    families = _families(rows)
    for (name, group), marker, colour in zip(families.items(), MARKERS, COLOURS, strict=False):
        s, error, kept = (
            [row[key] for row in group] for key in ("density", "output_error", "attention_kept")
        )
        ax.plot(s, error, marker=marker, color=colour, label=f"{name}: output error")
        ax.plot(
            s,
            kept,
            marker=marker,
            color=colour,
            linestyle=":",
            markerfacecolor="white",
            label=f"{name}: attention kept",
        )
    ax.set(
        xscale="log",
        ylim=(-0.03, 1.55),
        xlabel="density: share of live blocks",
        ylabel="relative to dense attention",
        title="fidelity",
    )
    ax.set_yticks(np.linspace(0, 1, 6))
    _plain_ticks(ax.xaxis, percent=True)
    ax.legend(fontsize=7.5, frameon=False, loc="upper left")


IO_PANELS = {
    "length": ("n", "sequence length N"),
    "sram": ("sram", "SRAM size M (elements)"),
    "density": ("density", "density s: share of live blocks"),
}


def draw_io(rows, path):
    """Counted accesses against sequence length, SRAM size and density."""
    figure, axes = _axes(len(IO_PANELS))
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    for ax, (sweep, (key, label)) in zip(axes, IO_PANELS.items(), strict=True):
        for name, marker, colour in zip(names, MARKERS, COLOURS, strict=False):
            group = [r for r in rows if r["sweep"] == sweep and r["algorithm"] == name]
            if not group:
                continue
            group.sort(key=lambda row: row[key])
            x, accesses, theta = (
                np.array([row[k] for row in group], float) for k in (key, "accesses", "theta")
            )
            ratio = accesses / theta
            ax.plot(x, accesses / 1e6, marker, color=colour, label=f"counted, {name}")
            label_ = f"Θ, factors {ratio.min():.1f} to {ratio.max():.1f}"
            band = [theta * ratio.min() / 1e6, theta * ratio.max() / 1e6]
            ax.fill_between(x, *band, color=colour, alpha=0.2, linewidth=1, label=label_)
        ax.set(xscale="log", yscale="log", xlabel=label, ylabel="HBM accesses (10⁶ elements)")
        _plain_ticks(ax.xaxis, percent=sweep == "density")
        _plain_ticks(ax.yaxis)
        if sweep != "density":
            ax.set_xticks([row[key] for row in rows if row["sweep"] == sweep])
            ax.minorticks_off()
        fixed = {k: v for k, v in (("N", "n"), ("d", "head_dim"), ("M", "sram")) if v != key}
        first = next(row for row in rows if row["sweep"] == sweep)
        ax.set_title(", ".join(f"{k}={first[v]}" for k, v in fixed.items()), fontsize=9)
        ax.legend(fontsize=7.5, frameon=False)
    figure.suptitle(
        "Counted HBM accesses of one head, and the growth of Theorem 2 and Proposition 4",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
