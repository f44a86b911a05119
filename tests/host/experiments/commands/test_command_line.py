"""The command line: help, options and files that cannot be used, packages that are missing."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from command_runs import run

from experiments import __main__ as main_module
from experiments import cli


def test_help_lists_every_command(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert run(capsys)[1] == out
    alone = {(name,): command for name, command in cli.cli.commands.items() if name != "paper"}
    group = cli.cli.commands["paper"].commands
    for path, command in (alone | {("paper", name): x for name, x in group.items()}).items():
        assert f"\n  {path[-1]} " in (run(capsys, "paper", "--help")[1] if path[1:] else out)
        status, text, _ = run(capsys, *path, "--help")
        assert status == 0
        assert all(option.help for option in command.params)
        assert "--out" in text
    assert set(cli.cli.commands) == {
        *("sparsity", "seqlen", "io", "masks", "cpu", "simt", "decode", "features", "peers"),
        *("tune", "tune-decode", "train", "selection", "paper", "cluster", "distributed", "calls"),
    }


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
    "cluster --key-cost nan": "nan is not a number",
    "cluster --key-cost inf": "inf is not in the range 0<=x<inf",
    "sparsity --seconds nan": "nan is not a number",
    "cluster --mask ring": "expected one of dense, causal, documents, window, butterfly",
    "distributed --device cpu --processes 2 --mask ring": "expected one of dense, causal",
    "distributed --device cuda --processes 2": "--processes is for the CPU",
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
