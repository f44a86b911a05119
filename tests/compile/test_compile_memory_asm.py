"""Inline PTX without a memory clobber is found, whatever it does to memory."""

import memory_asm
import pytest

TOUCHING = {
    "atom": "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;",
    "bar": "bar.sync $0, $1;",
    "cp": "cp.async.cg.shared.global [$0], [$1], 16;",
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {$0}, [$1];",
    "red": "red.relaxed.cta.or.b32 [$0], $1; st.global.b32 [$0], $1;",
    "{ ": "{ .reg .pred p;\n  mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; }",
}
HARMLESS = (
    "mov.b32 $0, $1;",
    "red.relaxed.cta.or.b32 [$0], $1;",
    "shfl.sync.bfly.b32 $0, $1, 1, 31, -1;",
)


def called(ptx, constraints="=r,r"):
    """A call of it, as Numba writes LLVM IR."""
    return f'  %".1" = call i32 asm sideeffect "{ptx}", "{constraints}"(i32 %".2")\n'


def test_what_touches_memory_says_so():
    assert memory_asm.unordered([called(x, "=r,r,~{memory}") for x in TOUCHING.values()]) == []
    assert memory_asm.unordered(map(called, HARMLESS)) == []
    found = memory_asm.unordered(map(called, TOUCHING.values()))
    assert {text.partition(".")[0] for text in found} == set(TOUCHING)


def test_every_call_is_read():
    with pytest.raises(AssertionError, match="inline PTX of another form"):
        memory_asm.unordered(["  call void asm sideeffect 'nop;', ''()"])
