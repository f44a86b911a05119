"""What a command finds before it measures: its sweep, a device, a clock and where it runs."""

import functools
import gc
from dataclasses import dataclass

from experiments.harness import sweeps
from experiments.harness.backends import Backend, open_backend, parse_dtype
from experiments.harness.console import say
from experiments.harness.errors import BadInput
from experiments.harness.grid import read_cases
from experiments.harness.provenance import provenance
from experiments.harness.timing import QueuedEvents, WallClock


@functools.cache
def keep_imports():
    """Leave what is imported out of collections, of which one precedes each timing.

    Beside torch and transformers such a collection takes 0.5 s.
    """
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Setup:
    """What the sweep of a command runs on a device."""

    sweep: dict  # with the table of the device over it
    settings: dict  # with that of the section too, and ``seed`` and the NumPy ``dtype``
    cases: dict  # of shape to list of Case; empty for a sweep without masks
    backend: Backend
    clock: QueuedEvents | WallClock
    origin: dict  # the columns of `provenance`


def set_up(name, section, device="auto", dtype=None, seed=0, impl=None, rounds=None, **chosen):
    """Open a device for a command; a line about it is printed.

    Parameters
    ----------
    name, section : str
        Of a sweep, and of one of the tables of its sizes.
    device : {"auto", "cpu", "cuda"}
    dtype : str, optional
        Instead of the sweep's.
    seed : int
    impl : str, optional
        An implementation of nbflash that the command cannot do without.
    rounds : int, optional
        Instead of the section's.
    **chosen
        ``names``, ``head_dims`` and ``seqlens`` of `read_cases`.

    Returns
    -------
    Setup

    Raises
    ------
    BadInput
        If the device, the sizes for it or the implementation are not there, or nothing is left to
        run.
    """
    from nbflash.planning.dispatch import why_not_here

    keep_imports()
    backend, sweep = open_backend(device), sweeps.load(name)
    if impl is not None and (reasons := why_not_here(impl)):
        raise BadInput("; ".join(reasons))
    sweep = sweep | sweep.get(backend.device, {})
    if section not in sweep:
        raise BadInput(f"{name} has no sizes {section!r} for the device {backend.device!r}")
    cases = read_cases(sweep, section, **chosen) if "mask" in sweep else {}
    settings = sweep | sweep[section] | {"seed": seed}
    if rounds is not None:
        settings["rounds"] = rounds
    settings["dtype"] = parse_dtype(dtype or settings["dtype"])
    clock = backend.clock if backend.device == "cpu" else QueuedEvents(sweep["sample_ms"])
    origin = provenance(backend.device)
    announce(origin, settings["dtype"].name)
    return Setup(sweep, settings, cases, backend, clock, origin)


def announce(origin, dtype):
    """Say where the numbers that follow come from."""
    say(f"[bold]{origin['device']}[/bold], {dtype}, commit {origin['commit']}")
