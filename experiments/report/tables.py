"""What a command leaves behind: a table on the terminal and a CSV file."""

import csv

from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.harness.console import console


def write_csv(path, rows):
    """Write ``rows``, dictionaries with the same keys, to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def show(title, columns, rows):
    """Print ``rows`` as a table.

    Parameters
    ----------
    columns : dict of str to str
        Heading of each column and the format of its values, for example ``".2f"``.
    rows : iterable of sequence
        Values in the order of ``columns``; ``None`` leaves the cell empty.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, spec in columns.items():
        table.add_column(heading, justify="right" if spec else "left", overflow="fold")
    for row in rows:
        cells = zip(row, columns.values(), strict=True)
        table.add_row(*("" if value is None else format(value, spec) for value, spec in cells))
    console.print(table)


def speed_row(kind, what, name, timing, **speeds):
    """A row of the commands on one kind of kernel: a `Timing`, without errors."""
    row = {"kind": kind, "what": what, "implementation": name}
    return row | timing.columns | speeds | {"error": None, "budget": None}


def size_of(row):
    """Dtype and sizes of a row of results, for the title of a table."""
    keys = "batch", "seqlen", "heads", "head_dim"
    return f"{row['dtype']}: " + ", ".join(f"{key}={row[key]}" for key in keys)


def wrote(*paths):
    """Name the files that a command left."""
    console.print("Wrote", *paths, highlight=False, soft_wrap=True)
