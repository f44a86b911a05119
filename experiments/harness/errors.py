"""The two ways an experiment ends early, each one line and no traceback."""

import click


class BadInput(click.ClickException):
    """The user's options or files cannot be used."""

    exit_code = 2


class OutOfBudget(click.ClickException):
    """A result is wrong, so nothing about its speed is reported."""

    exit_code = 1


def one_line(error):
    """What an exception says, a list of reasons in its own lines among it, in one line."""
    first, *reasons = (line.strip() for line in str(error).splitlines() or [""])
    return " ".join([first, "; ".join(reasons)]).strip() or type(error).__name__
