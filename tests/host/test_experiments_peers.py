"""nbflash beside other libraries: sweep, block lists, checks and tables, with stand-ins."""

import csv
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import masks
from experiments import cli
from experiments.commands import peers as bench_peers
from experiments.commands.peers import COLUMNS
from experiments.harness import sweeps
from experiments.harness.backends import open_backend
from experiments.harness.device_oracle import DeviceOracle, poison, random_inputs, sampled
from experiments.harness.errors import BadInput, OutOfBudget
from experiments.harness.grid import read_cases
from experiments.harness.oracle import sample_rows
from experiments.harness.passes import BACKWARD, BOTH, FORWARD, flops
from experiments.harness.provenance import provenance
from experiments.harness.runner import Bench
from experiments.libraries.peers import BLOCKS, CAUSAL, LIBRARIES, Case, Nbflash, block_lists
from experiments.report.peers_report import draw, ratios, show_ratios, show_rows
from nbflash import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (2, 128, 2, 16)
SETTINGS = {"check_rows": 32, "check_heads": 3, "rounds": 3, "seconds": 1.0, "seed": 0}


@pytest.fixture(scope="module")
def arrays():
    return random_inputs(np, SHAPE, BF16, seed=0)


def case_of(mask, kind=BLOCKS, density=0.5):
    return Case("a mask", kind, mask, density, 32, SHAPE)


# Sweep


def test_quick_runs_the_cases_of_the_figure_alone():
    found = read_cases(sweeps.load("peers"), "quick")
    common = ["dense", "causal", "butterfly", "local-4", "local-1"]
    assert {shape: [case.name for case in of] for shape, of in found.items()} == {
        (2, 8192, 16, 128): [*common, "random-64"],
        (2, 8192, 32, 64): common,
    }


def test_full_sweep_has_every_mask_that_has_room():
    found = read_cases(sweeps.load("peers"), "full")
    assert {shape[1] for shape in found} == {2**k for k in range(9, 16)}
    assert {shape[3] for shape in found} == {64, 128, 256}
    assert (1, 32768, 8, 256) in found
    names = [spec["name"] for spec in sweeps.load("peers")["mask"]]
    for shape, of in found.items():
        # Four blocks either side of four are dense.
        left_out = {"local-4"} if shape[1] == 512 else set()
        assert [case.name for case in of] == [name for name in names if name not in left_out]
        density = {case.name: case.density for case in of}
        assert density["dense"] == 1
        assert density["causal"] == 0.5
        blocks = shape[1] // 128
        assert density["butterfly"] == pytest.approx((1 + np.log2(blocks)) / blocks)
        assert density["local-1"] == pytest.approx((3 * blocks - 2) / blocks**2)
        assert density["random-64"] == 0.125
        assert all(case.mask.shape == (shape[1], shape[1]) for case in of)
    assert found[1, 32768, 8, 256][5].density == pytest.approx(0.1, rel=1e-4)


def test_options_choose_cases():
    sweep = sweeps.load("peers")
    found = read_cases(sweep, "quick", names=("random",), head_dims=(32,), seqlens=(384,))
    assert list(found) == [(42, 384, 64, 32)]
    assert [(case.name, case.kind, case.tile) for case in found[42, 384, 64, 32]] == [
        ("random", BLOCKS, 128)
    ]
    with pytest.raises(BadInput, match="--mask local: expected one of dense, causal, butterfly"):
        read_cases(sweep, "full", names=("local",))
    with pytest.raises(
        BadInput, match="no mask has room in 200: dense takes multiples of 128 from 128 on"
    ):
        read_cases(sweep, "full", seqlens=(200,))
    with pytest.raises(BadInput, match=r"room in 512: local-4 takes .* 128 from 640 on$"):
        read_cases(sweep, "full", names=("local-4",), seqlens=(512,))
    with pytest.raises(BadInput, match="the quick sweep has no mask at head_dim 96: name one with"):
        read_cases(sweep, "quick", head_dims=(96,))


def test_work_is_counted_by_density():
    quick = read_cases(sweeps.load("peers"), "quick")[2, 8192, 16, 128]
    work = {case.name: flops(case.shape, case.density, FORWARD) for case in quick}
    assert work["dense"] == 4 * 8192**2 * 128 * 16 * 2
    assert work["causal"] == work["dense"] / 2
    assert work["random-64"] == work["dense"] / 8
    assert flops(SHAPE, 1.0, BACKWARD) == 2.5 * flops(SHAPE, 1.0, FORWARD)
    assert flops(SHAPE, 1.0, BOTH) == flops(SHAPE, 1.0, FORWARD) + flops(SHAPE, 1.0, BACKWARD)


# Block lists


