"""Options that several commands of :mod:`experiments.cli` share."""

import math
from pathlib import Path

import click

from experiments.harness.errors import BadInput
from experiments.harness.passes import PASSES
from nbflash.inputs.problem import DTYPES

SIZE = click.IntRange(min=1)


class Number(click.FloatRange):
    """A number within a range, and not NaN, which no range keeps out."""

    def convert(self, value, param, ctx):
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


#: The dtypes that a float64 reference is the exact result of.
STORED = tuple(name for name in DTYPES if name != "float64")


def _writable(context, parameter, path):
    """Make the directory now rather than fail after the measurement."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {path}: {error.strerror}") from None
    return path


def _passes(context, parameter, text):
    """The passes of a list with commas, each once."""
    passes = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in passes:
        if name not in PASSES:
            raise BadInput(f"--passes {text}: expected some of {', '.join(PASSES)}")
    return passes


out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("out"),
    show_default=True,
    callback=_writable,
    help="Directory for the CSV and the figure.",
)
seed_option = click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of the random inputs.",
)
device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="NumPy on the CPU, or CuPy on a CUDA device; auto takes the device where there is one.",
)


def passes_option(*default, text="Which passes; both is one after the other, timed as one call."):
    """The option ``--passes``."""
    given = {"show_default": True, "metavar": "PASS[,PASS]", "callback": _passes, "help": text}
    return click.option("--passes", default=",".join(default), **given)


def impl_option(*names):
    """The option ``--impl``."""
    return click.option(
        "--impl",
        type=click.Choice(["auto", *names]),
        default="auto",
        show_default=True,
        help="Implementation of nbflash; see python -m nbflash.",
    )


head_dims_option = click.option(
    "--head-dim", multiple=True, type=click.IntRange(1, 256), help="Only this; may be repeated."
)
seqlens_option = click.option(
    "--seqlen", multiple=True, type=SIZE, help="Only this; may be repeated."
)
kernels_option = click.option(
    "--impl",
    type=click.Choice(["sm90", "sm80"]),
    default="sm90",
    show_default=True,
    help="Whose kernels: Hopper's, or the portable ones.",
)
masks_option = click.option(
    "--mask", multiple=True, metavar="NAME", help="Only this mask of the sweep; may be repeated."
)
quick_option = click.option("--quick", is_flag=True, help="Fewer rounds and one shape.")
stored_dtype_option = click.option(
    "--dtype", type=click.Choice(STORED), help="Input dtype, instead of the sweep's."
)


def _together(*options):
    """One decorator for several options, the first one first in ``--help``."""

    def decorate(command):
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


results_options = _together(seed_option, out_option)
cases_options = _together(head_dims_option, seqlens_option, masks_option)
