"""What `sparsity` leaves behind: the rows of the CSV, the tables and the fit."""

from experiments.fit import DENSITY_FROM, SLOPE_LIMIT, fit_line, fixed_cost
from experiments.passes import BASELINE, DENSE, PASSES, flops
from experiments.provenance import provenance
from experiments.report import say, show, write_csv

ARRAY_LIBRARY = {"cpu": "numpy", "cuda": "cupy"}


def rows_of(result):
    """One dictionary per mask and pass, with the dense run and the baseline last."""
    rows = []
    for which in PASSES:
        dense = result.dense.timings[which].median
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
    timing, verdict = run.timings[which], run.verdicts[which]
    return {
        "impl": run.plan.impl,
        "input": "random" if settings.input is None else settings.input.name,
        "dtype": settings.dtype,
        "batch": batch,
        "seqlen": seqlen,
        "heads": heads,
        "heads_kv": result.heads_kv,
        "head_dim": head_dim,
        "family": run.family,
        "label": run.label,
        "mask": run.expression,
        "block": result.block,
        "density": run.density,
        "tile": "" if schedule is None else f"{schedule.tile_m}x{schedule.tile_n}",
        "tile_density": "" if schedule is None else schedule.density,
        "pass": which,
        "median_ms": timing.median,
        "p10_ms": timing.p10,
        "p90_ms": timing.p90,
        "rounds": len(timing.samples),
        "tflops": flops(result.shape, run.density, which) / timing.median / 1e9,
        "error": verdict.error,
        "budget": verdict.budget,
        "error_of": verdict.array,
        "rows_checked": result.rows_checked,
        "output_error": run.output_error,
        "attention_kept": run.coverage,
    }


def _baseline_row(result, which, timing, dense):
    row = _row(result, result.dense, which)
    changed = {
        "impl": ARRAY_LIBRARY[result.settings.device],
        "family": BASELINE,
        "label": "",
        "mask": "any",
        "tile": "",
        "tile_density": "",
        "error": "",
        "budget": "",
        "error_of": "",
        "median_ms": timing.median,
        "p10_ms": timing.p10,
        "p90_ms": timing.p90,
        "tflops": flops(result.shape, 1.0, which) / timing.median / 1e9,
        "time_over_dense": timing.median / dense,
        "speedup_over_baseline": 1.0,
    }
    return row | changed


def fits_of(rows):
    """Fits of each pass, over all masks and over each family of at least three.

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
            if len({row["density"] for row in group}) < 3:
                continue
            s, t = ([row[key] for row in group] for key in ("density", "median_ms"))
            found.append(
                {
                    "pass": which,
                    "masks": name,
                    "fit": fit_line(s, t, dense),
                    "fixed_cost": fixed_cost(s, t, dense),
                }
            )
    return found


def print_tables(result, rows, fits):
    """Both tables, with a line that says what each number is."""
    batch, seqlen, heads, head_dim = result.shape
    fidelity = result.settings.input is not None
    say(
        f"[bold]{rows[0]['device']}[/bold], {result.dense.plan.impl}, {result.settings.dtype}, "
        f"N={seqlen} d={head_dim} heads={heads} batch={batch}, blocks of {result.block}, "
        f"commit {rows[0]['commit']}"
    )
    columns = {
        "masks": "",
        "mask": "",
        "density": ".1%",
        "ms": ".3g",
        "p10": ".3g",
        "p90": ".3g",
        "/ dense": ".3f",
        "× baseline": ".2f",
        "GFLOP/s": ",.0f",
        "error/budget": ".2f",
    }
    if fidelity:
        columns |= {"output error": ".1%", "attention kept": ".1%"}
    for which in PASSES:
        of_pass = [row for row in rows if row["pass"] == which]
        cells = (_cells(row, fidelity) for row in sorted(of_pass, key=_order))
        show(f"\n{which}: runtime against density", columns, cells)
    say(
        "/ dense: runtime relative to nbflash's own dense run; × baseline: how many times faster "
        f"than dense masked softmax in {ARRAY_LIBRARY[result.settings.device]}; error/budget: of "
        f"the worst array, {result.rows_checked} rows of each head checked."
    )
    if fidelity:
        say(
            "output error: ‖sparse − dense‖ / ‖dense‖; attention kept: share of the weight of the "
            "dense softmax inside the mask, mean over rows and heads."
        )
    _print_fits(fits)


def _order(row):
    return row["family"] in (DENSE, BASELINE), row["density"], row["median_ms"]


def _cells(row, fidelity):
    ratio = row["error"] / row["budget"] if row["budget"] else None
    cells = [
        row["family"],
        row["mask"],
        row["density"],
        row["median_ms"],
        row["p10_ms"],
        row["p90_ms"],
        row["time_over_dense"],
        row["speedup_over_baseline"],
        row["tflops"] * 1e3,
        ratio,
    ]
    if row["family"] == BASELINE:
        cells[2] = None
    return [*cells, row["output_error"], row["attention_kept"]] if fidelity else cells


def _print_fits(fits):
    columns = {
        "pass": "",
        "masks": "",
        "fixed ms": ".3g",
        "slope / dense": ".3f",
        "R²": ".4f",
        "c ms": ".3g",
        "c / dense": ".1%",
    }
    cells = [
        [
            f["pass"],
            f["masks"],
            f["fit"].fixed,
            f["fit"].relative_slope,
            f["fit"].r_squared,
            f["fixed_cost"],
            f["fixed_cost"] / f["fit"].dense,
        ]
        for f in fits
    ]
    show("\nfit: runtime = fixed + slope · density", columns, cells)
    say(
        f"c: the least fixed cost with runtime ≤ {SLOPE_LIMIT} · density · dense + c for every "
        f"density from {DENSITY_FROM:.0%}."
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
    from experiments.figures import draw_sparsity

    rows = rows_of(result)
    fits = fits_of(rows)
    print_tables(result, rows, fits)
    stem = "sparsity" if result.settings.input is None else f"sparsity-{result.settings.input.stem}"
    write_csv(out / f"{stem}.csv", rows)
    draw_sparsity(rows, fits, out / f"{stem}.png")
    say(f"Wrote {out / stem}.csv and {out / stem}.png")
