"""The command line of the experiments, end to end at tiny sizes."""

import csv
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from experiments import __main__ as main_module
from experiments import cli
from experiments.harness import sweeps
from nbflash.backends.cpu.executor import CpuExecutor
from nbflash.backends.reference import ReferenceExecutor

PROVENANCE = {"commit", "date", "device", "driver", "python", "nbflash", "numpy", "scipy", "numba"}
TINY = (
    "sparsity --quick --device cpu --dtype float64 --seqlen 128 --heads 2 --head-dim 8 --block 8 "
    "--rounds 3 --seconds 1 --check-rows 32"
)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("experiments.harness.timing.SETTLE_SECONDS", 0)


def run(capsys, *args):
    """Exit status, standard output and standard error of one command."""
    status = 0
    try:
        cli.main(" ".join(map(str, args)).split())
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def assert_figure(path, panels):
    """A PNG with marks all over it: no panel is empty."""
    image = imread(path)[..., :3].mean(axis=2)
    for part in np.array_split(image, panels, axis=1):
        assert part.shape[1] > 150
        assert part.std() > 0.02


def test_help_lists_every_command(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert run(capsys)[1] == out
    for command in cli.cli.commands:
        assert f"\n  {command} " in out
        status, text, _ = run(capsys, command, "--help")
        assert status == 0
        assert all(option.help for option in cli.cli.commands[command].params)
        assert "--out" in text
    assert set(cli.cli.commands) == {
        *("sparsity", "seqlen", "io", "masks", "cpu", "simt", "decode", "features", "peers"),
        *("train", "tune", "tune-decode"),
    }


def test_sparsity_on_random_input(tmp_path, capsys):
    status, _, err = run(capsys, TINY, "--out", tmp_path)
    assert (status, err) == (0, "")
    rows = read_csv(tmp_path / "sparsity.csv")
    wanted = {"impl", "dtype", "batch", "seqlen", "heads", "head_dim", "mask", "block", "density"}
    wanted |= {"tile", "pass", "median_ms", "p10_ms", "p90_ms", "tflops", "error", "budget"}
    assert PROVENANCE | wanted <= set(rows[0])
    families = {"butterfly", "local", "union", "dense", "baseline"}
    assert {row["family"] for row in rows} == families
    for which, work_of in {"forward": 1, "backward": 2.5, "both": 3.5}.items():
        masks = [row for row in rows if row["pass"] == which and row["error"]]
        densities = [float(row["density"]) for row in masks]
        assert min(densities) == 1 / 16
        assert max(densities) == 1
        assert len({row["mask"] for row in masks}) == len(masks) >= 9
        for row in masks:
            assert float(row["error"]) <= float(row["budget"])
            assert 0 < float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"])
            work = 4 * float(row["density"]) * 128 * 128 * 8 * 2
            work *= work_of
            assert float(row["tflops"]) == pytest.approx(work / float(row["median_ms"]) / 1e9)
    assert_figure(tmp_path / "sparsity.png", 3)


def test_sparsity_on_a_users_input_reports_fidelity(tmp_path, capsys):
    rng = np.random.default_rng(0)
    path = tmp_path / "mine.npz"
    np.savez(path, q=rng.standard_normal((64, 4, 8)), **dict.fromkeys("kv", np.ones((64, 2, 8))))
    options = "--quick --device cpu --impl reference --rounds 3 --mask union --mask local"
    status, _, err = run(capsys, "sparsity", options, "--input", path, "--out", tmp_path)
    assert (status, err) == (0, "")
    rows = read_csv(tmp_path / "sparsity-mine.csv")
    assert {row["family"] for row in rows} == {"union", "local", "dense", "baseline"}
    assert (rows[0]["seqlen"], rows[0]["heads"], rows[0]["heads_kv"]) == ("64", "4", "2")
    for row in rows:
        if row["family"] != "baseline":
            # Equal keys share the attention evenly, and equal values make every average the same.
            assert float(row["attention_kept"]) == pytest.approx(float(row["density"]))
            assert float(row["output_error"]) < 1e-6
    assert_figure(tmp_path / "sparsity-mine.png", 4)


def test_full_sweep_is_the_default(tmp_path, capsys):
    options = TINY.replace("--quick ", "")
    status, out, _ = run(capsys, options, "--impl", "reference", "--out", tmp_path)
    assert status == 0
    assert out.count("of a tile of the dense run") == 3
    assert len(read_csv(tmp_path / "sparsity.csv")) > 3 * 16


def test_one_wrong_tile_is_refused_however_few_rows_are_asked_for(tmp_path, capsys, monkeypatch):
    right = CpuExecutor.forward

    def wrong(self, q, k, v, out, lse):
        right(self, q, k, v, out, lse)
        height = self.schedule.tile_m
        out[:, 3 * height : 4 * height] += 1e-6

    monkeypatch.setattr(CpuExecutor, "forward", wrong)
    options = "--impl cpu --seqlen 1024 --block 64 --check-rows 2"
    status, _, err = run(capsys, TINY, options, "--out", tmp_path)
    assert status == 1
    assert "no timing is reported, out" in err


WRONG = {
    "out": ("forward", 2, (0, 3, 0, 1)),
    "lse": ("forward", 3, (0, 1, 5)),
    "dq": ("backward", 7, (0, 7, 0, 0)),
    "dk": ("backward", 8, (0, 127, 1, 0)),
    "dv": ("backward", 9, (0, 64, 1, 7)),
}


@pytest.mark.parametrize("array", WRONG)
@pytest.mark.parametrize("fault", [lambda x: x + 1e-6 * (1 + abs(x)), lambda x: np.nan])
def test_a_wrong_result_is_refused(tmp_path, capsys, monkeypatch, array, fault):
    method, argument, index = WRONG[array]
    right = getattr(ReferenceExecutor, method)

    def wrong(self, *args):
        right(self, *args)
        target = args[argument + (method == "forward")]
        target[index] = fault(target[index])

    monkeypatch.setattr(ReferenceExecutor, method, wrong)
    options = f"--impl reference --check-rows 128 --out {tmp_path}"
    status, out, err = run(capsys, TINY, options)
    assert status == 1
    assert err.startswith("error: dense: no timing is reported, " + array)
    assert err.count("\n") == 1
    assert "ms" not in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("method", "argument"), [("forward", 3), ("backward", 7)])
