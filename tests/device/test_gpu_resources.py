"""What a long-running process keeps: memory, plans, kernels; and what a new process finds."""

import json
import os
import subprocess
import sys
import time

import cupy
import numpy as np
import pytest
from device_runs import by_mode, count_from, gallery, make_qkv, run

import nbflash
from nbflash.cuda import launch
from nbflash.planning import cache

CALLS = count_from("NBFLASH_CALLS", 1000)


@by_mode
def test_a_thousand_calls_keep_nothing(deterministic):
    inputs, mask = make_qkv(1, 300, 300, 4, 2, 64, "float16"), gallery(300, 300)["causal"]
    pool = cupy.get_default_memory_pool()

    def state():
        free, _ = cupy.cuda.runtime.memGetInfo()
        return pool.used_bytes(), pool.total_bytes(), free, len(cache.plans)

    for _ in range(3):
        run(inputs, mask, deterministic=deterministic)
    cupy.cuda.Device().synchronize()
    before = state()
    for _ in range(CALLS):
        run(inputs, mask, deterministic=deterministic)
    cupy.cuda.Device().synchronize()
    assert state() == before


def test_plans_are_bounded_and_give_their_memory_back():
    inputs = make_qkv(1, 64, 64, 1, 1, 64, "float32")
    limit = cache.LIMIT

    def sweep():
        for i in range(2 * limit):
            nbflash.attention(*inputs[:3], window=(i % limit, i // limit), impl="simt")
        cupy.cuda.Device().synchronize()
        return cupy.cuda.runtime.memGetInfo()[0]

    sweep()
    before = sweep()
    assert len(cache.plans) <= limit
    assert sweep() == before


def test_kernels_are_loaded_once_per_configuration():
    """Shapes, strides, masks, scales and group sizes share kernels; dtypes and alignment do not."""
    mask = gallery(100, 90)["causal"]
    run(make_qkv(1, 90, 90, 1, 1, 64, "float32"))
    loaded = launch.load.cache_info().currsize
    run(make_qkv(2, 100, 90, 4, 2, 64, "float32"), mask, scale=-0.1)
    run([cupy.repeat(x, 2, axis=1)[:, ::2] for x in make_qkv(1, 90, 90, 3, 1, 64, "float32")])
    assert launch.load.cache_info().currsize == loaded
    unaligned = cupy.zeros((1, 90, 1, 65), np.float32)[..., 1:]
    run([unaligned] * 4)
    run(make_qkv(1, 90, 90, 1, 1, 64, "float16"))
    assert launch.load.cache_info().currsize > loaded


FIRST_CALL = """
import importlib, json, time
import cupy, nbflash
importlib.import_module("nbflash.backends.simt.executor")
q, k, v, dout = (cupy.ones((1, 256, 2, 64), cupy.float32) for _ in range(4))
cupy.cuda.Device().synchronize()
start = time.perf_counter()
out, lse = nbflash.attention(q, k, v, return_lse=True, impl="simt")
nbflash.attention_backward(dout, q, k, v, out, lse, impl="simt")
cupy.cuda.Device().synchronize()
print(json.dumps([time.perf_counter() - start, float(out.sum()), float(lse.sum())]))
"""


def started(folder):
    environment = {**os.environ, "NBFLASH_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", FIRST_CALL], env=environment, stdout=subprocess.PIPE, text=True
    )


def finished(process):
    """(seconds, sum of out, sum of lse) of a process that :func:`started`."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """A cache folder, and what the process that filled it had to say."""
    folder = tmp_path_factory.mktemp("cubins")
    return folder, finished(started(folder))


def written(folder):
    """When each file of a cache was written, by its place."""
    files = [f for f in folder.rglob("*") if f.is_file()]
    return {str(f.relative_to(folder)): f.stat().st_mtime_ns for f in files}


def test_a_second_process_compiles_nothing(cold):
    folder, (compiling, *results) = cold
    files = written(folder)
    assert files
    loading, *again = finished(started(folder))
    assert written(folder) == files
    assert again == results
    assert loading < compiling / 4


def test_processes_that_start_together_and_find_damaged_files(cold, tmp_path):
    folder, (_, *results) = cold
    for i, name in enumerate(sorted(written(folder))):
        data, file = (folder / name).read_bytes(), tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((b"", data[: len(data) // 2], data[:-1] + bytes([data[-1] ^ 1]))[i % 3])
    together = [started(tmp_path) for _ in range(3)]
    assert [finished(p)[1:] for p in together] == [results] * 3
    assert written(tmp_path).keys() == written(folder).keys()


def test_a_warm_call_does_not_wait_for_the_device():
    """Calls return while the device is still busy with what was launched before them."""
    inputs = make_qkv(4, 4096, 4096, 16, 16, 64, "float32")
    for _ in range(2):  # the second time, kernels and memory are there
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        results = [nbflash.attention(*inputs[:3], impl="simt") for _ in range(5)]
        returned = time.perf_counter() - start
        cupy.cuda.Device().synchronize()
        done = time.perf_counter() - start
        assert len(results) == 5
        del results
    assert returned < done / 4
