"""The kernels of selection, for four architectures: no spills, no stack, few registers."""

import pytest
from assembly import CAPABILITIES, assemble
from compiled import compile_ptx

from nbflash.backends.block_selection.best_blocks import BestBlocksConfig, best_blocks_spec
from nbflash.backends.block_selection.block_means import BlockMeansConfig, block_means_spec
from nbflash.backends.block_selection.block_products import BlockProductsConfig, block_products_spec
from nbflash.backends.block_selection.block_weights import (
    BlockWeightsConfig,
    block_weights_spec,
    softmax_statistics_spec,
)

CAPABILITY = {"sm_75": (7, 5), **CAPABILITIES}
SPECS = {
    "means-bfloat16": block_means_spec(BlockMeansConfig("bfloat16", 128, True)),
    "means-float16-odd": block_means_spec(BlockMeansConfig("float16", 12, False)),
    "means-float32": block_means_spec(BlockMeansConfig("float32", 64, True)),
    "statistics": softmax_statistics_spec(BlockWeightsConfig()),
    "weights": block_weights_spec(BlockWeightsConfig()),
    "products": block_products_spec(BlockProductsConfig()),
    "best-64": best_blocks_spec(BestBlocksConfig(64)),
    "best-2048": best_blocks_spec(BestBlocksConfig(2048)),
}
MOST_REGISTERS = 56  # of a thread: 1152 of a multiprocessor, each with four loads of 16 bytes
# 4 x 4 products, and 16 words of both operands on their way: two blocks of 256 threads. Weights on
# their way: four.
OTHERS = {"products": 128, "weights": 64}


@pytest.mark.parametrize("arch", CAPABILITY)
@pytest.mark.parametrize("name", SPECS)
def test_fits_in_registers(name, arch):
    report = assemble(compile_ptx(SPECS[name], CAPABILITY[arch]), arch)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.registers <= OTHERS.get(name, MOST_REGISTERS)
    assert ".f64" not in report.ptx
