"""What Nsight Compute prints, and what it fails with."""

import subprocess

import pytest

from experiments.harness import ncu

PRINTED = """==PROF== Connected to process 1
==PROF== Disconnected from process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","fwd","dram__bytes_read.sum","byte","1,024"
"0","fwd","dram__bytes_write.sum","byte","512"
"1","bwd","dram__bytes_read.sum","byte","64"
"1","bwd","sm__cycles.sum","cycle","7"
"""


def test_sum_over_kernels_and_metrics():
    assert ncu.parse(PRINTED) == 1024 + 512 + 64


def test_no_kernel():
    with pytest.raises(RuntimeError, match="ncu reported no kernel"):
        ncu.parse("==PROF== Connected")


def test_a_refusal_is_named(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "==ERROR== ERR_NVGPUCTRPERM: no permission\n", "")
    monkeypatch.setattr("subprocess.run", lambda *args, **options: failed)
    with pytest.raises(RuntimeError, match="ERR_NVGPUCTRPERM"):
        ncu.dram_bytes(["python"])


def test_not_installed(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert ncu.why_not() == "ncu is not installed"