def test_a_result_that_goes_wrong_while_it_is_timed_is_refused(
    tmp_path, capsys, monkeypatch, method, argument
):
    right, calls = getattr(ReferenceExecutor, method), []

    def wrong(self, *args):
        right(self, *args)
        calls.append(self)
        if len(calls) > 30:
            args[argument][:] += 1

    monkeypatch.setattr(ReferenceExecutor, method, wrong)
    status, _, err = run(capsys, TINY, "--impl", "reference", "--out", tmp_path)
    assert status == 1
    assert "as timed: no timing is reported" in err
    assert list(tmp_path.iterdir()) == []


def test_an_unwritten_row_outside_the_sample_is_refused(tmp_path, capsys, monkeypatch):
    right = ReferenceExecutor.forward

    def wrong(self, q, k, v, out, lse):
        kept = out[:, 1:3].copy()
        right(self, q, k, v, out, lse)
        out[:, 1:3] = kept

    monkeypatch.setattr(ReferenceExecutor, "forward", wrong)
    options = f"--impl reference --check-rows 1 --out {tmp_path}"
    status, _, err = run(capsys, TINY, options)
    assert status == 1
    assert "out is not finite" in err


BAD = {
    "sparsity --device cuda": "no CUDA device",
    "sparsity --quick --full": "--quick and --full exclude each other",
    "sparsity --device cuda --impl cpu": "--device cuda and --impl cpu exclude each other",
    "sparsity --impl cuda": "'cuda' is not one of",
    "sparsity --device cpu --quick --impl simt": "simt runs on CUDA arrays",
    "sparsity --dtype int8": "'int8' is not one of",
    "sparsity --seqlen 0": "--seqlen",
    "sparsity --head-dim 257": "--head-dim",
    "sparsity --heads x": "--heads",
    "sparsity --block 4": "--block",
    "sparsity --device cpu --mask diagonal": "expected one of butterfly, local",
    "sparsity --input {tmp}/none.npz": "no such file",
    "sparsity --input {tmp}/some.txt": "expected one of .npz",
    "sparsity --input {tmp}/text.npz": "cannot be read as .npz",
    "sparsity --input {tmp}/text.npy": "cannot be read as .npy",
    "sparsity --input {tmp}/nothing.npz": "cannot be read as .npz",
    "sparsity --input {tmp}/nothing.npy": "cannot be read as .npy",
    "sparsity --input {tmp}/single.npz": "holds a single array, as .npy does",
    "sparsity --input {tmp}/named.npy": "holds named arrays, as .npz does",
    "sparsity --input {tmp}/bytes.npz": "q is not an array",
    "sparsity --input {tmp}/fields.npz": "q must hold finite floating-point numbers",
    "sparsity --input {tmp}/void.npz": "q must hold finite floating-point numbers",
    "sparsity --input {tmp}/fields.npy": "q must hold finite floating-point numbers",
    "sparsity --input {tmp}/empty.npz": "no array 'q'",
    "sparsity --input {tmp}/flat.npz": "q has shape (4, 4)",
    "sparsity --input {tmp}/nan.npz": "v must hold finite floating-point numbers",
    "sparsity --input {tmp}/int.npz": "q must hold finite floating-point numbers",
    "sparsity --input {tmp}/huge.npz --dtype float16": "k overflows float16",
    "sparsity --input {tmp}/ratio.npz": "3 query heads over 2",
    "sparsity --input {tmp}/shapes.npz": "do not fit",
    "sparsity --input {tmp}/cross.npz": "the masks are square",
    "sparsity --input {tmp}/two.npy": "expected (3, seqlen, heads",
    "sparsity --input {tmp}/flat.npz --seqlen 8": "--seqlen and --input exclude each other",
    "sparsity --out {tmp}/text.npz": "--out",
    "masks --seqlen 100": "expected a multiple of --block 32",
    "masks --only circle": "--only circle",
    "simt": "no CUDA device",
    "sparse": "No such command 'sparse'",
    "io --quick": "No such option",
}


