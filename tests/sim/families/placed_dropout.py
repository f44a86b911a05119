"""Dropout in a part of a sequence, whose places kernels look up."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import simt_runs
import sm80_runs
from mutant_family import Family
from mutants import Mutant
from placed_runs import check
from sm90_runs import ALONE

from nbflash.cuda import simulator as sim
from nbflash.cuda.tile.dropout import PLACED

DROPOUT, TILE, STATE = (
    f"nbflash.cuda.{name}" for name in ("tile.dropout", "tile.wgmma.dropout", "dropout_state")
)
SIMT, SM80, HOPPER = (f"nbflash.backends.{name}." for name in ("simt", "sm80", "sm90"))
OF_SIMT = DROPOUT, STATE, SIMT + "forward", SIMT + "backward", SIMT + "executor"
OF_SM80 = (
    *(DROPOUT, TILE, STATE, SM80 + "dropout", SM80 + "forward", SM80 + "backward"),
    SM80 + "executor",
)
SHARED, ACROSS = HOPPER + "shared.dropout", HOPPER + "backward.dropout"
FORWARD = "consumer", "kernel"
BACKWARD = "dkdv", "dkdv_wide", "kernel", "dq_consumer", "dq_kernel", "dq_host", "host"
OF_SM90 = (
    *(DROPOUT, TILE, STATE, SHARED, ACROSS),
    *(f"{HOPPER}forward.{name}" for name in FORWARD),
    *(f"{HOPPER}backward.{name}" for name in BACKWARD),
    HOPPER + "executor",
)


def simt(modules):
    geometry = simt_runs.Geometry(tx=4, ty=4, rm=8, rn=8)
    with patch("simt_runs.SimtExecutor", modules[OF_SIMT[-1]].SimtExecutor):
        check(geometry.executor_of, np.float32, 8)


def sm80(deterministic):
    geometry = sm80_runs.Geometry(warps=2, m_tiles=2, width=96)

    def case(modules):
        with patch("sm80_runs.Sm80Executor", modules[OF_SM80[-1]].Sm80Executor):
            check(geometry.executor_of, np.float16, 16, deterministic)

    return case


def sm90(modules):
    """Tiles of three groups of keys, of which one has no neighbour."""
    config = replace(ALONE, tile_n=96, dropout=PLACED)

    def executor_of(spec):
        return modules[OF_SM90[-1]].Sm90Executor(spec, config=config)

    check(executor_of, np.float16, 16)


LOOK_UP = [
    Mutant("queries as they are", "types.int32(q + shifts[0][q >> _LOG_BLOCK])", "types.int32(q)"),
    Mutant("keys by the queries' table", "shifts[1][kv >> _LOG_BLOCK]", "shifts[0][kv >> 7]"),
]
GROUPS = [
    Mutant(
        "starts of the first group",
        "token + load(table, token >> ",
        "token + load(table, first >> ",
    ),
]


def family(name, chain, cases, faults):
    errors = sim.SimError, AssertionError
    return Family(f"placed_dropout_{name}", chain, cases, faults, errors=errors)


SIMT_FAMILY = family(
    "simt",
    OF_SIMT,
    {"simt": simt},
    [
        *((DROPOUT, mutant) for mutant in LOOK_UP),
        (
            STATE,
            Mutant(
                "tables in the other order",
                "for x in self._shifts]",
                "for x in self._shifts[::-1]]",
            ),
        ),
    ],
)
SM80_FAMILY = family(
    "sm80",
    OF_SM80,
    {"one-pass": sm80(False), "two-passes": sm80(True)},
    [
        *((DROPOUT, mutant) for mutant in GROUPS),
        (TILE, Mutant("numbers of the other side", "make_starts(n, 1)", "make_starts(n, 0)")),
        (
            TILE,
            Mutant(
                "queries of the keys' table", "make_starts(tile_m, 0)", "make_starts(tile_m, 1)"
            ),
        ),
        (
            SM80 + "dropout",
            Mutant("keys as they are", "types.uint32(key_at(shifts, key))", "types.uint32(key)"),
        ),
        (
            SM80 + "dropout",
            Mutant(
                "lower keys as they are",
                "types.uint32(key_at(shifts, key + 16))",
                "types.uint32(key + 16)",
            ),
        ),
        (
            SM80 + "dropout",
            Mutant("lower rows as they are", "query_at(shifts, q + 16)", "q + 16"),
        ),
    ],
)
SM90_FAMILY = family(
    "sm90",
    OF_SM90,
    {"sm90": sm90},
    [
        (
            TILE,
            Mutant(
                "the group of the other call",
                "numbers[group + 1], numbers[group]",
                "numbers[group], numbers[group + 1]",
            ),
        ),
        (TILE, Mutant("a group alone", "return numbers[group + second]", "return numbers[0]")),
        (TILE, Mutant("the same keys for the quad", "(start >> 5) * 4 + lane", "(start >> 5) * 4")),
        (TILE, Mutant("one call for all rows", "(n0 >> 5 ^ thread >> 2) & 1", "(n0 >> 5) & 1")),
        (SHARED, Mutant("rows as they are", "query_at(shifts, q)", "q")),
        (ACROSS, Mutant("keys as they are", "key_at(shifts, kv + row)", "kv + row")),
    ],
)
