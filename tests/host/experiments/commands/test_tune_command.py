"""Configurations against each other: candidates, verdicts and a whole run, on the CPU kernels."""

import numpy as np
import pytest
from command_runs import FakeClock, command, read_csv, stand_in

import masks
from experiments.commands import tune
from experiments.commands.tune import candidates, judged, name_of
from experiments.harness import sweeps
from experiments.harness.errors import BadInput, OutOfBudget
from experiments.harness.grid import read_cases
from experiments.harness.kernel_tables import Sm80Tables, Sm90Tables
from experiments.harness.passes import BACKWARD, FORWARD
from nbflash.backends.cpu.executor import CpuExecutor
from nbflash.backends.sm90.backward.config import Sm90BackwardConfig
from nbflash.backends.sm90.forward.config import Sm90Config
from nbflash.cuda.device import SHARED_MEMORY

DTYPE = "bfloat16"
TABLES = Sm90Tables()


HEAD_DIMS = (64, 96, 128, 192, 256)


@pytest.mark.parametrize("dtype", ["float16", DTYPE])
@pytest.mark.parametrize("head_dim", [8, *HEAD_DIMS])
def test_every_row_of_the_tables_fits_and_is_a_candidate(dtype, head_dim, capsys):
    sweep = sweeps.load("tune")
    for which in (FORWARD, BACKWARD):
        table = TABLES.of(which, dtype, head_dim)
        assert not any(config.why_not() for config in table)
        found = candidates(TABLES, which, dtype, head_dim, sweep["sm90"][which])
        assert list(found)[: len(table)] == list(map(name_of, table))
        # All that the sweep lists fit as well, and no two are the same.
        reach = min(
            (s["reach"] for s in sweep["sm90"][which] if head_dim <= s["reach"]), default=None
        )
        listed = sum(spec["reach"] == reach for spec in sweep["sm90"][which]) if table else 0
        assert len(found) == len(table) + listed
        assert all(config.head_dim == head_dim for config in found.values())
    said = capsys.readouterr().out
    wide = f"d={head_dim} is left out (backward): the table has no row for it\n"
    assert said == ("" if TABLES.of(BACKWARD, dtype, head_dim) else wide)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tables_and_candidates_of_the_portable_kernels(head_dim, capability, capsys):
    hopper, sweep = capability == (9, 0), sweeps.load("tune")["sm80"]
    tables = Sm80Tables(SHARED_MEMORY[capability], hopper)
    for which in (FORWARD, BACKWARD):
        table = tables.of(which, DTYPE, head_dim)
        assert [max(c.tile_m, c.tile_n) for c in table[1:]] == [64] * (head_dim <= 128)
        found = candidates(tables, which, DTYPE, head_dim, sweep[which])
        assert list(found)[: len(table)] == list(map(name_of, table))
        assert not any("sums" in name or "red" in name for name in found)
        if hopper:
            assert len(found) > len(table)
        small = masks.random(4096, 64, density=0.1, seed=0)
        assert tables.chosen(which, table, masks.dense(4096)) == table[0]
        assert tables.chosen(which, table, small) == table[-1]
    assert capsys.readouterr().out == "" or not hopper


def test_rows_of_the_portable_kernels_are_those_of_the_source():
    tables = Sm80Tables(SHARED_MEMORY[9, 0], True)
    first, small = tables.of(FORWARD, DTYPE, 128)
    assert tables.row(first, 351.2, 351.2) == "(128, 4, 2, 64, 3, 2, 1.00)"
    assert tables.row(small, 332.4, 351.2) == "(128, 2, 2, 64, 2, 4, 0.95)"
    assert tables.row(tables.of(BACKWARD, DTYPE, 192)[0], 99, 90) == "(192, 8, 1, 64, 1, 1, 1.10)"


def test_portable_kernels_that_do_not_fit():
    tables = Sm80Tables(SHARED_MEMORY[8, 6], False)
    row = {"warps": 4, "m_tiles": 2, "stages": 3, "min_blocks": 2}
    (reason,) = tables.why_not(tables.made(FORWARD, DTYPE, 128, row | {"tile_n": 64}))
    assert reason == "2 blocks do not fit 101376 bytes of shared memory"
    assert tables.why_not(tables.made(BACKWARD, DTYPE, 128, row | {"length": 64})) == [reason]


def test_the_sweep_has_every_regime_at_every_head_dim():
    cases = read_cases(sweeps.load("tune"), "full")
    assert sorted(shape[3] for shape in cases) == list(HEAD_DIMS)
    for of in cases.values():
        names = [case.name for case in of]
        assert names == ["dense", "causal", "butterfly", "local-1", "random-64"]
    quick = read_cases(sweeps.load("tune"), "quick")
    assert sum(map(len, quick.values())) == 6


