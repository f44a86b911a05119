"""The kernels that plan block maps, for four architectures: no spills, no stack, few registers."""

import pytest
from assembly import CAPABILITIES, assemble
from compiled import compile_ptx

from nbflash.backends.block_plan.list_tiles import ListTilesConfig, list_tiles_spec
from nbflash.backends.block_plan.overflow import OverflowConfig, overflow_spec
from nbflash.backends.block_plan.running_sum import RunningSumConfig, running_sum_spec
from nbflash.backends.block_plan.transpose import TransposeConfig, transpose_spec
from nbflash.backends.block_plan.work_order import COLUMNS, PAIRS, WorkOrderConfig, work_order_spec

CAPABILITY = {"sm_75": (7, 5), **CAPABILITIES}
SPECS = {
    "count": list_tiles_spec(ListTilesConfig(1, 1, 1, 1, False, False, 8)),
    "list": list_tiles_spec(ListTilesConfig(2, 2, 1, 1, False, True, 16)),
    "list-split": list_tiles_spec(ListTilesConfig(1, 1, 2, 2, False, True, 8)),
    "list-columns": list_tiles_spec(ListTilesConfig(2, 1, 1, 1, True, True, 64)),
    "sum": running_sum_spec(RunningSumConfig(1024, True)),
    "count-columns": transpose_spec(TransposeConfig(False)),
    "transpose": transpose_spec(TransposeConfig(True)),
    "order": work_order_spec(WorkOrderConfig(PAIRS)),
    "order-columns": work_order_spec(WorkOrderConfig(COLUMNS)),
    "overflow": overflow_spec(OverflowConfig(128, 2)),
}
# Of a thread: blocks of 128 to 1024 then fill a multiprocessor.
MOST_REGISTERS = {"sum": 64, "order": 64, "order-columns": 64}


@pytest.mark.parametrize("arch", CAPABILITY)
@pytest.mark.parametrize("name", SPECS)
def test_fits_in_registers(name, arch):
    report = assemble(compile_ptx(SPECS[name], CAPABILITY[arch]), arch)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.registers <= MOST_REGISTERS.get(name, 80)
    assert ".f64" not in report.ptx
    assert ("atom.relaxed.gpu.add.s32" in report.ptx) == (name in ("count-columns", "transpose"))
