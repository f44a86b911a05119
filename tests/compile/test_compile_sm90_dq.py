"""The pass for dQ on Hopper: no serialised wgmma, no spills, the instructions it is made of."""

import re
from dataclasses import replace

import pytest
from assembly import label
from compiled import compile_ptx, report_of

from nbflash.backends.sm90.backward.dq_config import dq_configs
from nbflash.backends.sm90.backward.dq_kernel import bwd_sm90_dq_spec

CAPABILITY = (9, 0)
CONFIGS = [
    config
    for dtype, head_dim in (
        ("bfloat16", 64),
        ("bfloat16", 128),
        ("bfloat16", 192),
        ("bfloat16", 256),
        ("float16", 40),
        ("float16", 96),
        ("float16", 256),
    )
    for config in dq_configs(dtype, head_dim)
]
CONFIGS += [replace(config, full_tiles=True) for config in CONFIGS]


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_kernel(config):
    ptx = compile_ptx(bwd_sm90_dq_spec(config), CAPABILITY)
    report = report_of(ptx, "sm_90a")
    assert " 0 bytes stack frame, 0 bytes spill stores" in report
    # C7510 to C7520: ptxas waits for every single wgmma, or ignores setmaxnreg.
    assert re.findall(r"C75\d\d", report) == []
    assert ptx.count("setmaxnreg.") == 2
    assert ".f64" not in ptx
    kind = {"float16": "f16", "bfloat16": "bf16"}[config.dtype]
    scores = rf"wgmma\.mma_async\.sync\.aligned\.m64n{config.tile_n}k16\.f32\.{kind}"
    # S of the stream's first tile and of every next one, and dP.
    assert len(re.findall(scores, ptx)) >= 3 * -(-config.head_dim // 16)
    assert "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group" in ptx
    assert "stmatrix.sync.aligned.m8n8.x4.shared.b16" in ptx
    assert not re.search(r"\b(red|atom)\.", ptx)
    for i in range(5):
        parameter = f"nbflash_bwd_sm90_dq_param_{i}"
        assert f".param .align 64 .b8 {parameter}[128]" in ptx
        assert not re.search(rf"ld\.param\S*\s+\S+ \[{parameter}\]", ptx)
    assert config.smem_bytes * config.min_blocks <= 227 * 1024
