"""The readings of the compile tier, on kernels that spill, use the stack or do not assemble."""

import pytest
from assembly import CAPABILITIES, AssemblyError, assemble
from numba import cuda
from numba.cuda.types import Array, float32, int32, void

VECTOR = Array(float32, 1, "C")
MATRIX = Array(float32, 2, "C")
NARROW = 150


def copy(x, out):
    out[cuda.threadIdx.x] = x[cuda.threadIdx.x]


def indexed_at_run_time(x, out, i):
    a = cuda.local.array(256, float32)
    for j in range(256):
        a[j] = x[j]
    out[cuda.threadIdx.x] = a[i]


def in_shared_memory(x, out):
    s = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    s[t] = x[t]
    cuda.syncthreads()
    out[t] = s[255 - t]


def promoted(x, out):
    out[cuda.threadIdx.x] = x[cuda.threadIdx.x] * 0.5 + 1 / 3


def with_many_live_values(count):
    """``count`` values that stay live over a loop of run-time length."""
    lines = ["def kernel(x, out, n):", "    t = cuda.threadIdx.x"]
    lines += [f"    a{i} = x[t, {i}]" for i in range(count)]
    lines += ["    for j in range(n):", "        s = x[j, t]"]
    lines += [f"        a{i} = a{i} * s + a{(i + 7) % count}" for i in range(count)]
    lines += [f"    out[t, {i}] = a{i}" for i in range(count)]
    namespace = {"cuda": cuda}
    exec("\n".join(lines), namespace)
    return namespace["kernel"]


def report(kernel, *argtypes, arch="sm_90a", threads=128):
    major, minor = CAPABILITIES[arch]
    cc = (major, minor, "a") if arch.endswith("a") else (major, minor)
    ptx, _ = cuda.compile_ptx(kernel, void(*argtypes), cc=cc, launch_bounds=threads)
    return assemble(ptx, arch)


@pytest.mark.parametrize("arch", CAPABILITIES)
def test_plain_kernel(arch):
    r = report(copy, VECTOR, VECTOR, arch=arch)
    assert 0 < r.registers <= 32
    assert (r.spill_stores, r.spill_loads, r.stack) == (0, 0, 0)
    assert f".target {arch}" in r.ptx


def test_stack_without_a_spill():
    r = report(indexed_at_run_time, VECTOR, VECTOR, int32)
    assert r.stack >= 256 * 4
    assert (r.spill_stores, r.spill_loads) == (0, 0)
    assert ".local" in r.ptx


def test_spills_appear_when_launch_bounds_take_the_registers():
    kernel = with_many_live_values(NARROW)
    wide = report(kernel, MATRIX, MATRIX, int32, threads=128)
    assert wide.registers > NARROW
    assert (wide.spill_stores, wide.spill_loads) == (0, 0)
    narrow = report(kernel, MATRIX, MATRIX, int32, threads=1024)
    assert narrow.registers <= 65536 // 1024
    assert min(narrow.spill_stores, narrow.spill_loads) > 0


def test_static_shared_memory():
    empty, full = (report(k, VECTOR, VECTOR).static_smem for k in (copy, in_shared_memory))
    assert full - empty in (256 * 4, 256 * 4 + 1024)


def test_silent_promotion_shows_in_the_ptx():
    assert ".f64" in report(promoted, VECTOR, VECTOR).ptx
    assert ".f64" not in report(copy, VECTOR, VECTOR).ptx


def test_rejected_ptx_raises_with_the_assemblers_log():
    ptx = report(copy, VECTOR, VECTOR, arch="sm_80").ptx
    with pytest.raises(AssemblyError, match="Not a name of any known instruction"):
        assemble(ptx.replace("ret;", "return;"), "sm_80")


def test_instruction_of_another_architecture_is_rejected():
    ptx = report(copy, VECTOR, VECTOR, arch="sm_90a").ptx
    fence = ptx.replace("ret;", "wgmma.fence.sync.aligned;\n\tret;", 1)
    assert assemble(fence, "sm_90a").registers > 0
    with pytest.raises(AssemblyError, match="wgmma"):
        assemble(fence.replace("sm_90a", "sm_100a"), "sm_100a")


def test_text_without_a_kernel():
    header = ".version 8.0\n.target sm_80\n.address_size 64\n"
    with pytest.raises(AssemblyError, match="no kernel in the log"):
        assemble(header, "sm_80")
