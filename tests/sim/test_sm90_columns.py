"""dK and dV without dQ in the simulator: warpgroups that are alone, and pairs that share keys."""

import numpy as np
import pytest
from sm90_bwd_runs import COLUMN, SHARED, check, run
from test_sm90_backward import inputs

from nbflash import reference, sim
from nbflash.testing import mask_gallery

T = 64
EDGES = (1, 2, T - 1, T, T + 1, 2 * T - 1, 2 * T + 1)
CONFIGS = {"alone": COLUMN, "shared": SHARED}
configs = pytest.mark.parametrize("config", CONFIGS)


def values(config, nq, nk=None, **sizes):
    return inputs(nq, nk, head_dim=CONFIGS[config].head_dim, **sizes)


@pytest.mark.parametrize("n", EDGES)
@configs
def test_lengths(config, n):
    """Queries that fill a tile of keys and do not, and the reverse; every other with races."""
    at = EDGES.index(n)
    nk = EDGES[(at + 3) % len(EDGES)]
    name = ("dense", "causal", "checkerboard", "window")[at % 4]
    dtype = ("float16", "bfloat16")[at % 2]
    with sim.options(seed=at, race=at % 2 == 1):
        check(
            CONFIGS[config], mask_gallery(n, nk)[name], values(config, n, nk, dtype=dtype), blocks=2
        )


@configs
@pytest.mark.parametrize("name", mask_gallery(2, 2))
def test_gallery(name, config):
    nq, nk = T + 9, 2 * T - 3
    mask, seed = mask_gallery(nq, nk)[name], len(name)
    sizes = {"batch": mask.batch or 1, "heads": (mask.heads or 1, 1)}
    with sim.options(seed=seed):
        check(CONFIGS[config], mask, values(config, nq, nk, **sizes), blocks=1 + 2 * (seed % 2))


@configs
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
@pytest.mark.parametrize("name", ["per-head", "per-batch-per-head"])
def test_heads_and_batches(name, heads, config):
    """The heads of a group, some of which have no tiles in a column, are summed in one order."""
    nq, nk = T + 1, 2 * T - 1
    mask = mask_gallery(nq, nk, batch=2, heads=heads[0])[name]
    inputs_ = values(config, nq, nk, batch=2, heads=heads)
    first = check(CONFIGS[config], mask, inputs_, blocks=2)
    with sim.options(seed=sum(heads), race=True):
        again = run(CONFIGS[config], mask, inputs_, blocks=3)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


@configs
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", ["dead-first", "dead-last", "dead-keys", "empty"])
def test_rows_and_columns_that_attend_nothing(name, blocks, config):
    n = 3 * T - 5
    with sim.options(seed=blocks):
        check(CONFIGS[config], mask_gallery(T, n)[name], values(config, T, n), blocks=blocks)


@configs
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("name", ["dead-scattered", "checkerboard"])
def test_one_poisoned_row(name, which, poison, config):
    """Keys that do not meet it keep their gradients bit for bit; a key that is it, shows it."""
    n, bad = 2 * T + 1, T + 2
    mask, clean = mask_gallery(n)[name], values(config, n)
    dirty = [x.copy() for x in clean]
    dirty[("q", "k", "v", "dout").index(which)][:, bad] = poison
    keep = mask.dense()
    of_key = which in "kv"
    rows = keep[:, bad] if of_key else np.arange(n) == bad
    keys = keep[rows].any(axis=0)
    out, lse = (x.copy() for x in reference.attention(*clean[:3], mask))
    before = run(CONFIGS[config], mask, clean, results=(out, lse))
    out[:, rows] = np.nan
    if which in "qk":
        lse[..., rows] = np.where(keep[rows].any(axis=1), np.nan, -np.inf)
    after = run(CONFIGS[config], mask, dirty, results=(out, lse))
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a[:, ~keys], b[:, ~keys])
        assert not np.isfinite(a[:, bad if of_key else keys]).any()


@configs
@pytest.mark.parametrize("name", ["padding", "dead-keys", "documents"])
def test_what_nothing_attends_may_hold_anything(name, config):
    n = 2 * T + 1
    mask, clean = mask_gallery(n)[name], values(config, n, batch=2, heads=(2, 1))
    results = reference.attention(*clean[:3], mask)
    before = run(CONFIGS[config], mask, clean, blocks=2, results=results)
    keep = np.broadcast_to(mask.dense(), (2, 2, n, n))
    unseen, idle = ~keep.any(axis=(1, 2)), ~keep.any(axis=3).transpose(0, 2, 1)
    q, k, v, dout = (x.copy() for x in clean)
    k[unseen], v[unseen], q[idle], dout[idle] = np.nan, np.inf, np.inf, np.nan
    after = run(CONFIGS[config], mask, (q, k, v, dout), blocks=2, results=results)
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)
