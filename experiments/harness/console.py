"""What a command says while it runs."""

import textwrap
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.harness.errors import one_line

#: Lines that go to a file or a pipe have room for every column.
PIPE_WIDTH = 110

console = Console()
if not console.is_terminal:
    console = Console(width=PIPE_WIDTH)


def say(text):
    """Print a paragraph, wrapped to the terminal."""
    console.print(text, highlight=False)


def left_out(name, where, error):
    """Say in one line that something is not measured there, and why."""
    text = textwrap.shorten(one_line(error), 300, placeholder=" …")
    line = f"{name} is left out ({where}): {text}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


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
