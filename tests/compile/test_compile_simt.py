"""The SIMT kernels for three architectures: no spills, no stack, no float64 by accident.

The configurations are those that the tables choose for the shared memory of each
architecture. Where 255 registers are not quite enough, ``SPILLS`` bounds the bytes that a
thread stores instead. At head_dim 64 and 128, with vectors of four bytes an element or less,
that is only a kernel that no device runs: the one without ``cp.async`` for sm_80.
"""

from dataclasses import dataclass, replace

import pytest
from assembly import CAPABILITIES, AssemblyError, assemble
from compiled import compile_ptx

from nbflash.backends.simt.backward import bwd_simt_spec
from nbflash.backends.simt.configs import backward_configs, forward_config
from nbflash.backends.simt.convert_dq import convert_dq_simt_spec
from nbflash.backends.simt.forward import fwd_simt_spec
from nbflash.backends.simt.row_statistics import RowConfig, delta_simt_spec

SHARED_MEMORY = {
    "sm_75": 64 * 1024,
    "sm_80": 163 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100a": 227 * 1024,
}
CAPABILITY = {"sm_75": (7, 5), **CAPABILITIES}
REGISTER_FILE = 65536
# fwd sends V by cp.async where it can; fill never does.
KERNELS = ("fwd", "rows", "columns", "atomic")

# (architecture, dtype, head_dim, vectors). Every architecture at the head dims of the tables'
# measured rows; other dtypes, odd head dims and scalar loads where they differ most.
PROBLEMS = (
    *((arch, "float32", head_dim, True) for head_dim in (64, 128) for arch in CAPABILITIES),
    ("sm_80", "float16", 64, True),
    ("sm_80", "bfloat16", 128, True),
    ("sm_90a", "bfloat16", 64, True),
    ("sm_90a", "float16", 128, True),
    ("sm_90a", "float32", 5, False),
    ("sm_90a", "float32", 256, True),
    ("sm_80", "float16", 100, False),
    ("sm_90a", "float64", 64, True),
)
# Bytes by architecture, dtype and head_dim: what NVVM 13.4 gives, rounded up to 32 or 16.
SPILLS = {
    ("sm_80", "float32", 128): {"fill": 128},
    ("sm_90a", "float32", 5): {"rows": 64, "columns": 32, "atomic": 128},
    ("sm_90a", "float32", 256): {"rows": 64, "columns": 128, "atomic": 192},
    ("sm_90a", "float64", 64): {"rows": 32, "columns": 64, "atomic": 112},
}
DROPOUT_SPILLS = {("fwd", 128): 32, ("rows", 128): 32, ("columns", 128): 64, ("atomic", 128): 64}


@dataclass(frozen=True)
class Target:
    """One kernel of one problem on one architecture."""

    arch: str
    dtype: str
    head_dim: int
    vectors: bool
    kernel: str

    def __str__(self):
        loads = "" if self.vectors else "-scalar"
        return f"{self.arch}-{self.dtype}-d{self.head_dim}{loads}-{self.kernel}"

    @property
    def spec(self):
        limits = {"vectors": self.vectors, "smem_limit": SHARED_MEMORY[self.arch]}
        if self.kernel in ("fwd", "fill"):
            cp_async = self.kernel == "fwd"
            return fwd_simt_spec(
                forward_config(self.dtype, self.head_dim, cp_async=cp_async, **limits)
            )
        configs = backward_configs(
            self.dtype,
            self.head_dim,
            deterministic=self.kernel != "atomic",
            vector_red=CAPABILITY[self.arch] >= (9, 0),
            **limits,
        )
        return bwd_simt_spec(next(c for c in configs if self.kernel in (c.walk, "atomic")))


TARGETS = [Target(*problem, kernel) for kernel in KERNELS for problem in PROBLEMS]
TARGETS += [
    Target(arch, "float32", head_dim, True, "fill")
    for head_dim in (64, 128)
    for arch in CAPABILITIES
]


