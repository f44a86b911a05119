"""The kernel that waits: the compiler keeps its loop."""

from assembly import assemble
from compiled import compile_ptx

from nbflash.cuda.pause import pause_spec


def test_sleeps_in_a_loop():
    report = assemble(compile_ptx(pause_spec(), (9, 0)), "sm_90a")
    assert "nanosleep.u32" in report.ptx
    assert "bra" in report.ptx
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