def test_what_does_not_fit_is_said(capsys):
    big = {"reach": 64, "consumers": 2, "tile_n": 128, "k_stages": 11}
    many = {"reach": 64, "consumers": 3, "tile_n": 64, "registers": [24, 242]}
    odd = {"reach": 64, "consumers": 2, "tile_n": 144, "k_stages": 2}
    found = candidates(TABLES, FORWARD, DTYPE, 64, [big, many, odd])
    assert list(found) == [name_of(config) for config in TABLES.of(FORWARD, DTYPE, 64)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("128×128 k_stages=11 is left out (forward, d=64): 2")
    assert lines[0].endswith("bytes of shared memory, there are 233472")
    assert "96000 registers, a block is launched with" in lines[1]
    assert "multiples of 8, got (24, 242)" in lines[1]
    assert lines[2].endswith("(forward, d=64): tile_n is a multiple of 16 up to 128, got 144")


def test_names_and_rows_say_what_differs():
    config = Sm90Config(DTYPE, 128, 2, 128, registers=(56, 224), q_stages=1, speed=600)
    assert name_of(config) == "128×128 q_stages=1 registers=56/224"
    assert TABLES.row(config, 612.6, 600) == "(128, 2, 128, 3, 2, 1, (56, 224), 1, False, 613)"
    backward = Sm90BackwardConfig(DTYPE, 64, 2, 128)
    assert name_of(backward) == "128×128"
    assert TABLES.row(backward, 500, 500) == "(64, 2, 128)"
    assert Sm90Config(DTYPE, 128, *(2, 128, 3, 2, 1, (56, 224), 1, False, 600)) == config


def test_the_table_agrees_within_the_spread_of_the_fastest():
    rows = [
        {"config": "a", "median_ms": 1.0, "p90_ms": 1.05},
        {"config": "b", "median_ms": 1.04, "p90_ms": 1.2},
        {"config": "c", "median_ms": 1.1, "p90_ms": 1.2},
    ]
    for choice, agrees in {"a": True, "b": True, "c": False, "absent": False}.items():
        found = judged(rows, choice)
        assert [row["fastest"] for row in found] == [True, False, False]
        assert [row["config"] for row in found if row["table_chooses"]] == [
            name for name in "abc" if name == choice
        ]
        assert {row["table_agrees"] for row in found} == {agrees}
        assert [row["over_fastest"] for row in found] == [1.0, 1.04, 1.1]


def test_the_speed_is_that_over_the_tiles_that_are_walked():
    config = Sm90Config(DTYPE, 64, 2, 128)
    row = {"library": "x", "pass": FORWARD, "batch": 1, "seqlen": 256, "heads": 2, "head_dim": 64}
    row |= {"median_ms": 1.0}
    walked, speed = tune.tile_speed(row, config, masks.causal(256))
    assert walked == 0.75  # three of four tiles hold the triangle
    assert speed == pytest.approx(0.75 * 4 * 256**2 * 64 * 2 / 1e9)


class Clock(FakeClock):
    def __init__(self, sample_ms):
        assert sample_ms == 2.0


@pytest.fixture
def made(monkeypatch):
    """The CPU kernels in the place of the Hopper kernels; what they were asked for."""
    made = []

    def executor(self, which, config, spec):
        made.append((which, config))
        return CpuExecutor(spec)

    sweep = sweeps.load("tune") | {"tokens": 256, "width": 128, "check_rows": 32}
    sweep["quick"] |= {"seqlen": [256], "rounds": 3}
    monkeypatch.setattr(sweeps, "load", lambda name: sweep)
    stand_in(monkeypatch, Clock)
    monkeypatch.setattr(Sm90Tables, "executor", executor)
    return made


def test_a_run_measures_every_candidate_and_judges_the_tables(tmp_path, capsys, made):
    tune.run(tmp_path, quick=True, names=("dense", "random-64"), head_dims=(64,))
    rows = read_csv(tmp_path / "tune.csv")
    for which in (FORWARD, BACKWARD):
        names = list(candidates(TABLES, which, DTYPE, 64, sweeps.load("tune")["sm90"][which]))
        for mask in ("dense", "random-64"):
            group = [row for row in rows if (row["pass"], row["mask"]) == (which, mask)]
            assert [row["config"] for row in group] == names
            assert sum(row["fastest"] == "True" for row in group) == 1
            assert sum(row["table_chooses"] == "True" for row in group) == 1
        assert {config.head_dim for asked, config in made if asked == which} == {64}
    wanted = {"commit", "date", "device", "driver", "numba_cuda", "cupy", "table_row", "walked"}
    assert wanted <= set(rows[0])
    # 256 queries are two tiles of 192 and three tiles of 112 keys hold 256 of 336.
    walked = {row["config"]: float(row["walked"]) for row in rows if row["mask"] == "dense"}
    assert walked["192×112 v_stages=3 registers=56/152"] == 2 * 3 * 192 * 112 / 256**2
    printed = capsys.readouterr().out
    assert "the tables in the source" in printed
    assert "backward: (64, 2, 128, 2, (40, 232))" in printed


def test_a_wrong_choice_of_the_table_is_refused(tmp_path, monkeypatch, made, capsys):
    class Wrong(CpuExecutor):
        def forward(self, q, k, v, out, lse):
            super().forward(q, k, v, out, lse)
            out[...] = np.nan

    wrong = name_of(TABLES.of(FORWARD, DTYPE, 128)[0])

    def executor(self, which, config, spec):
        cls = Wrong if name_of(config) == wrong else CpuExecutor
        return cls(spec)

    monkeypatch.setattr(Sm90Tables, "executor", executor)
    with pytest.raises(OutOfBudget, match="the table's choice failed: forward, dense, d=128"):
        tune.run(tmp_path, quick=True, passes=(FORWARD,), names=("dense",), head_dims=(128,))
    printed = capsys.readouterr().out
    assert f"{wrong} is left out (forward, dense, d=128, N=256): out is not finite" in printed
    assert "differs" in printed


def test_the_command_needs_a_hopper_gpu_and_passes_of_its_own(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        command("tune --passes both --out", tmp_path)
    assert "--passes both: the passes have configurations" in capsys.readouterr().err
    stand_in(monkeypatch)
    monkeypatch.setattr(
        "nbflash.planning.dispatch.why_not_here", lambda impl: ["no Hopper", "no ptxas"]
    )
    with pytest.raises(BadInput, match="no Hopper; no ptxas"):
        tune.run(tmp_path)
