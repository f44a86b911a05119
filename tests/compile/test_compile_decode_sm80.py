"""The portable decode kernel compiled: every row of its table, without spills or stack."""

import re
from dataclasses import replace

import numpy as np
import pytest
from compiled import compile_ptx, report_of
from decode_bound import Array, Device, recorded, words_of
from score_cases import code_of, scores_for

import masks
from nbflash.backends.sm80.decode.config import decode_config
from nbflash.backends.sm80.decode.host import Sm80Partial
from nbflash.backends.sm80.decode.kernel import decode_sm80_spec
from nbflash.inputs.decode_problem import Cache, check_decode

# Compute capability, bytes of shared memory of a block, and of a multiprocessor.
ARCHITECTURES = {
    "sm_80": ((8, 0), 163, 164),
    "sm_86": ((8, 6), 99, 100),
    "sm_89": ((8, 9), 99, 100),
    "sm_90a": ((9, 0), 227, 228),
    "sm_100a": ((10, 0), 227, 228),
    "sm_120a": ((12, 0), 99, 100),
}
REGISTER_FILE, RESERVED = 65536, 1024
# All head_dims for the most and the least shared memory, and one for every architecture.
TARGETS = [(arch, 128, "") for arch in ARCHITECTURES]
TARGETS += [(arch, head_dim, "") for arch in ("sm_80", "sm_86") for head_dim in (64, 192, 256)]
TARGETS += [("sm_90a", 256, ""), ("sm_80", 72, ""), ("sm_86", 200, "")]
BYTES = [(arch, d, "int8") for arch in ("sm_80", "sm_86", "sm_90a") for d in (64, 80, 128, 256)]
BYTES += [(arch, 128, "float8_e4m3fn") for arch in ("sm_89", "sm_90a", "sm_120a")]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("arch", "head_dim", "stored"), TARGETS + BYTES)
def test_kernel(arch, head_dim, stored, masked):
    capability, of_block, of_multiprocessor = ARCHITECTURES[arch]
    limit = of_block * 1024
    config = decode_config("bfloat16", head_dim, stored, smem_limit=limit, masked=masked)
    spec = decode_sm80_spec(config)
    ptx = compile_ptx(spec, capability)
    report = report_of(ptx, arch)
    assert " 0 bytes stack frame, 0 bytes spill stores" in report
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    assert registers * config.threads * config.min_blocks <= REGISTER_FILE
    assert config.smem_bytes <= limit
    needed = config.min_blocks * (config.smem_bytes + RESERVED)
    assert needed <= of_multiprocessor * 1024
    assert ".f64" not in ptx
    for text in ("mma.sync.aligned.m16n8k16", "cp.async.cg.shared.global"):
        assert text in ptx
    assert ("ldmatrix.sync" in ptx) == (not stored)
    assert ("e4m3x2" in ptx) == (stored == "float8_e4m3fn")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("stored", ["", "int8"])
@pytest.mark.parametrize("arch", ["sm_86", "sm_90a"])
@pytest.mark.parametrize("name", ["alibi", "bias", "custom"])
def test_scores(name, arch, stored, masked):
    capability, of_block, _ = ARCHITECTURES[arch]
    how = {"smem_limit": of_block * 1024, "masked": masked, "scored": True}
    config = decode_config("bfloat16", 128, stored, **how)
    code = code_of(scores_for(100, 100)[name], "bfloat16")
    ptx = compile_ptx(decode_sm80_spec(replace(config, score=code)), capability)
    assert " 0 bytes stack frame, 0 bytes spill stores" in report_of(ptx, arch)
    assert (".f64" in ptx) == (name == "custom")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("stored", [np.float16, np.int8])
def test_the_executor_gives_what_the_signature_asks_for(stored, paged, masked, monkeypatch):
    """As many words, those that change first; addresses where pointers are."""
    q, k = np.zeros((2, 3, 4, 32), np.float16), np.zeros((2, 64, 2, 32), stored)
    table, scale = (np.zeros((2, 2), np.int32) if paged else None), np.ones((2, 64, 2), np.float32)
    scales = (scale, scale.copy()) if stored == np.int8 else (None, None)
    arrays = Cache(k, k.copy(), np.full(2, 40, np.int32), table, *scales)
    mask = masks.dense(3, 64) if masked else None
    problem, found = check_decode(q, arrays), recorded(monkeypatch)
    cache = Cache(*(None if x is None else Array(x) for x in arrays))
    partial = Sm80Partial(Device(), problem, mask, Array(q), cache)
    partial(Array(q), cache, 64, 128)
    partial(Array(q), cache, 64, 128, 192, 256, 320)
    (spec, trailing), (apart, _), (words, _) = found
    assert len(words) + len(trailing) == len(words_of(spec))
    given = Array(q), *cache[:2], *cache[4:], *cache[2:4]
    at = [0 if x is None else x.data.ptr for x in given]
    assert words == [*at, 64, 128, 192, 256, 320, True]
    assert apart == [*at, 64, 128, 0, 0, 0, False]
    columns = 32 // q.itemsize * k.itemsize  # two bytes are an element
    assert list(trailing[3:6]) == [64 * 2 * columns, 2 * columns, columns]
    page_size, capacity, batch, nq, heads, pack, group = trailing[16:23]
    most_keys = 128 if paged and not masked else 64  # the mask has so many columns
    assert (page_size, capacity) == (64 * paged, most_keys)
    assert (batch, nq, heads, pack, group) == (2, 3, 4, 2, 2)
    assert partial.counted == 4  # batch × key heads