def compiled(spec, arch):
    return assemble(compile_ptx(spec, CAPABILITY[arch]), arch)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_attention_kernel(target):
    spec = target.spec
    report = compiled(spec, target.arch)
    problem = target.arch, target.dtype, target.head_dim
    allowed = SPILLS.get(problem, {}).get(target.kernel, 0)
    assert report.spill_stores <= allowed
    if not allowed:
        assert (report.spill_loads, report.stack) == (0, 0)
    assert ".local" not in report.ptx
    if target.dtype != "float64":
        assert ".f64" not in report.ptx
    threads, min_blocks = spec.launch_bounds
    assert report.registers * threads * min_blocks <= REGISTER_FILE
    assert report.static_smem <= 1024
    assert f".entry {spec.name}" in report.ptx
    assert ("cp.async" in report.ptx) == spec.config.send_v
    # A copy of such a barrier would stand in a branch that not every thread of a warp takes.
    assert report.ptx.count("bar.red.or") == (1 if target.kernel in ("fwd", "fill") else 3)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout(kernel, head_dim):
    """Philox is there where it is asked for, by its multiplier."""
    spec = Target("sm_90a", "float32", head_dim, True, kernel).spec
    make = fwd_simt_spec if kernel == "fwd" else bwd_simt_spec
    report = compiled(make(replace(spec.config, dropout=True)), "sm_90a")
    assert report.spill_stores <= DROPOUT_SPILLS.get((kernel, head_dim), 0)
    assert ".local" not in report.ptx
    multiplier = str(0xD2511F53)
    assert multiplier in report.ptx
    assert multiplier not in compile_ptx(spec, CAPABILITY["sm_90a"])


@pytest.mark.parametrize("kernel", ["fill", "atomic"])
def test_devices_without_cp_async(kernel):
    """Nothing that these kernels use is newer than compute capability 7.5."""
    target = Target("sm_75", "float32", 64, True, kernel)
    report = compiled(target.spec, "sm_75")
    assert (report.spill_stores, report.stack) == (0, 0)


def test_sending_needs_a_device_with_cp_async():
    with pytest.raises(AssemblyError, match=r"cp.async' requires .target sm_80"):
        compiled(Target("sm_75", "float32", 64, True, "fwd").spec, "sm_75")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("make", [delta_simt_spec, convert_dq_simt_spec], ids=["delta", "convert"])
@pytest.mark.parametrize("arch", CAPABILITIES)
def test_row_kernel(arch, make, dtype):
    report = compiled(make(RowConfig(dtype, 72)), arch)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.registers <= 64
    assert ".f64" not in report.ptx or dtype == "float64"


INSTRUCTIONS = {
    "fwd": (
        "ex2.approx.ftz.f32",
        "shfl.sync.bfly.b32",
        "ld.shared.v4.f32",
        "fma.rn.f32",
        "cp.async.cg.shared.global",
        "cp.async.wait_all",
    ),
    "fill": ("ld.global.v4.f32", "st.shared.v4.f32", "bar.warp"),
    "atomic": ("ex2.approx.ftz.f32", "red.relaxed.gpu", "ld.shared.v4.f32", "fma.rn.f32"),
}


@pytest.mark.parametrize(("kernel", "expected"), INSTRUCTIONS.items(), ids=INSTRUCTIONS)
def test_instructions_that_the_speed_rests_on(kernel, expected):
    ptx = compile_ptx(Target("sm_90a", "float32", 64, True, kernel).spec, (9, 0))
    assert [text for text in expected if text not in ptx] == []


def test_tables_fit_every_head_dim():
    """Every head dim fits the 99 KB that a block has on consumer GPUs."""
    for dtype in ("float16", "bfloat16", "float32"):
        for head_dim in range(1, 257):
            limits = {"vectors": False, "smem_limit": 99 * 1024}
            assert forward_config(dtype, head_dim, **limits), (dtype, head_dim)
