"""Inline PTX without a memory clobber is found, whatever it does to memory."""

import addresses
import memory_asm

from nbflash.backends.sm80.decode import config, kernel
from nbflash.cuda import launch


def test_what_touches_memory_says_so():
    chosen = config.decode_config("float16", 64, "", smem_limit=99 * 1024, masked=True)
    with addresses.read_ir() as modules:
        launch.compile_ptx(kernel.decode_sm80_spec(chosen), (8, 6))
    assert not memory_asm.unordered(modules)
    silent = [text.replace(f",{memory_asm.CLOBBER}", "") for text in modules]
    silent = [text.replace(memory_asm.CLOBBER, "") for text in silent]
    found = {text.partition(".")[0] for text in memory_asm.unordered(silent)}
    assert found == {"atom", "bar", "cp", "ldmatrix"}
