"""Configurations of tensor-core kernels against each other: what their tables are chosen from.

For each head dimension and mask the rows of the table in the source and the candidates of
``sweeps/tune.toml`` are checked and timed in shuffled rounds, each configuration in the place of a
library of :mod:`experiments.harness.comparison`. The table agrees where what it chooses for the
mask is the fastest, or is not told from it: its median is within the fastest one's 90th percentile.
"""

from dataclasses import fields, replace
from functools import partial

from experiments.harness.comparison import describe, measure_all
from experiments.harness.console import left_out, say
from experiments.harness.errors import OutOfBudget
from experiments.harness.kernel_tables import PROBLEM, schedule_of, tables_of
from experiments.harness.passes import BACKWARD, DENSE, FORWARD, flops
from experiments.harness.setup import set_up
from experiments.libraries.nbflash import Nbflash
from experiments.report.tables import show, size_of, write_csv, wrote

SAID = ("consumers", "tile_m", "tile_n", "full_tiles")  # by the size of the tile and the mask


def within_reach(head_dim, specs):
    """The candidates of the least ``reach`` that a head dimension is within, without it."""
    least = min((spec["reach"] for spec in specs if head_dim <= spec["reach"]), default=None)
    chosen = (spec for spec in specs if spec["reach"] == least)
    return [{key: value for key, value in spec.items() if key != "reach"} for spec in chosen]


def name_of(config):
    """Tile, and what else differs from the class's defaults."""
    parts = [f"{config.tile_m}×{config.tile_n}"]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in (*PROBLEM, *SAID, "speed") and value != field.default:
            parts.append(f"{field.name}={_plain(value)}")
    return " ".join(parts)


def _plain(value):
    return "/".join(map(str, value)) if isinstance(value, tuple) else value


def candidates(tables, which, dtype, head_dim, specs):
    """Name to configuration, the table's rows first; a line for each that does not fit."""
    table = tables.of(which, dtype, head_dim)
    if not table:
        left_out(f"d={head_dim}", which, "the table has no row for it")
        return {}
    found = {}
    others = (tables.made(which, dtype, head_dim, row) for row in within_reach(head_dim, specs))
    for config in (*table, *others):
        if reasons := tables.why_not(config):
            left_out(name_of(config), f"{which}, d={head_dim}", "; ".join(reasons))
        else:
            found.setdefault(name_of(config), config)
    return found


class Configured(Nbflash):
    """nbflash with one configuration for one pass, as a library of its own."""

    def __init__(self, q, k, v, *, tables, which, name, config):
        super().__init__(q, k, v)
        self._tables, self._which, self._name, self._config = tables, which, name, config

    def label(self, case):
        return self._name

    def _make_plan(self, case):
        from nbflash import AttentionPlan
        from nbflash.inputs.attention_spec import AttentionSpec
        from nbflash.inputs.problem import check_forward

        spec = AttentionSpec(check_forward(*self._inputs), case.mask)
        executor = self._tables.executor(self._which, self._config, spec)
        return AttentionPlan(spec, self._tables.impl, executor)


def judged(rows, choice):
    """Rows of one mask with the fastest marked, and whether the table's choice is as good.

    Parameters
    ----------
    choice : str
        Name of the configuration that the table chooses.
    """
    best = min(rows, key=lambda row: row["median_ms"])
    chosen = next((row for row in rows if row["config"] == choice), None)
    agrees = chosen is not None and chosen["median_ms"] <= best["p90_ms"]
    return [
        row
        | {
            "over_fastest": row["median_ms"] / best["median_ms"],
            "fastest": row is best,
            "table_chooses": row is chosen,
            "table_agrees": agrees,
        }
        for row in rows
    ]


def tile_speed(row, config, mask):
    """The share of all scores that tiles hold, and TFLOP/s over those."""
    n, schedule = row["seqlen"], schedule_of(config, mask)
    walked = schedule.col_idx.size * config.tile_m * config.tile_n / (schedule.planes * n * n)
    shape = row["batch"], n, row["heads"], row["head_dim"]
    return walked, flops(shape, walked, row["pass"]) / row["median_ms"] / 1e9


def detailed(rows, tables, configs, table, mask):
    """Rows of the comparison of one mask with their configurations, and their speeds over tiles."""
    speeds = {row["library"]: tile_speed(row, configs[row["library"]], mask) for row in rows}
    in_source = list(map(name_of, table))
    first = speeds.get(in_source[0], (1.0, 1.0))[1]
    found = []
    for row in rows:
        name = row["library"]
        config, (walked, speed) = configs[name], speeds[name]
        rest = {key: value for key, value in row.items() if key != "library"}
        changed = {"walked": walked, "tile_tflops": speed, "in_source": name in in_source}
        recorded = config.speed if name in in_source else None
        written = {"config": name, "table_row": tables.row(config, speed, first)}
        found.append(written | rest | changed | {"tile_tflops_in_source": recorded})
    return found


