"""The mma kernels for every architecture that runs them: spills, blocks, shared memory, forms.

The configurations are those that the tables choose for the shared memory of each. Where 255
registers are not quite enough, ``SPILLS`` bounds the bytes that a thread stores instead.
"""

from dataclasses import dataclass, replace

import pytest
from assembly import assemble
from compiled import compile_ptx

from nbflash.backends.sm80.backward import bwd_sm80_spec
from nbflash.backends.sm80.config import backward_configs, forward_configs
from nbflash.backends.sm80.forward import fwd_sm80_spec
from nbflash.backends.sm80.row_kernels import (
    RowConfig,
    convert_dq_sm80_spec,
    statistics_sm80_spec,
)

# Compute capability and bytes of shared memory that a block may have.
ARCHITECTURES = {
    "sm_80": ((8, 0), 163 * 1024),
    "sm_86": ((8, 6), 99 * 1024),
    "sm_89": ((8, 9), 99 * 1024),
    "sm_90a": ((9, 0), 227 * 1024),
    "sm_100a": ((10, 0), 227 * 1024),
    "sm_120a": ((12, 0), 99 * 1024),
}
PER_MULTIPROCESSOR = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90a": 228, "sm_100a": 228}
PER_MULTIPROCESSOR["sm_120a"] = 100
REGISTER_FILE = 65536
KERNELS = "fwd", "atomic", "rows", "columns", "dv"
# Bytes by architecture, head_dim, kernel, whether all tiles are full: what NVVM 13.4 gives.
SPILLS = {
    ("sm_80", 64, "atomic", False): 12,
    ("sm_80", 192, "atomic", True): 8,
    ("sm_80", 256, "atomic", False): 12,
    ("sm_86", 64, "atomic", False): 8,
    ("sm_86", 128, "atomic", True): 152,
    ("sm_89", 128, "atomic", True): 152,
    ("sm_90a", 256, "atomic", False): 132,  # and 7 % faster than tiles of 32 queries without
    ("sm_90a", 128, "fwd", False): 8,
    ("sm_90a", 128, "fwd", True): 4,
    ("sm_100a", 128, "fwd", False): 8,
    ("sm_100a", 128, "fwd", True): 4,
    ("sm_100a", 128, "atomic", True): 8,
    ("sm_120a", 128, "atomic", True): 8,
    ("sm_80", 64, "atomic", True, "small"): 8,
    ("sm_120a", 128, "atomic", True, "small"): 60,
    ("sm_90a", 128, "columns", True, "small"): 16,
}


@dataclass(frozen=True)
class Target:
    """One kernel of one problem on one architecture."""

    arch: str
    dtype: str
    head_dim: int
    kernel: str
    full_tiles: bool
    small: bool = False  # tiles of 64 × 64

    def __str__(self):
        tiles = "-full" * self.full_tiles + "-small" * self.small
        return f"{self.arch}-{self.dtype}-d{self.head_dim}-{self.kernel}{tiles}"

    @property
    def config(self):
        """Of the table; None if there is no such kernel."""
        capability, limit = ARCHITECTURES[self.arch]
        if self.kernel == "fwd":
            found = [forward_configs(self.dtype, self.head_dim, smem_limit=limit)[self.small]]
        else:
            found = backward_configs(
                self.dtype,
                self.head_dim,
                smem_limit=limit,
                deterministic=self.kernel in ("rows", "columns"),
                vector_red=capability >= (9, 0),
            )[self.small]
            found = [c for c in found if self.kernel in (c.walk, c.sums, "atomic" * c.atomic_dq)]
        return replace(found[-1], full_tiles=self.full_tiles) if found else None

    @property
    def spec(self):
        return (fwd_sm80_spec if self.kernel == "fwd" else bwd_sm80_spec)(self.config)


# Every architecture once, every head_dim of the tables on what has most shared memory and least.
PROBLEMS = [
    *((arch, "bfloat16", 128) for arch in ARCHITECTURES),
    *((arch, "bfloat16", head_dim) for arch in ("sm_80", "sm_86") for head_dim in (64, 256)),
    ("sm_90a", "bfloat16", 256),
    *(("sm_86", "float16", 72), ("sm_80", "float16", 192)),
]
SMALL = [(*problem, True) for problem in PROBLEMS if problem[2] in (64, 128)]
SMALL += [("sm_80", "bfloat16", 128, False)]
TARGETS = [
    target
    for kernel in KERNELS
    for full_tiles in (False, True)
    for problem in PROBLEMS
    if (target := Target(*problem, kernel, full_tiles)).config
]
TARGETS += [
    target
    for kernel in KERNELS
    for *problem, full_tiles in SMALL
    if (target := Target(*problem, kernel, full_tiles, small=True)).config
]


def compiled(spec, arch):
    return assemble(compile_ptx(spec, ARCHITECTURES[arch][0]), arch)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_kernel(target):
    spec, config = target.spec, target.config
    report = compiled(spec, target.arch)
    problem = target.arch, target.head_dim, target.kernel, target.full_tiles
    allowed = SPILLS.get((*problem, "small") if target.small else problem, 0)
    assert report.spill_stores <= allowed
    if not allowed:
        assert (report.spill_loads, report.stack) == (0, 0)
    assert ".local" not in report.ptx
    assert ".f64" not in report.ptx
    threads, min_blocks = spec.launch_bounds
    assert report.registers * threads * min_blocks <= REGISTER_FILE
    reserved = 1024
    room = 1024 * PER_MULTIPROCESSOR[target.arch]
    assert min_blocks * (config.smem_bytes + reserved) <= room
    kind = {"float16": "f16", "bfloat16": "bf16"}[target.dtype]
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32" in report.ptx
    for text in ("ldmatrix.sync.aligned.m8n8.x4.shared", "cp.async.cg.shared.global"):
        assert text in report.ptx
    assert ("bar.red.or" in report.ptx) == (not target.full_tiles)
    assert ("red.relaxed.gpu" in report.ptx) == (target.kernel == "atomic")
    vector = target.kernel == "atomic" and ARCHITECTURES[target.arch][0] >= (9, 0)
    assert ("add.v4.f32" in report.ptx) == vector


@pytest.mark.parametrize("kernel", ["fwd", "atomic", "rows"])
def test_dropout(kernel):
    """Philox is there where it is asked for, by its multiplier."""
    target = Target("sm_90a", "bfloat16", 64, kernel, False)
    make = fwd_sm80_spec if kernel == "fwd" else bwd_sm80_spec
    report = compiled(make(replace(target.config, dropout=True)), "sm_90a")
    assert report.spill_stores <= {"atomic": 124}.get(kernel, 0)
    multiplier = str(0xD2511F53)
    assert multiplier in report.ptx
    assert multiplier not in compile_ptx(target.spec, (9, 0))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize(
    "make", [statistics_sm80_spec, convert_dq_sm80_spec], ids=["statistics", "convert"]
)
def test_row_kernel(make, arch):
    report = compiled(make(RowConfig("bfloat16", 72, 96, arch != "sm_80")), arch)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.registers <= 64
    assert ".f64" not in report.ptx