@pytest.mark.parametrize("tile", [16, 32])
def test_block_lists_of_a_block_mask_are_full(tile):
    mask = masks.random(256, 32, 0.3, seed=1)
    (partial_counts, _), (counts, columns) = block_lists(mask, tile)
    assert not partial_counts.any()
    assert counts.dtype == columns.dtype == np.int32
    blocks = mask.dense()[::tile, ::tile]
    for i, row in enumerate(blocks):
        np.testing.assert_array_equal(columns[i, : counts[i]], np.flatnonzero(row))
        assert not columns[i, counts[i] :].any()


def test_block_lists_of_causal_have_a_diagonal_in_part():
    (counts, columns), (full_counts, full_columns) = block_lists(masks.causal(128), 32)
    np.testing.assert_array_equal(counts, [1, 1, 1, 1])
    np.testing.assert_array_equal(columns[:, 0], [0, 1, 2, 3])
    np.testing.assert_array_equal(full_counts, [0, 1, 2, 3])
    np.testing.assert_array_equal(full_columns[3], [0, 1, 2, 0])


def test_block_lists_of_empty_rows():
    (_, _), (counts, columns) = block_lists(masks.local(128, 32, 0) & masks.window(128, left=0), 32)
    assert (counts.shape, columns.shape) == ((4,), (4, 4))
    assert not counts.any()


def test_sdpa_is_left_out_of_block_masks():
    mask = masks.dense(128)
    sdpa, flex = LIBRARIES["sdpa-flash"].func, LIBRARIES["flex-attention"]
    assert sdpa.why_not(case_of(mask)) == "dense and causal alone"
    assert sdpa.why_not(case_of(mask, CAUSAL)) == ""
    assert flex.why_not(case_of(mask)) == ""


# Checks


def test_the_oracle_agrees_with_the_reference(arrays):
    mask, rows = masks.butterfly(128, 32), sample_rows(128, 32)
    oracle = DeviceOracle(np, arrays, mask, rows, [(0, 1), (1, 0)])
    wide = [x.astype(np.float64) for x in arrays]
    out, _ = reference.attention(*wide[:3], mask.dense())
    only = sampled(np, arrays[3], rows).astype(np.float64)
    grads = reference.attention_backward(only, *wide[:3], mask.dense())
    good = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    assert oracle.check(**good) < 1e-6
    for key, x in good.items():
        off = x * np.where(np.arange(128) == rows[5], 1.3, 1)[:, None, None]
        with pytest.raises(OutOfBudget, match=f"{key}: error .*, allowed"):
            oracle.check(**{key: off})
        lost = x.copy()
        lost[0, 1, 0, 3] = np.nan
        with pytest.raises(OutOfBudget, match=f"{key} is not finite"):
            oracle.check(**{key: lost})


def test_poison_and_inputs():
    q, k, v, dout = random_inputs(np, SHAPE, BF16, seed=0)
    assert q.dtype == BF16
    assert 0.9 < np.std([x.astype(np.float32) for x in (q, k, v, dout)]) < 1.1
    held = []
    empty_like = lambda x: held.append(np.empty_like(x)) or held[-1]
    poison(SimpleNamespace(empty_like=empty_like), q, k.astype(np.float32))
    assert all(np.isnan(x).all() for x in held)


# Bench


class FakeClock:
    """One millisecond for every call."""

    def prepare(self, call):
        return call

    def measure(self, task):
        return 1.0, task()


class Wrong(Nbflash):
    """The output of another mask."""

    def label(self, case):
        return "wrong"

    def forward(self, case):
        return super().forward(case_of(masks.local(128, 32, 0)))


class NoBackward(Nbflash):
    def backward(self, case, dout):
        raise NotImplementedError("no backward pass of [this] yet")


def bench_of(arrays, **factories):
    return Bench(np, FakeClock(), arrays, factories, SETTINGS)


def test_right_results_are_timed_and_wrong_ones_named(arrays, capsys):
    def absent(*qkv):
        raise RuntimeError("no kernel\nfor this [/device]")

    ours = partial(Nbflash, impl="cpu")
    bench = bench_of(arrays, nbflash=ours, wrong=partial(Wrong, impl="cpu"), absent=absent)
    rows = bench.measure(case_of(masks.butterfly(128, 32)), (FORWARD, BACKWARD, BOTH))
    assert [(row["library"], row["pass"]) for row in rows] == [
        ("nbflash cpu", FORWARD),
        ("nbflash cpu", BACKWARD),
        ("wrong", BACKWARD),
        ("nbflash cpu", BOTH),
        ("wrong", BOTH),
    ]
    for row in rows:
        assert set(row) == set(COLUMNS) - {"device", "driver", "commit", "date"}
        assert row["median_ms"] == 1
        assert row["tflops"] == flops(SHAPE, 0.5, row["pass"]) / 1e9
        assert 0 < row["error"] < 0.02
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0] == "absent is left out (d=16, N=128): no kernel for this [/device]"
    assert lines[1].startswith("wrong is left out (forward, a mask, d=16, N=128): out: error ")
    assert bench.wrong == []


