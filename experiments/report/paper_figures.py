"""The paper's figures, drawn from rows of our own measurements."""

from itertools import cycle

import numpy as np

from experiments.report.figures import (
    COLOURS,
    GREY,
    MARKERS,
    axes_of,
    legend_below,
    save,
)

#: Between methods side by side, of the distance between two tasks.
SHIFT = 1 / 16


def draw_figure2(rows, fit, path):
    """Traffic and time, tile size against both, sparsity against time."""
    figure, (left, middle, right) = axes_of(3, height=4.8)
    of = {panel: [x for x in rows if x["panel"] == panel] for panel in ("left", "middle", "right")}
    _draw_left(left, of["left"])
    _draw_middle(middle, of["middle"])
    _draw_right(right, of["right"], fit)
    first = rows[0]
    figure.suptitle(
        f"Figure 2 of FlashAttention, {first['device']}, commit {first['commit']}", fontsize=9
    )
    save(figure, path)


def _draw_left(ax, rows):
    """Standard over nbflash, in the paper and here."""
    standard, own = rows
    columns = {
        "traffic, paper": "paper_gb",
        "traffic, counted": "counted_gb",
        "traffic, ncu": "measured_gb",
        "time, paper": "paper_ms",
        "time": "median_ms",
    }
    pairs = {label: (standard[key], own[key]) for label, key in columns.items()}
    ratios = {label: a / b for label, (a, b) in pairs.items() if a and b}
    colours = [GREY if "paper" in label else COLOURS[0] for label in ratios]
    ax.bar_label(ax.barh(list(ratios), list(ratios.values()), color=colours), fmt="%.1f×")
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.set(xlabel="standard / nbflash", title="forward and backward")


def _draw_middle(ax, rows):
    block, gb, ms = (
        np.array([x[key] for x in rows]) for key in ("block", "counted_gb", "median_ms")
    )
    ax.plot(block, ms, marker=MARKERS[0], color=COLOURS[0], label="runtime")
    ax.set(
        xlabel="queries of a tile", ylabel="median runtime (ms)", title="forward", ylim=(0, None)
    )
    ax.set_xticks(block)
    twin = ax.twinx()
    twin.plot(block, gb, marker=MARKERS[1], color=COLOURS[1], label="accesses, counted")
    twin.set(ylabel="GB counted", ylim=(0, None))
    lines = [*ax.get_lines(), *twin.get_lines()]
    ax.legend(lines, [x.get_label() for x in lines], fontsize=8, frameon=False)


def _draw_right(ax, rows, fit):
    s, ms = ([x[key] for x in rows] for key in ("density", "median_ms"))
    ax.plot(s, ms, marker=MARKERS[0], linestyle="", color=COLOURS[0], label="nbflash")
    ends = np.array([0, max(s)])
    label = f"{fit.fixed:.3g} ms + {fit.slope:.3g} ms · s, R² = {fit.r_squared:.4f}"
    ax.plot(ends, fit.fixed + fit.slope * ends, color=GREY, label=label)
    ax.set(xlabel="density of the mask", ylabel="median runtime (ms)", title="forward and backward")
    ax.xaxis.set_major_formatter(lambda x, _: f"{100 * x:g} %")
    legend_below(ax)


def draw_figure3(rows, paper, path):
    """Runtime and memory of forward and backward against length, the paper's own beside them."""
    variants = [x["variant"] for x in rows]
    lengths = {x: len({y["seqlen"] for y in rows if y["variant"] == x}) for x in variants}
    # The one that was run furthest, if it can be the paper's.
    variant = max(lengths, key=lambda x: (lengths[x], x == "dropout mask"))
    of = [x for x in rows if (x["variant"], x["pass"]) == (variant, "both") and not x["status"]]
    figure, axes = axes_of(2, width=6.5, height=6.0)
    printed = {"median_ms": paper.get(variant, {}).get("both", {}), "memory_mb": paper["memory"]}
    labels = {"median_ms": "median runtime (ms)", "memory_mb": "memory (MB)"}
    names = list(dict.fromkeys(x["method"] for x in of))
    for ax, (column, label) in zip(axes, labels.items(), strict=True):
        for name, style in zip(names, cycle(_styles()), strict=False):
            points = sorted(
                (int(x["seqlen"]), float(x[column]))
                for x in of
                if x["method"] == name and x[column]
            )
            if points:
                ax.plot(*zip(*points, strict=True), **style, label=name)
        for name, line in zip(("nbflash", "nbflash-butterfly"), ("-", ":"), strict=True):
            if values := printed[column].get(name):
                shown = name.replace("nbflash", "FlashAttention")
                label_ = f"paper: {shown}, {paper['device']}"
                n = paper["seqlen"][: len(values)]
                ax.plot(n, values, color=GREY, linestyle=line, label=label_)
        ax.set(xscale="log", yscale="log", xlabel="sequence length", ylabel=label)
        legend_below(ax)
    first = rows[0]
    figure.suptitle(
        f"Forward and backward, {variant or 'neither dropout nor mask'}, {first['device']}, "
        f"{first['dtype']}, batch={first['batch']}, heads={first['heads']}, "
        f"d={first['head_dim']}, commit {', '.join(dict.fromkeys(x['commit'] for x in of))}",
        fontsize=9,
    )
    save(figure, path)


