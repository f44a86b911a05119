"""The Hopper kernel: no spills, no stack, no serialised wgmma, the instructions it is made of."""

import re
from dataclasses import replace

import pytest
from assembly import label
from compiled import compile_ptx, report_of

from nbflash.backends.sm90.forward.config import forward_configs
from nbflash.backends.sm90.forward.kernel import fwd_sm90_spec
from nbflash.cuda import ptxas

CAPABILITY = (9, 0)
PROBLEMS = (
    ("bfloat16", 64, False),
    ("bfloat16", 128, False),
    ("bfloat16", 192, False),
    ("bfloat16", 256, False),
    ("float16", 72, True),
)
CONFIGS = [config for problem in PROBLEMS for config in forward_configs(*problem)]
CONFIGS += [replace(config, full_tiles=True) for config in CONFIGS if config.halves]


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_kernel(config):
    ptx = compile_ptx(fwd_sm90_spec(config), CAPABILITY)
    report = report_of(ptx, "sm_90a")
    assert " 0 bytes stack frame, 0 bytes spill stores" in report
    # C7510 to C7520: ptxas waits for every single wgmma, or ignores setmaxnreg.
    assert re.findall(r"C75\d\d", report) == []
    assert ptx.count("setmaxnreg.") == 2
    assert ".f64" not in ptx
    assert str(0xD2511F53) not in ptx  # nothing of dropout
    kind = {"float16": "f16", "bfloat16": "bf16"}[config.dtype]
    # Three kinds of tiles, or two; halves have two each, and the first half of the stream.
    kinds = 2 if config.full_tiles else 3
    width, products = config.tile_n, kinds
    if config.halves:
        width, products = config.tile_n // 2, 2 * kinds + 1
    qk = rf"wgmma\.mma_async\.sync\.aligned\.m64n{width}k16\.f32\.{kind}"
    assert len(re.findall(qk, ptx)) >= products * -(-config.head_dim // 16)
    for i in range(4):
        parameter = f"nbflash_fwd_sm90_param_{i}"
        assert f".param .align 64 .b8 {parameter}[128]" in ptx
        assert not re.search(rf"ld\.param\S*\s+\S+ \[{parameter}\]", ptx)
    assert config.smem_bytes * config.min_blocks <= 227 * 1024


def test_the_assembler_names_what_it_rejects():
    with pytest.raises(RuntimeError, match="ptxas failed"):
        ptxas.assemble(".version 8.0\n.target sm_90a\nnonsense", "sm_90a")
