"""What a command leaves behind: a table on the terminal and a CSV file."""

import csv
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

#: Lines that go to a file or a pipe have room for every column.
PIPE_WIDTH = 110

console = Console()
if not console.is_terminal:
    console = Console(width=PIPE_WIDTH)


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


def size_of(row):
    """Dtype and sizes of a row of results, for the title of a table."""
    keys = "batch", "seqlen", "heads", "head_dim"
    return f"{row['dtype']}: " + ", ".join(f"{key}={row[key]}" for key in keys)


def say(text):
    """Print a paragraph, wrapped to the terminal."""
    console.print(text, highlight=False)


def wrote(*paths):
    """Name the files that a command left."""
    console.print("Wrote", *paths, highlight=False, soft_wrap=True)


@contextmanager
def progress(label, total):
    """A progress bar; yields a function that moves it by one."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
    )
    quiet = not console.is_terminal
    clock = TimeElapsedColumn()
    with Progress(*columns, clock, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
