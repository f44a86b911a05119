"""decode's kernels over covering designs of their axes: see `axes`."""

import decode_axes
import decode_runs
import decode_sm80_runs
import decode_sm90_runs
import pytest

from nbflash.cuda import simulator as sim

SIMT = decode_axes.design(
    {
        "dtype": ("f16", "bf16", "f32", "f64"),
        "head_dim": (1, 20, 32),
        "page_size": (None, 1, 24),
        "keys": (1, 2, 4),
        "warps": (1, 4),
    },
    warps=1,
    keys=1,
)
SM90 = decode_axes.design(
    {"dtype": ("f16", "bf16"), "head_dim": (16, 32), "page_size": (None, 8, 24)}
)
SM80 = decode_axes.design(
    {
        **{"dtype": ("f16", "bf16"), "head_dim": (16, 32, 80), "page_size": (None, 16, 48)},
        **{"warps": (1, 2), "stages": (2, 3)},
    },
    warps=1,
)
TILE, TILE_SM90, TILE_SM80 = 16, 64, 32


def of(cases):
    named = [pytest.param(n, id=decode_axes.label(case)) for n, case in enumerate(cases)]
    return pytest.mark.parametrize("seed", named)


def problem(case, tile):
    return decode_axes.Problem(case, tile, case["head_dim"], case["dtype"], case["page_size"])


@pytest.mark.design
@of(SIMT)
def test_simt(seed):
    case = SIMT[seed]
    given = problem(case, TILE)

    def run(laid_out, table, scales):
        k_scale, v_scale = scales or (None, None)
        options = {name: case[name] for name in ("keys", "warps", "splits")}
        options |= {"block_table": table, "k_scale": k_scale, "v_scale": v_scale}
        with sim.options(seed=seed):
            more = {"mask": given.mask, "scale": given.scale}
            return decode_runs.decoded(*laid_out, given.lengths, **options, **more)

    given.check(run)


@pytest.mark.design
@of(SM90)
def test_sm90(seed):
    case = SM90[seed]
    given = problem(case, TILE_SM90)

    def run(laid_out, table, scales):
        how = {"scale": given.scale, "splits": case["splits"], "scales": scales}
        with sim.options(seed=seed):
            return decode_sm90_runs.run(*laid_out, given.lengths, table, given.mask, **how)

    given.check(run)


@pytest.mark.design
@of(SM80)
def test_sm80(seed):
    case = SM80[seed]
    given = problem(case, TILE_SM80)

    def run(laid_out, table, scales):
        options = {name: case[name] for name in ("warps", "stages", "splits")}
        with sim.options(seed=seed):
            more = {"scale": given.scale, "scales": scales, **options}
            return decode_sm80_runs.decoded(*laid_out, given.lengths, table, given.mask, **more)

    given.check(run)