@pytest.fixture
def bad_files(tmp_path):
    x = np.ones((1, 16, 2, 4), np.float32)
    good = dict.fromkeys("qkv", x)
    files = {
        "empty": {"x": x},
        "flat": dict.fromkeys("qkv", np.ones((4, 4))),
        "nan": good | {"v": np.full_like(x, np.nan)},
        "int": dict.fromkeys("qkv", x.astype(int)),
        "fields": dict.fromkeys("qkv", np.zeros(x.shape, [("re", "f4"), ("im", "f4")])),
        "void": dict.fromkeys("qkv", np.zeros(x.shape, "V2")),
        "huge": good | {"k": x * 1e6},
        "ratio": good | {"q": np.ones((1, 16, 3, 4), np.float32)},
        "shapes": good | {"v": x[..., :2]},
        "cross": good | {"q": x[:, :8]},
    }
    for name, arrays in files.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
    np.save(tmp_path / "two.npy", np.ones((2, 16, 2, 4)))
    np.save(tmp_path / "fields.npy", np.zeros((3, 16, 2, 4), [("re", "f4")]))
    np.save(tmp_path / "single.npy", np.ones((3, 16, 2, 4)))
    (tmp_path / "single.npy").rename(tmp_path / "single.npz")
    np.savez(tmp_path / "named.npz", **good)
    (tmp_path / "named.npz").rename(tmp_path / "named.npy")
    with zipfile.ZipFile(tmp_path / "bytes.npz", "w") as file:
        for name in "qkv":
            file.writestr(name, b"nothing to read")
    for name in ("nothing.npz", "nothing.npy"):
        (tmp_path / name).touch()
    for name in ("some.txt", "text.npz", "text.npy"):
        (tmp_path / name).write_text("nothing to read")
    return tmp_path


