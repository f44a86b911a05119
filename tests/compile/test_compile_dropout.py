"""The Hopper kernels with dropout: no spills, no serialised wgmma, its instructions."""

import re
from dataclasses import replace

import pytest
from assembly import label
from compiled import compile_ptx, report_of

from nbflash.backends.sm90.backward.config import columns_configs
from nbflash.backends.sm90.backward.dq_config import completed, dq_configs
from nbflash.backends.sm90.backward.dq_kernel import bwd_sm90_dq_spec
from nbflash.backends.sm90.backward.kernel import bwd_sm90_spec
from nbflash.backends.sm90.forward.config import forward_configs
from nbflash.backends.sm90.forward.kernel import fwd_sm90_spec
from nbflash.cuda.tile.dropout import PLACED

HOPPER = (9, 0)
HEAD_DIMS = 64, 128, 256


def specs(head_dim, dropout=True):
    forward = forward_configs("bfloat16", head_dim, dropout=dropout)
    columns = [replace(x, dropout=dropout) for x in columns_configs("bfloat16", head_dim)]
    dq = [completed(x, dropout=dropout) for x in dq_configs("bfloat16", head_dim)]
    backward = *map(bwd_sm90_spec, columns), *map(bwd_sm90_dq_spec, dq)
    return [*map(fwd_sm90_spec, forward), *backward]


SPECS = [spec for head_dim in HEAD_DIMS for spec in specs(head_dim)]
SPECS += [replace(spec, config=replace(spec.config, full_tiles=True)) for spec in specs(64)]


SPECS += specs(64, PLACED)


def name_of(spec):
    placed = "-placed" if spec.config.dropout == PLACED else ""
    return f"{spec.name}-{label(spec.config)}{placed}"


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_kernel(spec):
    ptx = compile_ptx(spec, HOPPER)
    report = report_of(ptx, "sm_90a")
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", report)))
    narrow = spec.config.head_dim == 128 and spec.config.tile_m == spec.config.tile_n == 64
    assert spilled <= (8 if narrow else 0)
    # C7510 to C7520: ptxas waits for every single wgmma, or ignores setmaxnreg.
    assert re.findall(r"C75\d\d", report) == []
    assert ".f64" not in ptx
    assert "setp.geu.f16x2" in ptx or "set.geu.u32.f16x2" in ptx
    assert "redux.sync.or.b32" in ptx  # round keys in uniform registers
