"""The Hopper pass over columns: no serialised wgmma, no sums in the order of arrival, no spills."""

import re
from dataclasses import replace

import pytest
from assembly import label
from compiled import compile_ptx, report_of

from nbflash.backends.sm90.backward.config import columns_configs
from nbflash.backends.sm90.backward.host import rows_config
from nbflash.backends.sm90.backward.kernel import bwd_sm90_spec
from nbflash.backends.sm90.backward.row_statistics import statistics_sm90_spec

CAPABILITY = (9, 0)
CONFIGS = [
    config
    for dtype, head_dims in (("bfloat16", (64, 128, 192, 256)), ("float16", (40, 96, 136)))
    for head_dim in head_dims
    for config in columns_configs(dtype, head_dim)
]
CONFIGS += [replace(config, full_tiles=True) for config in CONFIGS]
# Bytes that a thread stores where tiles of 64 keys are masked, above 64 columns.
NARROW_SPILLS = 12


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_kernel(config):
    ptx = compile_ptx(bwd_sm90_spec(config), CAPABILITY)
    report = report_of(ptx, "sm_90a")
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", report)))
    narrow = config.tile_n == 64 < config.head_dim <= 128 and not config.full_tiles
    assert spilled <= (NARROW_SPILLS if narrow else 0)
    # C7510 to C7520: ptxas waits for every single wgmma, or ignores setmaxnreg.
    assert re.findall(r"C75\d\d", report) == []
    assert ptx.count("setmaxnreg.") == 2
    assert ".f64" not in ptx
    assert not re.search(r"cp\.reduce|\bred\.|\batom\.", ptx)
    kind = {"float16": "f16", "bfloat16": "bf16"}[config.dtype]
    products = rf"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.{kind}"
    widths = [int(n) for n in re.findall(products, ptx)]
    # S of the stream's first tile, of a column's next one and of the next column's, and dP of the
    # column's first and next; or both of two where roles are shared. dV and dK of a column's last
    # tile and of the others.
    scores = (4 if config.split else 5) * -(-config.head_dim // 16)
    gradients = (2 if config.split else 4) * config.tile_m // 16
    assert sorted(widths) == sorted([config.tile_m] * scores + [config.head_dim] * gradients)
    assert config.smem_bytes * config.min_blocks <= 227 * 1024


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_statistics(config):
    report = report_of(compile_ptx(statistics_sm90_spec(rows_config(config)), CAPABILITY), "sm_90a")
    assert " 0 bytes stack frame, 0 bytes spill stores" in report
