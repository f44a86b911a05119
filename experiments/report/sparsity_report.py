"""What `sparsity` leaves behind: the rows of the CSV, the tables and the fit."""

from statistics import median

from experiments.harness.console import say
from experiments.harness.oracle import nearest
from experiments.harness.passes import BASELINE, DENSE, PASSES, flops, live
from experiments.harness.provenance import provenance
from experiments.report.fit import DENSITY_FROM, SLOPE_LIMIT, fit_line, fixed_cost
from experiments.report.tables import show, write_csv, wrote

NOISY = 1.75
ARRAY_LIBRARY = {"cpu": "numpy", "cuda": "cupy"}


def rows_of(result):
    """One dictionary per mask and pass, with the dense run and the baseline last."""
    rows = []
    for which in PASSES:
        dense = result.dense.tasks[which].timing.median
        baseline = result.baseline.get(which)
        for run in (*result.runs, result.dense):
            row = _row(result, run, which)
            row["time_over_dense"] = row["median_ms"] / dense
            row["speedup_over_baseline"] = baseline.median / row["median_ms"] if baseline else None
            rows.append(row)
        if baseline:
            rows.append(_baseline_row(result, which, baseline, dense))
    origin = provenance(result.settings.device)
    return [row | origin for row in rows]


def _row(result, run, which):
    settings, schedule = result.settings, run.plan.schedule
    batch, seqlen, heads, head_dim = result.shape
    timing, verdict = run.tasks[which].timing, nearest(run.tasks[which].verdicts)
    return {
        "impl": run.plan.impl,
        "input": "random" if settings.input is None else settings.input.name,
        "dtype": settings.dtype,
        "batch": batch,
        "seqlen": seqlen,
        "heads": heads,
        "heads_kv": result.heads_kv,
        "head_dim": head_dim,
        "family": run.case.family,
        "label": run.case.label,
        "mask": run.case.expression,
        "block": result.block,
        "density": run.density,
        "tile": "" if schedule is None else f"{schedule.tile_m}x{schedule.tile_n}",
        "tile_density": "" if schedule is None else schedule.density,
        "pass": which,
        **timing.columns,
        "tflops": flops(result.shape, run.density, which) / timing.median / 1e9,
        "error": verdict.error,
        "budget": verdict.budget,
        "error_of": verdict.array,
        "rows_checked": len(run.oracle.rows),
        "output_error": run.output_error,
        "attention_kept": run.coverage,
    }


def _baseline_row(result, which, timing, dense):
    row = _row(result, result.dense, which)
    blank = ("label", "tile", "tile_density", "error", "budget", "error_of", "density")
    changed = {
        **dict.fromkeys(blank, ""),
        "impl": ARRAY_LIBRARY[result.settings.device],
        "family": BASELINE,
        "mask": "any",
        "output_error": None,
        "attention_kept": None,
        **timing.columns,
        "tflops": flops(result.shape, 1.0, which) / timing.median / 1e9,
        "time_over_dense": timing.median / dense,
        "speedup_over_baseline": 1.0,
    }
    return row | changed


def fits_of(rows):
    """Fits of runtime against the share of live tiles, over all masks and over each family.

    Returns
    -------
    list of dict
        ``pass``, ``masks``, ``fit`` (a `Fit`) and ``fixed_cost``, in milliseconds.
    """
    found = []
    for which in PASSES:
        of_pass = [row for row in rows if row["pass"] == which]
        dense = next(row["median_ms"] for row in of_pass if row["family"] == DENSE)
        sparse = [row for row in of_pass if row["family"] not in (DENSE, BASELINE)]
        families = dict.fromkeys(row["family"] for row in sparse)
        groups = {"all": sparse} | {
            name: [row for row in sparse if row["family"] == name] for name in families
        }
        for name, group in groups.items():
            s, t = [live(row) for row in group], [row["median_ms"] for row in group]
            if len(set(s)) < 3:
                continue
            fit, c = fit_line(s, t, dense), fixed_cost(s, t, dense)
            found.append({"pass": which, "masks": name, "fit": fit, "fixed_cost": c})
    return found


