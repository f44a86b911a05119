"""What decides a cubin, by its sources: no module that a kernel imports may be left out."""

import pytest

from nbflash.cuda.sources import sources_of

HOPPER = "nbflash.backends.sm90"
COMMON = {
    "masks",
    "nbflash.cuda.kernel_spec",
    "nbflash.cuda.ptx._asm",
    "nbflash.cuda.tile.tracing",
    "nbflash.definitions.constants",
}
SCORES = {"nbflash.cuda.tile.score", "nbflash.scores"}
KERNELS = {
    "nbflash.backends.simt.forward": {"nbflash.cuda.tile.simt.gemm", *SCORES},
    "nbflash.backends.simt.score_gradient": {"nbflash.definitions.score_chain", *SCORES},
    f"{HOPPER}.forward.kernel": {f"{HOPPER}.shared.dropout", "nbflash.definitions.philox", *SCORES},
    f"{HOPPER}.backward.kernel": {"nbflash.cuda.ptx.wgmma", *SCORES},
    f"{HOPPER}.backward.dq_kernel": {f"{HOPPER}.shared.score", *SCORES},
    f"{HOPPER}.decode.kernel": {"nbflash.cuda.tile.mma.quantised_gemm"},
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_sources_of_a_kernel(kernel):
    found = set(sources_of(kernel))
    assert COMMON | KERNELS[kernel] | {kernel} <= found
    assert not {"nbflash", "nbflash.api", "nbflash.cuda.launch"} & found
    assert not [name for name in found if "simulator" in name or "planning" in name]


def test_a_source_is_a_text():
    found = sources_of("nbflash.backends.cpu.sizes")
    assert "masks.tiles" in found
    assert found["nbflash.backends.cpu.sizes"].startswith('"""Tile sizes')
