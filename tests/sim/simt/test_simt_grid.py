"""Forward and backward kernels over a covering design of all axes: see `axes`."""

from dataclasses import replace
from functools import partial

import axes
import pytest
from simt_runs import DTYPES, Geometry, check, run

from nbflash.cuda import simulator as sim

OPTIONS = ("vectors", "p_over_k", "chunks", "unroll", "deterministic", "vector_red", "send_v")
AXES = axes.AXES | {
    "geometry": (
        Geometry(),  # 8 × 8
        Geometry(tx=4),  # 8 × 16
        Geometry(rm=8),  # 16 × 8
        Geometry(ty=1, rm=8, rn=8),  # 8 × 16
    ),
    "dtype": tuple(DTYPES),
    "head_dim": (1, 3, 8, 17, 32),
    "vectors": (False, True),
    "p_over_k": (False, True),
    "chunks": (1, 2),
    "unroll": (1, 4),
    "deterministic": (False, True),
    "vector_red": (False, True),
    "send_v": (False, True),
}
# Once more the other way round: other values meet in threes.
CASES = axes.design(AXES, geometry=Geometry(), head_dim=3)
CASES += axes.design(dict(reversed(AXES.items())), geometry=Geometry(tx=4), head_dim=8)


def label(case):
    return axes.label(case, case["dtype"], f"d{case['head_dim']}", case["geometry"])


@pytest.mark.design
@pytest.mark.parametrize("seed", [pytest.param(n, id=label(c)) for n, c in enumerate(CASES)])
def test_forward_and_backward(seed):
    case = CASES[seed]
    geometry = replace(case["geometry"], **{option: case[option] for option in OPTIONS})
    given = axes.problem(case, geometry.tile, case["head_dim"], DTYPES[case["dtype"]], seed)
    with sim.options(seed=seed):
        axes.check(partial(run, geometry), partial(check, geometry), case, geometry.tile[1], *given)