@pytest.mark.parametrize("command", BAD, ids=lambda command: command.replace("{tmp}/", ""))
def test_bad_options_and_files_end_in_one_line(bad_files, capsys, monkeypatch, command):
    monkeypatch.chdir(bad_files)
    status, out, err = run(capsys, command.format(tmp=bad_files))
    assert status == 2
    assert BAD[command] in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("package", "command"), [("click", "--help"), ("rich", "masks"), ("matplotlib", "masks")]
)
def test_a_missing_package_is_named_in_one_line(tmp_path, package, command):
    code = f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv[1:] = [{command!r}]; "
    code += "runpy.run_module('experiments', run_name='__main__')"
    path = os.pathsep.join([str(Path(cli.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == f"error: needs {package}: pip install '.[plot]'\n"


def test_where_a_missing_package_comes_from(monkeypatch, capsys):
    """A checkout has a setup.cfg, an installed wheel has none."""
    monkeypatch.setitem(sys.modules, "experiments.cli", None)
    monkeypatch.setattr(main_module, "NEEDED", ("experiments",))
    for checkout, source in ((Path(__file__), "."), (Path("nothing"), "nbflash")):
        monkeypatch.setattr(main_module, "CHECKOUT", checkout)
        with pytest.raises(SystemExit, match="2"):
            main_module.run()
        assert capsys.readouterr().err.endswith(f": pip install '{source}[plot]'\n")


def test_help_needs_no_numba():
    code = "import sys, experiments.cli; print({'numba', 'cupy', 'matplotlib'} & set(sys.modules))"
    root = Path(cli.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_masks_gallery(tmp_path, capsys):
    options = "--seqlen 64 --block 8 --only butterfly --only tree --only axial"
    status, out, _ = run(capsys, "masks", options, "--out", tmp_path)
    assert status == 0
    rows = {row["pattern"]: row for row in read_csv(tmp_path / "masks.csv")}
    assert list(rows) == ["butterfly", "axial", "tree"]
    assert rows["butterfly"]["cells"] == rows["butterfly"]["closed_form"] == str(64 * 8 * 4)
    assert rows["butterfly"]["layers"] == "3"
    assert rows["axial"]["cells"] == str(64 * 15)
    assert set(rows["tree"]) > PROVENANCE
    assert "██" in out
    assert_figure(tmp_path / "masks.png", 3)


def test_io_counts(tmp_path, capsys, monkeypatch):
    sweep = sweeps.load("io")
    sweep["length"] |= {"n": [32, 64], "head_dim": 8, "sram": 256}
    sweep["sram"] |= {"n": 64, "head_dim": 8, "sram": [64, 128, 256]}
    sweep["density"] |= {"n": 64, "head_dim": 8, "sram": 256, "block": 8}
    monkeypatch.setattr("experiments.commands.io.load", {"io": sweep}.get)
    status, _, _ = run(capsys, "io", "--out", tmp_path)
    assert status == 0
    rows = read_csv(tmp_path / "io.csv")
    of = {(row["sweep"], row["algorithm"], row["n"], row["sram"]): row for row in rows}
    # Algorithm 0 reads Q, K, S, P and V and writes S, P and O, whatever the SRAM.
    for sram in ("64", "128", "256"):
        standard = of["sram", "0: standard", "64", sram]
        assert int(standard["reads"]) == 3 * 64 * 8 + 2 * 64 * 64
        assert int(standard["writes"]) == 64 * 8 + 2 * 64 * 64
    # Twice the SRAM, half the passes over Q and O: N²d²/M.
    flash = [int(of["sram", "1: flash", "64", sram]["accesses"]) for sram in ("64", "128", "256")]
    once = 2 * 64 * 8 + 64 * 10
    assert [x - once for x in flash] == [64 * 32 * 28, 64 * 16 * 28, 64 * 8 * 28]
    sparse = {row["density"]: row for row in rows if row["algorithm"] == "5: block-sparse"}
    assert int(sparse["0.125"]["accesses"]) - once == (int(sparse["1.0"]["accesses"]) - once) / 8
    assert all(float(row["error"]) <= float(row["budget"]) for row in rows)
    assert_figure(tmp_path / "io.png", 3)
