"""Figures, one function per command, drawn without a display."""

from itertools import cycle

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from experiments.harness.passes import BASELINE, DENSE, PASSES, live
from experiments.report.fit import SLOPE_LIMIT

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b")
GREY = "#555555"
TIMES = ("median_ms", "p10_ms", "p90_ms")


def axes_of(panels, width=5.0, height=4.4):
    figure = Figure(figsize=(width * panels, height), layout="constrained", dpi=150)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for ax in axes:
        ax.grid(which="major", color="#dddddd", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure, path):
    """Write a figure, and the directory that it is to be in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def plain_ticks(axis, percent=False):
    """Ticks as 1, 2, 5, 10, ... in digits instead of powers of ten."""
    axis.set_major_locator(_log_locator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g} %" if percent else f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _log_locator():
    from matplotlib.ticker import LogLocator

    return LogLocator(base=10, subs=(1, 2, 5))


def draw_sparsity(rows, fits, path):
    """Runtime against density for each pass and, for a user's input, the fidelity."""
    fidelity = any(row["output_error"] is not None for row in rows)
    figure, axes = axes_of(len(PASSES) + fidelity, height=5.2)
    for ax, which in zip(axes, PASSES, strict=False):
        of_pass = [row for row in rows if row["pass"] == which]
        fit = next((f for f in fits if f["pass"] == which and f["masks"] == "all"), None)
        _draw_runtime(ax, of_pass, fit)
        ax.set_title(which)
    if fidelity:
        _draw_fidelity(axes[-1], [row for row in rows if row["pass"] == "forward"])
    first = rows[0]
    figure.suptitle(
        f"Block-sparse attention, {first['impl']} on {first['device']}\n"
        f"{first['input']} input, {first['dtype']}, N={first['seqlen']}, d={first['head_dim']}, "
        f"heads={first['heads']}, batch={first['batch']}, blocks of {first['block']}, "
        f"commit {first['commit']}",
        fontsize=9,
    )
    save(figure, path)


def draw_seqlen(rows, path):
    """Runtime against length, a panel per pass, a line per mask and head dimension.

    Of rows with the paper's times those are drawn too, and what the ratio of the peaks makes them.
    """
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    figure, axes = axes_of(len(passes), height=5.2)
    for ax, which in zip(axes, passes, strict=True):
        of_pass = [row for row in rows if row["pass"] == which]
        names = list(dict.fromkeys((row["mask"], row["head_dim"]) for row in of_pass))
        for (mask, d), marker, colour in zip(names, cycle(MARKERS), cycle(COLOURS), strict=False):
            group = [row for row in of_pass if (row["mask"], row["head_dim"]) == (mask, d)]
            style = {"marker": marker, "color": colour, "label": f"{mask}, d={d}"}
            _draw_times(ax, [row["seqlen"] for row in group], group, **style)
        _draw_paper(ax, [row for row in of_pass if row.get("paper_ms")])
        ax.set(xscale="log", yscale="log", xlabel="sequence length N", ylabel="median runtime (ms)")
        lengths = sorted({row["seqlen"] for row in of_pass})
        ax.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
        ax.xaxis.set_minor_locator(NullLocator())
        plain_ticks(ax.yaxis)
        ax.set_title(which)
        legend_below(ax)
    first = rows[0]
    figure.suptitle(
        f"{first['dtype']} attention, {first['library']} on {first['device']}, "
        f"commit {first['commit']}",
        fontsize=9,
    )
    save(figure, path)


def _draw_times(ax, x, rows, **style):
    """Medians, and how far the 10th and the 90th percentile are from them."""
    t, low, high = (np.array([row[key] for row in rows]) for key in TIMES)
    ax.errorbar(x, t, [np.maximum(t - low, 0), np.maximum(high - t, 0)], capsize=2, **style)


def _draw_paper(ax, rows):
    lines = {
        "paper_ms": ("paper, {}", "-"),
        "paper_at_peak_ratio_ms": ("the same / peak ratio", ":"),
    }
    for key, (label, style) in lines.items():
        group = [row for row in rows if row[key]]
        if group:
            n, t = ([row[name] for row in group] for name in ("seqlen", key))
            label = label.format(group[0]["paper_device"])
            ax.plot(n, t, linestyle=style, color=GREY, marker="x", label=label)


def _families(rows):
    sparse = [row for row in rows if row["family"] not in (DENSE, BASELINE)]
    return {
        name: sorted((row for row in sparse if row["family"] == name), key=lambda r: r["density"])
        for name in dict.fromkeys(row["family"] for row in sparse)
    }


def _patterns(group):
    """The patterns of a family, without their arguments."""
    return " | ".join(term.split()[0] for term in group[0]["mask"].split(" | "))


