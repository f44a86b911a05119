"""The kernel that merges two parts, for four architectures: no spills, no stack, vectors."""

import pytest
from assembly import CAPABILITIES, assemble
from compiled import compile_ptx

from nbflash.backends.merging.merge import MergeConfig, merge_spec

CAPABILITY = {"sm_75": (7, 5), **CAPABILITIES}
CONFIGS = {
    "bfloat16": MergeConfig("bfloat16", "bfloat16", 128, 4, True),
    "bfloat16-into-float32": MergeConfig("float32", "bfloat16", 128, 4, False),
    "float16-odd": MergeConfig("float16", "float16", 41, 1, False),
    "sums-into-bfloat16": MergeConfig("bfloat16", "float32", 128, 4, False, weighted=False),
    "float64": MergeConfig("float64", "float64", 64, 2, True),
}
# Blocks of 256 threads: four on a multiprocessor.
MOST_REGISTERS = 64


@pytest.mark.parametrize("arch", CAPABILITY)
@pytest.mark.parametrize("name", CONFIGS)
def test_fits_in_registers(name, arch):
    config = CONFIGS[name]
    report = assemble(compile_ptx(merge_spec(config), CAPABILITY[arch]), arch)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.registers <= MOST_REGISTERS
    assert (".f64" in report.ptx) == (name == "float64")
    # Of part a, of part b, and of the result.
    accesses = report.ptx.count(f"global.v{config.lanes}.")
    assert accesses == (0 if config.lanes == 1 else 3 * config.vectors)
    # Products are rounded by themselves: the order of two parts does not count.
    if config.weighted:
        assert report.ptx.count("mul.") >= 2 * config.lanes * config.vectors
