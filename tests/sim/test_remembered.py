"""Launches beside a planted fault: what is remembered, and what runs each time."""

from dataclasses import dataclass

import numpy as np
import pytest
import remembered

from nbflash.cuda import launch
from nbflash.cuda import simulator as sim
from nbflash.cuda.kernel_spec import KernelSpec
from nbflash.cuda.ptx._asm import cuda

RUNS = []


def make(cfg):
    def kernel(source, target, factor):
        if cuda.threadIdx.x == 0:
            RUNS.append(factor)
            target[0] = source[0] * factor

    return kernel


@dataclass(frozen=True)
class Config:
    threads: int = 32
    min_blocks: int = 1
    smem_bytes: int = 0


SPEC = KernelSpec("kernel", make, Config(), ())


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(remembered, "_known", {})
    RUNS.clear()


def launched(spec=SPEC, first=2.0, factor=3.0):
    source, target = np.array([first]), np.full(1, np.nan)
    launch.simulate(spec, 1, (source, target, factor))
    return target[0]


def test_the_same_launch_runs_once():
    with remembered.launches():
        assert [launched(), launched()] == [6, 6]
    assert len(RUNS) == 1
    assert launched() == 6  # outside nothing is remembered
    assert len(RUNS) == 2


def test_other_bytes_numbers_and_options_are_other_launches():
    with remembered.launches():
        assert [launched(), launched(first=5.0), launched(factor=2.0)] == [6, 15, 4]
        with sim.options(seed=1):
            assert launched() == 6
    assert len(RUNS) == 4


def test_a_kernel_with_a_fault_runs_each_time():
    """It is not what its module has."""

    def make(cfg):
        def kernel(source, target, factor):
            if cuda.threadIdx.x == 0:
                RUNS.append(factor)
                target[0] = source[0] + factor

        return kernel

    with remembered.launches():
        faulty = KernelSpec("kernel", make, SPEC.config, ())
        assert [launched(), launched(faulty), launched(faulty)] == [6, 5, 5]
    assert len(RUNS) == 3


def test_arrays_that_share_memory_run_each_time():
    both = np.zeros(2)
    with remembered.launches():
        for _ in range(2):
            both[:] = 2, 0
            launch.simulate(SPEC, 1, (both, both, 3.0))
    assert len(RUNS) == 2


def test_few_are_kept(monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 2)
    with remembered.launches():
        for first in (1.0, 2.0, 3.0, 1.0):
            assert launched(first=first) == 3 * first
    assert len(RUNS) == 4
