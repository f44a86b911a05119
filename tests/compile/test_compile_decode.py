"""The kernels of decode for three architectures: spills, stack, no float64 by accident."""

from dataclasses import replace

import pytest
from assembly import CAPABILITIES, assemble
from compiled import compile_ptx
from score_cases import code_of, scores_for

from nbflash.backends.simt.decode import decode_simt_spec
from nbflash.backends.simt.decode_configs import decode_config
from nbflash.backends.split_kv.combine import combine_config, combine_simt_spec

REGISTER_FILE = 65536
# Bytes for sm_80, by the rows of a block: linked, its code takes 50 registers more than alone.
SPILLS = {2: 32, 4: 160, 6: 384, 8: 768}
SMALLEST_SHARED_MEMORY = 48 * 1024


def compiled(spec, arch):
    return assemble(compile_ptx(spec, CAPABILITIES[arch]), arch)


def assert_in_registers(report, dtype, spills=0):
    assert report.spill_stores <= spills
    if not spills:
        assert (report.spill_loads, report.stack) == (0, 0)
    assert ".local" not in report.ptx
    assert ".f64" not in report.ptx or dtype == "float64"


@pytest.mark.parametrize("arch", CAPABILITIES)
@pytest.mark.parametrize(("head_dim", "splits"), [(5, 1), (128, 3), (256, 64)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_combine(arch, dtype, head_dim, splits):
    assert_in_registers(
        compiled(combine_simt_spec(combine_config(dtype, head_dim, splits)), arch), dtype
    )


# (dtypes of q and the cache, head_dim, tokens, group, masked, vectors): one row, a group, a tree.
PARTIALS = (
    ("float16", "float16", 128, 1, 1, False, True),
    ("bfloat16", "bfloat16", 128, 1, 4, False, True),
    ("bfloat16", "bfloat16", 64, 1, 8, True, True),
    ("float16", "int8", 128, 1, 4, False, True),
    ("bfloat16", "int8", 128, 9, 8, True, True),
    ("bfloat16", "float8_e4m3fn", 128, 1, 8, False, True),
    ("float16", "float8_e4m3fn", 64, 1, 4, True, True),
    ("float32", "float32", 128, 1, 4, True, True),
    ("float32", "float32", 256, 5, 8, True, True),
    ("float32", "int8", 256, 1, 8, False, True),
    ("float32", "float32", 5, 3, 2, False, False),
    ("bfloat16", "bfloat16", 100, 3, 2, True, False),
    ("float64", "float64", 128, 1, 4, True, True),
    ("float64", "int8", 256, 3, 1, True, True),
)


def partial_name(problem):
    dtype, cache, head_dim, nq, group, masked, vectors = problem
    words = f"{dtype}-{cache}-d{head_dim}-{nq}x{group}"
    return words + "-masked" * masked + "-scalar" * (not vectors)


@pytest.mark.parametrize("arch", CAPABILITIES)
@pytest.mark.parametrize("problem", PARTIALS, ids=partial_name)
def test_partial(arch, problem):
    dtype, cache, head_dim, nq, group, masked, vectors = problem
    how = {"nq": nq, "group": group, "masked": masked, "vectors": vectors}
    spec = decode_simt_spec(decode_config(dtype, cache, head_dim, **how))
    report = compiled(spec, arch)
    spills = SPILLS.get(spec.config.rows, 0) if arch == "sm_80" else 0
    assert_in_registers(report, dtype, spills)
    threads, min_blocks = spec.launch_bounds
    assert report.registers * threads * min_blocks <= REGISTER_FILE
    assert spec.config.smem_bytes <= SMALLEST_SHARED_MEMORY


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (64, 8)])
@pytest.mark.parametrize("name", ["alibi", "bias", "custom"])
def test_scores(name, head_dim, group, masked):
    how = {"nq": 1, "group": group, "masked": masked, "vectors": True}
    config = decode_config("float16", "float16", head_dim, **how)
    code = code_of(scores_for(100, 100)[name], "float16")
    report = compiled(decode_simt_spec(replace(config, score=code)), "sm_90a")
    assert_in_registers(report, "float64" if name == "custom" else "float16")