def show_rows(rows):
    """The configurations of one shape, mask after mask, the fastest first."""
    columns = {"mask": "", "configuration": "", "ms": ".3f", "p10": ".3f", "p90": ".3f"}
    columns |= {"TFLOP/s": ".0f", "of tiles": ".0f", "in source": ".0f", "× fastest": ".3f", "": ""}
    keys = ("mask", "config", "median_ms", "p10_ms", "p90_ms", "tflops", "tile_tflops")
    keys += ("tile_tflops_in_source", "over_fastest")
    masks = list(dict.fromkeys(row["mask"] for row in rows))
    rows = sorted(rows, key=lambda row: (masks.index(row["mask"]), row["median_ms"]))
    marks = ["table" if row["table_chooses"] else "" for row in rows]
    cells = [[*(row[key] for key in keys), mark] for row, mark in zip(rows, marks, strict=True)]
    show(f"\n{rows[0]['pass']}, {size_of(rows[0])}", columns, cells)


def show_verdicts(rows):
    """What is fastest where, whether the tables agree, and the rows that they would have."""
    columns = {"pass": "", "d": "d", "mask": "", "fastest": "", "table's choice ×": ".3f"}
    chosen = {_regime(row): row["over_fastest"] for row in rows if row["table_chooses"]}
    cells = []
    for row in rows:
        if row["fastest"]:
            verdict = "agrees" if row["table_agrees"] else "differs"
            cells.append([*_regime(row), row["config"], chosen.get(_regime(row)), verdict])
    show("\nthe tables in the source", columns | {"": ""}, cells)
    say("Rows of what is fastest somewhere; speed is that over its tiles, dense where measured:")
    best = {}
    for row in rows:
        if row["fastest"]:
            best.setdefault((row["pass"], row["head_dim"], row["config"]), []).append(row["mask"])
    for key, masks in best.items():
        group = [row for row in rows if (row["pass"], row["head_dim"], row["config"]) == key]
        row = next((row for row in group if row["mask"] == DENSE), group[0])
        say(f"  {key[0]}: {row['table_row']},  # {', '.join(masks)}".replace("[", "\\["))


def _regime(row):
    return row["pass"], row["head_dim"], row["mask"]


def run(out, seed=0, quick=False, passes=(FORWARD, BACKWARD), impl="sm90", **chosen):
    """Measure, print the tables, write ``tune.csv`` to the directory ``out``.

    Takes the options of the command; ``chosen`` are ``names`` and ``head_dims`` of `read_cases`.
    OutOfBudget is raised, last, where what the table chooses is wrong or does not run.
    """
    section = "quick" if quick else "full"
    setup = set_up("tune", section, "cuda", seed=seed, impl=impl, **chosen)
    tables, rows, missing = tables_of(impl), [], []
    for which in passes:
        for shape in setup.cases:
            found = compare(setup, tables, which, shape, missing)
            if found:
                show_rows(found)
                rows += [row | setup.origin for row in found]
                write_csv(out / "tune.csv", rows)
    if rows:
        show_verdicts(rows)
        wrote(out / "tune.csv")
    if missing or not rows:
        what = "; ".join(missing)
        raise OutOfBudget(f"the table's choice failed: {what}" if what else "nothing measured")
    return rows


def compare(setup, tables, which, shape, missing):
    """Rows of one pass at one shape; cases whose choice by the table failed go to ``missing``."""
    dtype, head_dim, cases = setup.settings["dtype"].name, shape[3], setup.cases[shape]
    listed = setup.settings[tables.impl].get(which, [])
    configs = candidates(tables, which, dtype, head_dim, listed)
    if not configs:
        return []
    factories = {
        name: partial(Configured, tables=tables, which=which, name=name, config=config)
        for name, config in configs.items()
    }
    measured, setup = [], replace(setup, cases={shape: cases})
    measure_all(setup, factories, (which,), measured.extend)
    table, found = tables.of(which, dtype, head_dim), []
    for case in cases:
        rows = [row for row in measured if row["mask"] == case.name]
        rows = detailed(rows, tables, configs, table, case.mask)
        choice = name_of(tables.chosen(which, table, case.mask))
        rows = judged(rows, choice) if rows else []
        if not any(row["table_chooses"] for row in rows):
            missing.append(f"{which}, {describe(case)}")
        found += rows
    return found