def _styles():
    """Lines that a reader tells apart, with or without colours."""
    return [
        {"linestyle": line, "marker": marker, "color": colour}
        for line in ("-", "--", ":")
        for marker, colour in zip(MARKERS, COLOURS, strict=True)
    ]


def draw_curves(rows, path):
    """Losses of training by step, of every form of attention, and how far they are from eager's.

    Without eager attention: how far they are from those of the first form.
    """
    figure, (left, right) = axes_of(2, width=6.5, height=5.0)
    model = rows[0]["model"], rows[0]["tokens"], rows[0]["seed"]
    of = [x for x in rows if (x["model"], x["tokens"], x["seed"]) == model]
    base = next((x for x in of if x["attention"] == "eager"), of[0])
    _, losses_of_base = _curve(base, "losses")
    for row, style in zip(of, cycle(_styles()), strict=False):
        step, loss = _curve(row, "losses")
        left.plot(step, loss, **style, label=row["attention"])
        if row is not base and row["attention"] != "none":
            right.plot(step, abs(loss - losses_of_base), **style)
    left.set(xlabel="step", ylabel="loss of training")
    right.set(xlabel="step", ylabel=f"difference from {base['attention']}", yscale="log")
    legend_below(left)
    _origin(figure, rows[0], f"{model[0]}, {model[1]} tokens, seed {model[2]}")
    save(figure, path)


def draw_contexts(rows, path):
    """Validation by step, and at the end against the context."""
    figure, (left, right) = axes_of(2, width=6.5, height=5.0)
    for row, style in zip(rows, cycle(_styles()), strict=False):
        step, loss = _curve(row, "validations")
        left.plot(step, loss, **style, label=f"{row['attention']}, {row['tokens']}, {row['seed']}")
    forms = dict.fromkeys((x["attention"], x["seed"]) for x in rows)
    for form, style in zip(forms, cycle(_styles()), strict=False):
        of = [x for x in rows if (x["attention"], x["seed"]) == form]
        points = sorted((int(x["tokens"]), float(x["validation"])) for x in of)
        right.plot(*zip(*points, strict=True), **style, label=", ".join(form))
    left.set(xlabel="step", ylabel="validation (nats a byte)", yscale="log")
    right.set(xlabel="context (bytes)", ylabel="validation (nats a byte)", xscale="log")
    contexts = sorted({int(x["tokens"]) for x in rows})
    right.set_xticks(contexts, map(str, contexts))
    right.minorticks_off()
    legend_below(left)
    legend_below(right)
    _origin(figure, rows[0], rows[0]["model"])
    save(figure, path)


def draw_accuracies(rows, path):
    """Accuracy by task, of every method: the mean over seeds, and from lowest to highest."""
    tasks = list(dict.fromkeys(x["task"] for x in rows))
    methods = dict.fromkeys(x["method"] for x in rows)
    figure, (ax,) = axes_of(1, width=8.0, height=5.0)
    for i, (name, style) in enumerate(zip(methods, cycle(_styles()), strict=False)):
        found, shift = {}, SHIFT * (i - (len(methods) - 1) / 2)
        for x in rows:
            if x["method"] == name:
                found.setdefault(tasks.index(x["task"]), []).append(100 * float(x["accuracy"]))
        mean = np.array([np.mean(x) for x in found.values()])
        ends = np.array([[min(x), max(x)] for x in found.values()]).T
        inside = style["color"] if i < len(COLOURS) else "white"
        style |= {"linestyle": "", "markerfacecolor": inside, "label": name}
        ax.errorbar(np.add(list(found), shift), mean, abs(ends - mean), **style, capsize=3)
    chance = {x["task"]: 100 / int(x["classes"]) for x in rows}
    ax.plot([chance[x] for x in tasks], color=GREY, linestyle=":", label="by chance")
    ax.set_xticks(range(len(tasks)), tasks)
    ax.set(ylabel="accuracy (%)")
    legend_below(ax)
    commits = ", ".join(dict.fromkeys(x["commit"] for x in rows))
    figure.suptitle(f"{rows[0]['device']}, commit {commits}", fontsize=9)
    save(figure, path)


def _curve(row, column):
    """Steps and values, of which the last one is at the end of training."""
    values = np.array(row[column].split(), float)
    at = int(row["evaluate"]) * np.arange(1, len(values) + 1)
    return np.minimum(at, int(row["steps"])), values


def _origin(figure, row, text):
    figure.suptitle(f"{text}, {row['device']}, commit {row['commit']}", fontsize=9)