def test_a_pass_that_nbflash_lacks_is_not_measured(arrays, capsys):
    other = partial(Nbflash, impl="cpu")
    bench = bench_of(arrays, nbflash=partial(NoBackward, impl="cpu"), other=other)
    rows = bench.measure(case_of(masks.dense(128)), (FORWARD, BACKWARD))
    assert [row["pass"] for row in rows] == [FORWARD, FORWARD]
    assert "nbflash is left out (backward, a mask" in capsys.readouterr().out


def test_a_wrong_nbflash_is_remembered(arrays):
    bench = bench_of(arrays, nbflash=partial(Wrong, impl="cpu"))
    assert bench.measure(case_of(masks.butterfly(128, 32)), (FORWARD,)) == []
    assert bench.wrong == ["forward, a mask, d=16, N=128"]


# Report


def rows_of():
    speeds = {"nbflash sm90": 600.0, "flex-attention": 300.0, "sdpa-flash": 400.0}
    rows = [
        {"pass": FORWARD, "head_dim": d, "seqlen": 8192, "mask": mask, "library": name}
        | {"tflops": speed if d == 128 else 75.0, "median_ms": 1.0, "p10_ms": 0.9, "p90_ms": 1.1}
        | {"error": 2e-3, "dtype": "bfloat16", "batch": 2, "heads": 16}
        for d in (64, 128)
        for mask in ("dense", "butterfly")
        for name, speed in speeds.items()
        if mask == "dense" or name != "sdpa-flash"
    ]
    return [row | {"device": "GPU", "commit": "0"} for row in rows]


def test_ratios_compare_the_same_case(capsys):
    found = ratios(rows_of())
    assert found[FORWARD, 128, 8192, "dense"] == {"flex-attention": 2.0, "sdpa-flash": 1.5}
    assert found[FORWARD, 64, 8192, "butterfly"] == {"flex-attention": 1.0}
    show_rows(rows_of())
    show_ratios(rows_of())
    last = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert last == ["geometric", "mean", "1.41", "1.22"]


def test_figure(tmp_path):
    shorter = rows_of()[-1] | {"seqlen": 512}  # at one head_dim: the other has no panel
    draw([*rows_of(), shorter], tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 10_000


# Command line


def test_columns():
    assert ",".join(COLUMNS) == (
        "library,version,pass,mask,density,tile,head_dim,heads,heads_kv,batch,seqlen,dtype,"
        "median_ms,p10_ms,p90_ms,tflops,error,device,driver,commit,date"
    )


def test_the_command_passes_its_options_on(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(bench_peers, "run", lambda *args, **chosen: calls.append((args, chosen)))
    options = (
        "--passes backward,forward --head-dim 64 --head-dim 128 --mask dense --library nbflash"
    )
    cli.main(["peers", "--out", str(tmp_path), *options.split()])
    chosen = {"names": ("dense",), "head_dims": (64, 128), "seqlens": ()}
    passes = (BACKWARD, FORWARD)
    assert calls == [((tmp_path, 0, False, passes, "auto", ("nbflash",)), chosen)]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["peers", "--out", str(tmp_path), "--passes", "sideways"])
    assert "--passes sideways: expected some of forward, backward, both" in capsys.readouterr().err
    with pytest.raises(BadInput, match="--library fa5: expected one of nbflash, sdpa-flash"):
        bench_peers.open_factories(("fa5",), "auto")


def test_a_run_leaves_table_csv_and_figure(tmp_path, monkeypatch, capsys):
    sweep = sweeps.load("peers") | {"tokens": 256, "width": 32, "check_rows": 32}
    sweep["quick"] |= {"head_dim": [16], "seqlen": [256]}
    cpu, origin = open_backend("cpu"), provenance("cpu")
    monkeypatch.setattr(sweeps, "load", lambda name: sweep)
    monkeypatch.setattr(bench_peers, "open_backend", lambda device: cpu)
    monkeypatch.setattr(bench_peers, "provenance", lambda device: origin)
    monkeypatch.setattr(bench_peers, "QueuedEvents", lambda sample_ms: FakeClock())
    missing = lambda name: "" if name == "nbflash" else "not here"
    monkeypatch.setattr(bench_peers, "why_not_here", missing)
    chosen = {"passes": (FORWARD, BOTH), "names": ("dense", "random-64")}
    bench_peers.run(tmp_path, quick=True, impl="cpu", **chosen)
    printed = capsys.readouterr().out
    assert "flash-attn-4 is left out (this machine): not here" in printed
    assert "bfloat16: batch=1, seqlen=256, heads=2, head_dim=16" in printed
    with (tmp_path / "peers.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["mask"], row["pass"], row["density"], row["tile"]) for row in rows] == [
        ("dense", FORWARD, "1.0", "128"),
        ("dense", BOTH, "1.0", "128"),
        ("random-64", FORWARD, "0.25", "64"),
        ("random-64", BOTH, "0.25", "64"),
    ]
    assert (tmp_path / "peers.png").exists()