def _draw_runtime(ax, rows, fit):
    families = _families(rows)
    for (name, group), marker, colour in zip(families.items(), MARKERS, COLOURS, strict=False):
        patterns = _patterns(group)
        label = name if name == patterns else f"{name}: {patterns}"
        style = {"fmt": marker, "color": colour, "markersize": 6, "label": label}
        _draw_times(ax, [live(row) for row in group], group, **style)
    dense = next(row["median_ms"] for row in rows if row["family"] == DENSE)
    s = np.geomspace(min(live(row) or 1 for row in rows), 1, 100)
    ax.plot(s, s * dense, color=GREY, linewidth=1.2, label="ideal: s × own dense run")
    if fit is not None:
        bound = SLOPE_LIMIT * s * dense + fit["fixed_cost"]
        label = f"{SLOPE_LIMIT} × ideal + {fit['fixed_cost']:.3g} ms"
        ax.plot(s, bound, color=GREY, linewidth=1.2, linestyle=":", label=label)
    ax.plot(1, dense, marker="*", color="black", markersize=12, linestyle="", label="own dense run")
    for row in rows:
        if row["family"] == BASELINE:
            label = f"dense masked softmax, {row['impl']}"
            ax.axhline(row["median_ms"], color="black", linestyle="--", linewidth=1.2, label=label)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="s: share of live tiles",
        ylabel="median runtime (ms)",
    )
    plain_ticks(ax.xaxis, percent=True)
    plain_ticks(ax.yaxis)
    legend_below(ax)


def legend_below(ax):
    ax.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))


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
        ylim=(-0.03, 1.03),
        xlabel="density of the mask: share of live blocks",
        ylabel="relative to dense attention",
        title="fidelity",
    )
    plain_ticks(ax.xaxis, percent=True)
    legend_below(ax)


def draw_gallery(rows, masks, path):
    """One small picture per mask."""
    columns = min(6, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(2.3 * columns, 2.55 * lines), layout="constrained", dpi=150)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for ax, row, mask in zip(axes, rows, masks, strict=False):
        mask.plot(ax)
        ax.set_title(
            f"{row['pattern']}\ntokens {row['token_density']:.1%}, tiles {row['tile_density']:.1%}",
            fontsize=8,
        )
        ax.set(xticks=[0, row["nk"]], yticks=[0, row["nq"]])
        ax.tick_params(labelsize=7)
        ax.set_xlabel("key", fontsize=7, labelpad=-6)
        ax.set_ylabel("query", fontsize=7, labelpad=-12)
    for ax in list(figure.axes)[len(rows) :]:
        ax.remove()
    first = rows[0]
    figure.suptitle(f"Patterns, N={first['nk']}, blocks and tiles of {first['block']}", fontsize=10)
    save(figure, path)


IO_PANELS = {
    "length": ("n", "sequence length N"),
    "sram": ("sram", "SRAM size M (elements)"),
    "density": ("density", "density s: share of live blocks"),
}


def draw_io(rows, path):
    """Counted accesses against sequence length, SRAM size and density."""
    figure, axes = axes_of(len(IO_PANELS))
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
        plain_ticks(ax.xaxis, percent=sweep == "density")
        plain_ticks(ax.yaxis)
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
    save(figure, path)


def draw_simt(rows, path):
    """Speed of each pass and implementation, one panel per head dimension."""
    dims = list(dict.fromkeys(row["head_dim"] for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    figure, axes = axes_of(len(dims), height=3.2)
    for ax, head_dim in zip(axes, dims, strict=True):
        group = [row for row in rows if row["head_dim"] == head_dim]
        labels = [f"{row['what']}\n{row['implementation']}" for row in group]
        colours = [COLOURS[names.index(row["implementation"])] for row in group]
        bars = ax.barh(labels, [row["tflops"] for row in group], color=colours)
        ax.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
        ax.invert_yaxis()
        ax.tick_params(axis="y", labelsize=8)
        ax.margins(x=0.12)
        ax.set(xlabel="TFLOP/s", title=f"d={head_dim}")
    first = rows[0]
    figure.suptitle(
        f"float32 attention on {first['device']}, N={first['seqlen']}, heads={first['heads']}, "
        f"batch={first['batch']}, commit {first['commit']}",
        fontsize=9,
    )
    save(figure, path)


SELECTION_STEPS = ("select", "plan", "forward", "backward")


def draw_selection(rows, path):
    """Time of each step of each method, one behind the other; a panel per input, length, mask."""
    keys = "input", "seqlen", "causal"
    groups = list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))
    figure, axes = axes_of(len(groups), height=3.2)
    for ax, of in zip(axes, groups, strict=True):
        group = [row for row in rows if tuple(row[key] for key in keys) == of]
        name, n, causal = of
        labels = [
            f"{row['method']}\n{100 * row['kept']:.0f} % of the mass"
            if row["method"] != DENSE
            else DENSE
            for row in group
        ]
        left = np.zeros(len(group))
        for step, colour in zip(SELECTION_STEPS, COLOURS, strict=False):
            times = np.array([row[f"{step}_ms"] or 0.0 for row in group])
            ax.barh(labels, times, left=left, color=colour, label=step)
            left += times
        ax.invert_yaxis()
        ax.tick_params(axis="y", labelsize=8)
        ax.set(xlabel="ms", title=f"{name}, N={n}" + ", causal" * causal)
    axes[-1].legend(fontsize=7.5, frameon=False)
    first = rows[0]
    figure.suptitle(
        f"Blocks chosen at run time, {first['impl']} on {first['device']}, {first['dtype']}, "
        f"blocks of {first['block']}, commit {first['commit']}",
        fontsize=9,
    )
    save(figure, path)
