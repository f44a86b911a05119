"""The Hopper backward: no serialised wgmma, bounded spills, the instructions it is made of."""

import re
from dataclasses import replace

import pytest
from assembly import label
from compiled import compile_ptx, report_of

from nbflash.backends.sm90.backward.config import backward_configs
from nbflash.backends.sm90.backward.convert_dq import convert_dq_sm90_spec
from nbflash.backends.sm90.backward.host import rows_config
from nbflash.backends.sm90.backward.kernel import bwd_sm90_spec
from nbflash.backends.sm90.backward.row_statistics import statistics_sm90_spec

CAPABILITY = (9, 0)
SHIPPED = [
    config
    for dtype, head_dim in (("bfloat16", 64), ("bfloat16", 128), ("float16", 40), ("float16", 96))
    for config in backward_configs(dtype, head_dim)
]
CONFIGS = [*SHIPPED, *(replace(config, full_tiles=True) for config in SHIPPED)]
CONFIGS += [replace(config, full_tiles=True, edge=True) for config in SHIPPED[:3]]
# Bytes that a loading thread stores for want of a register where tiles are masked, up to 64 columns
# and above, where it has 24: what ptxas 13.5 gives.
NARROW_SPILLS, WIDE_SPILLS = 4, 68


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_kernel(config):
    ptx = compile_ptx(bwd_sm90_spec(config), CAPABILITY)
    report = report_of(ptx, "sm_90a")
    (stores,) = re.findall(r"(\d+) bytes spill stores", report)
    masked = WIDE_SPILLS if config.head_dim > 64 else NARROW_SPILLS
    assert int(stores) <= (0 if config.full_tiles else masked)
    # C7510 to C7520: ptxas waits for every single wgmma, or ignores setmaxnreg.
    assert re.findall(r"C75\d\d", report) == []
    assert ptx.count("setmaxnreg.") == 2
    assert ".f64" not in ptx
    kind = {"float16": "f16", "bfloat16": "bf16"}[config.dtype]
    steps = -(-config.head_dim // 16)
    scores = rf"wgmma\.mma_async\.sync\.aligned\.m64n{config.tile_m}k16\.f32\.{kind}"
    # S of the stream's first tile and of every next one, and dP.
    assert len(re.findall(scores, ptx)) >= 3 * steps
    assert "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32" in ptx
    assert "stmatrix.sync.aligned.m8n8.x4.shared.b16" in ptx
    for i in range(4):
        parameter = f"nbflash_bwd_sm90_param_{i}"
        assert f".param .align 64 .b8 {parameter}[128]" in ptx
        assert not re.search(rf"ld\.param\S*\s+\S+ \[{parameter}\]", ptx)
    assert config.smem_bytes * config.min_blocks <= 227 * 1024


@pytest.mark.parametrize("make", [statistics_sm90_spec, convert_dq_sm90_spec])
@pytest.mark.parametrize("config", SHIPPED, ids=label)
def test_kernels_of_the_rows(config, make):
    report = report_of(compile_ptx(make(rows_config(config)), CAPABILITY), "sm_90a")
    assert " 0 bytes stack frame, 0 bytes spill stores" in report