def print_tables(result, rows, fits):
    """The table of each pass, with a line that says what each number is."""
    batch, seqlen, heads, head_dim = result.shape
    fidelity = result.settings.input is not None
    say(
        f"[bold]{rows[0]['device']}[/bold], {result.dense.plan.impl}, {result.settings.dtype}, "
        f"N={seqlen} d={head_dim} heads={heads} batch={batch}, blocks of {result.block}, "
        f"commit {rows[0]['commit']}"
    )
    coarse = any(row["tile_density"] not in ("", row["density"]) for row in rows)
    columns = {"mask": ("", _name)} | COLUMNS
    if coarse:
        columns["tiles"] = (".1%", "tile_density")
    if fidelity:
        columns |= {"out err": (".1%", "output_error"), "kept": (".1%", "attention_kept")}
    for which in PASSES:
        of_pass = sorted((row for row in rows if row["pass"] == which), key=_order)
        cells = [[_cell(row, key) for _, key in columns.values()] for row in of_pass]
        specs = {heading: spec for heading, (spec, _) in columns.items()}
        show(f"\n{which}: runtime against density", specs, cells)
    _explain(result, coarse, fidelity)
    _warn_of_noise(rows)
    if fits:
        _print_fits(fits)


COLUMNS = {
    "density": (".1%", "density"),
    "ms": (".3g", "median_ms"),
    "p10": (".3g", "p10_ms"),
    "p90": (".3g", "p90_ms"),
    "/ dense": (".3f", "time_over_dense"),
    "× base": (".2f", "speedup_over_baseline"),
    "GFLOP/s": (",.0f", lambda row: row["tflops"] * 1e3),
    "err/bud": (".2f", lambda row: row["error"] / row["budget"] if row["budget"] else None),
}


def _name(row):
    return f"{row['family']} {row['label']}".strip()


def _cell(row, key):
    value = key(row) if callable(key) else row[key]
    return None if value == "" else value


def _explain(result, coarse, fidelity):
    library = ARRAY_LIBRARY[result.settings.device]
    say(
        "density: live blocks of the mask; / dense: runtime relative to nbflash's own dense run; "
        f"× base: times faster than dense masked softmax in {library}, which keeps its N × N "
        "probabilities for the backward pass; both: the two passes, timed as one call; err/bud: "
        "error of the worst array over its budget, "
        f"{len(result.dense.oracle.rows)} rows of each head or more checked."
    )
    if coarse:
        say(
            "tiles: live tiles that were walked; where they are larger than the blocks of "
            f"{result.block}, a tile that is attended in part costs a whole one."
        )
    if fidelity:
        say(
            "out err: ‖sparse − dense‖ / ‖dense‖ of the output; kept: share of the weight of the "
            "dense softmax that lies inside the mask, mean over rows and heads."
        )


def _warn_of_noise(rows):
    for which in dict.fromkeys(row["pass"] for row in rows):
        spread = median(row["p90_ms"] / row["p10_ms"] for row in rows if row["pass"] == which)
        if spread > NOISY:
            say(
                f"[bold]The machine was busy[/bold]: {which}, the 90th percentile is {spread:.1f} "
                "times the 10th for half of the masks. Do not quote these times; run it again."
            )


def _order(row):
    return row["family"] in (DENSE, BASELINE), row["density"] or 1.0, row["median_ms"]


def _print_fits(fits):
    columns = {"pass": "", "masks": "", "fixed ms": ".3g", "slope / dense": ".3f", "R²": ".4f"}
    columns |= {"c ms": ".3g", "c / dense": ".1%"}
    cells = []
    for f in fits:
        fit, c = f["fit"], f["fixed_cost"]
        line = (fit.fixed, fit.relative_slope, fit.r_squared, c, c / fit.dense)
        cells.append([f["pass"], f["masks"], *line])
    show("\nfit: runtime = fixed + slope · s, s the share of live tiles", columns, cells)
    say(
        f"c: the least fixed cost with runtime ≤ {SLOPE_LIMIT} · s · dense + c for every "
        f"s from {DENSITY_FROM:.0%}."
    )
    for f in fits:
        if f["masks"] == "all":
            holds = f["fit"].relative_slope <= SLOPE_LIMIT
            verb = "costs" if holds else "[red]costs[/red]"
            say(
                f"{f['pass']}: a live tile {verb} {f['fit'].relative_slope:.2f} of a tile of the "
                f"dense run (the bound is {SLOPE_LIMIT}), plus {f['fixed_cost']:.3g} ms "
                f"({f['fixed_cost'] / f['fit'].dense:.1%} of the dense run)."
            )


def report(result, out):
    """Print the tables; write ``<name>.csv`` and ``<name>.png`` to the directory ``out``."""
    from experiments.report.figures import draw_sparsity

    rows = rows_of(result)
    fits = fits_of(rows)
    print_tables(result, rows, fits)
    stem = "sparsity" if result.settings.input is None else f"sparsity-{result.settings.input.stem}"
    write_csv(out / f"{stem}.csv", rows)
    draw_sparsity(rows, fits, out / f"{stem}.png")
    wrote(out / f"{stem}.csv", out / f"{stem}.png")
