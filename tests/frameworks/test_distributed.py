"""Ranks of torch.distributed, of MPI and of Ray, in processes; the examples of all."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    # As in a container, on a machine with fewer cores than ranks.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def printed_by(*command):
    given = {"cwd": ROOT, "env": ENVIRONMENT, "capture_output": True, "text": True}
    result = subprocess.run([*map(str, command)], check=False, timeout=200, **given)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def mpiexec(ranks, program, *options):
    beside = str(Path(sys.executable).parent)
    mpi = shutil.which("mpiexec", path=os.pathsep.join([beside, os.environ["PATH"]]))
    return printed_by(mpi, "--oversubscribe", "-n", ranks, sys.executable, program, *options)


def test_torch_ranks_have_what_one_process_has(tmp_path):
    command = [sys.executable, HERE / "ranks_torch.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    all_ranks = [
        subprocess.Popen([*command, str(rank), tmp_path / "meeting"], env=ENVIRONMENT, **pipes)
        for rank in range(3)
    ]
    for process in all_ranks:
        printed, errors = process.communicate()
        assert printed == "equal\n", errors


def test_mpi_messages_notes_and_timeouts():
    printed = mpiexec(3, HERE / "ranks_mpi.py")
    assert printed.count("done\n") >= 1
    for rank in (0, 2):
        assert f"rank {rank} has waited 2.0 s for other ranks" in printed


def test_mpi_example():
    printed = mpiexec(4, ROOT / "examples" / "distributed_mpi.py", "--tokens", 1024)
    assert all(f"rank {rank}: balance" in printed for rank in range(4))


def test_torchrun_example_learns():
    run = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2
    options = "--tokens", 512, "--steps", 20
    printed = printed_by(*run, ROOT / "examples" / "distributed_torch.py", *options)
    first, last = (float(line.split()[-1]) for line in printed.splitlines())
    assert last < first < 0.6


def test_ray_example_learns():
    options = "--tokens", 512, "--steps", 20
    printed = printed_by(sys.executable, ROOT / "examples" / "distributed_ray.py", *options)
    losses = printed.splitlines()[-1].removeprefix("2 ranks: loss ").split()
    assert len(set(losses)) == 1  # of all tokens, on every rank
    assert len(losses) == 2
    assert float(losses[0]) < 0.3


def test_context_parallel_of_torch_beside_nbflash():
    """Gathered results of both are held to their budgets before a row is written."""
    chosen = "dense", "causal", "window"
    printed = printed_by(sys.executable, HERE / "ranks_context_parallel.py", *chosen)
    assert printed.count("torch-context-parallel-cudnn is left out") == 4  # a kernel of GPUs
    assert printed.count("is left out (window, 192): dense and causal alone") == 1
    *_, last = printed.splitlines()
    rows = json.loads(last)
    nbflash, peer = "nbflash", "torch-context-parallel-flash"
    assert [(row["tokens"], row["mask"], row["pass"], row["library"]) for row in rows] == [
        (tokens, mask, which, library)
        for tokens in (192, 128)
        for mask in chosen
        for which in ("forward", "backward")
        for library in ((nbflash, peer) if mask != "window" else (nbflash,))
    ]
    heads, head_dim, work = 4, 16, {"dense": 1.0, "causal": (128 + 1) / 2 / 128}
    for row in rows:
        assert 0 < row["error"] <= row["budget"]
        assert row["of_ideal"] == pytest.approx(row["alone_ms"] / 2 / row["median_ms"])
        if row["tokens"] == 128 and row["mask"] in work:
            rate = 4 * 128**2 * work[row["mask"]] * head_dim * heads / 2 / row["median_ms"] / 1e9
            times = 2.5 if row["pass"] == "backward" else 1
            assert row["tflops"] == pytest.approx(times * rate)
        assert (row["balance"] is None) == (row["library"] == peer)
