"""Geometries of decode's kernel against each other: candidates, and a whole run on the CPU."""

from types import SimpleNamespace

import numpy as np
import pytest
from command_runs import command, read_csv, stand_in

import nbflash
from experiments.commands import tune_decode
from experiments.commands.tune_decode import KERNELS, candidates, shares_of
from experiments.harness import sweeps
from experiments.harness.errors import BadInput, OutOfBudget
from experiments.harness.timing import WallClock
from nbflash.backends.sm90.decode.host import config_for
from nbflash.backends.split_kv.splits import splits_for
from nbflash.planning.kernels import decode_problem

MULTIPROCESSORS = 132
DEVICE = SimpleNamespace(multiprocessors=MULTIPROCESSORS, smem_limit=227 * 1024)


def problem_of(stored="bfloat16", head_dim=128, batch=1, capacity=65536):
    sizes = {"batch": batch, "heads_kv": 8, "capacity": capacity}
    return decode_problem("bfloat16", head_dim, stored, 1, 4, None, **sizes)


def candidates_of(impl, problem, sweep):
    kernel = KERNELS[impl](problem, DEVICE, sweep)
    return candidates(kernel, problem, MULTIPROCESSORS, sweep["waves"])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("stored", ["bfloat16", "int8", "float8_e4m3fn"])
def test_every_candidate_fits_and_the_choice_is_the_first(stored, head_dim, capsys):
    sweep, problem = sweeps.load("tune-decode"), problem_of(stored, head_dim)
    found, chosen = candidates_of("sm90", problem, sweep), config_for(problem, None)
    tiles, slots = problem.capacity // chosen.tile_n, MULTIPROCESSORS * chosen.min_blocks
    assert found[0] == (chosen, splits_for(8, tiles, slots))
    assert len(set(found)) == len(found)
    specs = sweep["wide" if stored == "bfloat16" else "stored"]
    listed = sum(spec["reach"] == head_dim for spec in specs)
    assert len({config for config, _ in found}) == 1 + listed >= 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_candidates_of_the_portable_kernel(stored, head_dim, capsys):
    sweep, problem = sweeps.load("tune-decode"), problem_of(stored, head_dim)
    found = candidates_of("sm80", problem, sweep)
    specs = sweep["portable" if stored == "bfloat16" else "portable_stored"]
    listed = sum(spec["reach"] == head_dim for spec in specs)
    assert len({config for config, _ in found}) == 1 + listed >= 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("impl", "named"), [("sm90", "wide"), ("sm80", "portable")])
def test_what_does_not_fit_is_left_out(impl, named, capsys):
    sweep = sweeps.load("tune-decode") | {named: [{"reach": 128, "stages": 60}]}
    found = candidates_of(impl, problem_of(), sweep)
    assert len({config.stages for config, _ in found}) == 1
    assert "64 keys, 60 stages, " in (said := capsys.readouterr().out)
    assert " blocks is left out (d=128): " in said


def test_shares_fill_waves_of_two_tiles_or_more():
    config = config_for(problem_of(), None)
    assert shares_of(problem_of(), config, MULTIPROCESSORS, [1, 2, 4]) == [16, 33, 66]
    assert shares_of(problem_of(capacity=256), config, MULTIPROCESSORS, [1, 2]) == [2]
    assert shares_of(problem_of(batch=64), config, MULTIPROCESSORS, [1, 8])[1:] == [2]
    assert max(shares_of(problem_of("int8"), config, MULTIPROCESSORS, [32])) == 256


@pytest.fixture
def made(monkeypatch):
    """`impl="cpu"` in the place of the kernel; what it was asked for."""
    made = []

    def decoder_of(binding, config, splits, problem, q, cache):
        made.append((config, splits))
        k, v, lengths, _, k_scale, v_scale = cache
        return lambda: nbflash.decode(q, k, v, lengths, k_scale=k_scale, v_scale=v_scale)

    sweep = sweeps.load("tune-decode") | {"heads": 4, "heads_kv": 2}
    sweep["quick"] = {"rounds": 3, "seconds": 3.0, "head_dim": [64], "sizes": [[2, 512]]}
    monkeypatch.setattr(sweeps, "load", lambda name: sweep)
    stand_in(monkeypatch, lambda sample_ms: WallClock())
    monkeypatch.setattr(tune_decode, "device_of", lambda problem: DEVICE)
    monkeypatch.setattr(tune_decode, "decoder_of", decoder_of)
    return made


def test_a_run_measures_every_candidate_and_judges_the_choice(tmp_path, capsys, made):
    tune_decode.run(tmp_path, quick=True)
    rows = read_csv(tmp_path / "tune-decode.csv")
    assert len(rows) == len(made)
    for name in ("bfloat16", "int8", "float8_e4m3fn"):
        group = [row for row in rows if row["cache"] == name]
        assert [row["table_chooses"] for row in group] == ["True"] + ["False"] * (len(group) - 1)
        assert sum(row["fastest"] == "True" for row in group) == 1
        scale_bytes = 2 * 4 * (name != "bfloat16")
        values = 2 * 64 * (2 if name == "bfloat16" else 1)
        for row in group:
            nbytes = 2 * 512 * 2 * (values + scale_bytes)
            assert float(row["gb_per_s"]) == pytest.approx(nbytes / float(row["median_ms"]) / 1e6)
    assert {"commit", "date", "device", "driver", "numba_cuda", "cupy", "p90_ms"} <= set(rows[0])
    printed = capsys.readouterr().out
    assert "2 × 512, d=64, int8: " in printed


@pytest.mark.parametrize("chosen", [True, False])
def test_a_wrong_result_is_not_timed(chosen, tmp_path, monkeypatch, capsys, made):
    """Without the choice of table and rule there is nothing to judge."""
    right, wrong = tune_decode.decoder_of, 6 if chosen else 12

    def decoder_of(binding, config, splits, problem, q, cache):
        call = right(binding, config, splits, problem, q, cache)
        return (lambda: call() * np.nan) if config.stages == wrong else call

    monkeypatch.setattr(tune_decode, "decoder_of", decoder_of)
    if chosen:
        with pytest.raises(OutOfBudget, match=r"64 keys, 6 stages, 2 blocks, .* shares: no timing"):
            tune_decode.run(tmp_path, quick=True)
    else:
        stages = {row["stages"] for row in tune_decode.run(tmp_path, quick=True)}
        assert stages == {2, 3, 4, 6}
        assert "12 stages, 1 blocks, " in capsys.readouterr().out


def test_the_command_needs_a_hopper_gpu(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(
        "nbflash.planning.dispatch.why_not_here", lambda impl: ["no Hopper", "no ptxas"]
    )
    with pytest.raises(BadInput, match="no Hopper; no ptxas"):
        tune_decode.run(tmp_path)


def test_the_command(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(tune_decode, "run", lambda *arguments: given.append(arguments))
    command("tune-decode --seed 3 --quick --impl sm80 --out", tmp_path)
    assert given == [(tmp_path, 3, True, "sm80")]
