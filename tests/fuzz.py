"""Random runs of the properties in the folders ``fuzz``: ``make fuzz minutes=30 seed=1``.

A round runs those of one tier with new examples, so many times as many as CI runs. The rounds of
the tiers take turns until the minutes are over, or until one has failed. What follows of a seed is
always the same; failing examples are kept in ``.hypothesis``, where the next run begins with them.
"""

import argparse
import importlib.util
import itertools
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMES = 5
NOTHING_CHOSEN = 5  # of pytest: the options leave out a whole tier
# The host's have most to say: every other round is theirs.
TIERS = "host", "sim", "host", "frameworks"
SIMULATED = {"NUMBA_ENABLE_CUDASIM": "1"}


def tiers():
    """Those that can run here."""
    there = all(map(importlib.util.find_spec, ("torch", "transformers", "jax")))
    return [x for x in TIERS if x != "frameworks" or there]


def run(tier, seed, options):
    """The exit status of a round."""
    environment = os.environ | {"FUZZ_SEED": str(seed), "FUZZ_TIMES": str(TIMES)}
    environment |= SIMULATED if tier == "sim" else {}
    print(f"Round of {tier}: make fuzz of={tier} seed={seed}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=1800", f"tests/{tier}/fuzz"]
    status = subprocess.run([*command, *options], cwd=ROOT, env=environment).returncode
    return 0 if status == NOTHING_CHOSEN else status


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, help="of the first round; the next has the next number")
    parser.add_argument("--of", nargs="*", choices=sorted(set(TIERS)), help="default: all")
    parser.add_argument("options", nargs="*", help="of pytest, behind --")
    given = parser.parse_args()
    first = secrets.randbelow(2**31) if given.seed is None else given.seed
    end = time.monotonic() + 60 * given.minutes
    for seed, tier in zip(itertools.count(first), itertools.cycle(given.of or tiers())):
        if status := run(tier, seed, given.options):
            return status
        if time.monotonic() > end:
            return 0


if __name__ == "__main__":
    sys.exit(main())
