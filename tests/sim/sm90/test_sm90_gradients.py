"""Every pass of the Hopper backward in the simulator: what each of its kernels has to survive.

In one pass over columns; in two, dK and dV by columns, of warpgroups that are alone or that share
keys, and dQ by rows. The tests of one kernel's own configurations are beside this file.
"""

from dataclasses import dataclass

import axes
import numpy as np
import pytest
import sm90_bwd_runs
import sm90_dq_runs
from sm90_runs import DTYPES, inputs, ordered

from nbflash import reference
from nbflash.cuda import simulator as sim
from nbflash.testing import mask_gallery

T = 64
EDGES = (1, 2, T - 1, T, T + 1, 2 * T - 1, 2 * T + 1)


@dataclass(frozen=True)
class Pass:
    """A kernel of the backward in one configuration, and which gradients come from it."""

    runs: object
    config: object
    names: tuple

    @property
    def head_dim(self):
        return self.config.head_dim

    def run(self, mask, values, **more):
        return self._listed(self.runs.run(self.config, mask, values, **more))

    def check(self, mask, values, **more):
        """Run and hold every block to its budget."""
        return self._listed(self.runs.check(self.config, mask, values, **more))

    def _listed(self, got):
        return got if isinstance(got, tuple) else (got,)


PASSES = {
    "one-pass": Pass(sm90_bwd_runs, sm90_bwd_runs.ALONE, ("dq", "dk", "dv")),
    "columns": Pass(sm90_bwd_runs, sm90_bwd_runs.COLUMN, ("dk", "dv")),
    "shared": Pass(sm90_bwd_runs, sm90_bwd_runs.SHARED, ("dk", "dv")),
    "dq": Pass(sm90_dq_runs, sm90_dq_runs.ALONE_BY_Q, ("dq",)),
    "dq-by-do": Pass(sm90_dq_runs, sm90_dq_runs.ALONE, ("dq",)),
}
# Tiles of two warpgroups.
PAIRS = {
    "tall": Pass(sm90_bwd_runs, sm90_bwd_runs.TALL, ("dq", "dk", "dv")),
    "pair": Pass(sm90_dq_runs, sm90_dq_runs.PAIR, ("dq",)),
}
passes = pytest.mark.parametrize("which", PASSES)
# Where the pair that shares keys has nothing of its own to show, for its time.
UNSHARED = [name for name in PASSES if name != "shared"]
alone = pytest.mark.parametrize("which", UNSHARED)
# Every pair of lengths; for the columns of two passes, which walk as one pass does, some.
LENGTHS = [(which, nq, nk) for which in ("one-pass", "dq") for nq in EDGES for nk in EDGES]
LENGTHS += [
    (which, nq, EDGES[(i + 3) % len(EDGES)])
    for which in ("columns", "shared")
    for i, nq in enumerate(EDGES)
]
# Query and key heads; the pair that shares keys has one number of them.
GROUPS = [(heads, which) for heads in ((4, 4), (4, 2), (3, 1)) for which in UNSHARED]
GROUPS.append(((2, 1), "shared"))


@pytest.mark.parametrize(("which", "nq", "nk"), LENGTHS)
def test_lengths(which, nq, nk):
    """With masks, dtypes, schedules and numbers of blocks that change from one to the next, half
    of them with race detection."""
    at = EDGES.index(nq) + 2 * EDGES.index(nk)
    name = ("dense", "causal", "checkerboard", "window")[at % 4]
    values = inputs(nq, nk, head_dim=PASSES[which].head_dim, dtype=tuple(DTYPES)[nq % 2])
    with sim.options(seed=at, race=at % 2 == 1):
        PASSES[which].check(mask_gallery(nq, nk)[name], values, blocks=1 + at % 3)


AXES = axes.AXES | {
    "which": tuple(PASSES),
    "dtype": tuple(DTYPES),
    "blocks": (1, 2, 3),
    "poison": (None, "k"),  # V that is NaN takes dV along
}
CASES = axes.design(AXES, which="dq-by-do", score="none")


def label(case):
    return axes.label(case, case["which"], case["dtype"])


@pytest.mark.design
@pytest.mark.parametrize("seed", [pytest.param(n, id=label(c)) for n, c in enumerate(CASES)])
def test_every_axis(seed):
    """A covering design: see `axes`."""
    case = CASES[seed]
    pass_, dtype = PASSES[case["which"]], DTYPES[case["dtype"]]
    tile = pass_.config.tile_m, pass_.config.tile_n
    given = axes.problem(case, tile, pass_.head_dim, dtype, seed)

    def by(function):
        return lambda mask, *values, **how: function(mask, values, blocks=case["blocks"], **how)

    with sim.options(seed=seed):
        axes.check(by(pass_.run), by(pass_.check), case, tile[1], *given, pass_.names)


@pytest.mark.parametrize("name", ["per-head", "per-batch", "per-batch-per-head", "padding"])
@pytest.mark.parametrize(("heads", "which"), GROUPS)
def test_heads_and_batches(heads, name, which):
    """Whatever the schedule and the blocks, the heads of a group are summed in one order."""
    nq, nk = T + 1, 2 * T - 1 if which == "columns" else T - 1
    mask = mask_gallery(nq, nk, batch=2, heads=heads[0])[name]
    values = inputs(nq, nk, batch=2, heads=heads, head_dim=PASSES[which].head_dim)
    with sim.options(seed=sum(heads), race=heads == (4, 2)):
        first = PASSES[which].check(mask, values, blocks=2)
    if heads[1] == 1 and which != "one-pass":
        for a, b in zip(PASSES[which].run(mask, values, blocks=3), first, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("which", PASSES | PAIRS)
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", ["dead-first", "dead-last", "dead-keys", "empty"])
def test_rows_and_columns_that_attend_nothing(name, blocks, which):
    pass_ = (PASSES | PAIRS)[which]
    by_rows = pass_.names == ("dq",)
    n = 3 * (pass_.config.tile_m if by_rows else pass_.config.tile_n) - 5
    nq, nk = (n, T) if by_rows else (T, n)
    values = inputs(nq, nk, head_dim=pass_.config.head_dim)
    with sim.options(seed=blocks):
        pass_.check(mask_gallery(nq, nk)[name], values, blocks=blocks)


@alone
@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales(dtype, scale, which):
    n = T + 3
    PASSES[which].check(mask_gallery(n)["causal"], inputs(n, dtype=dtype), scale=scale)


@alone
@pytest.mark.parametrize("shift", [120.0, -120.0, 1000.0, -1000.0])
@pytest.mark.parametrize("name", ["dense", "causal", "dead-scattered"])
def test_shifted_scores(name, shift, which):
    """exp(0 − LSE) overflows where a score that does not exist is not masked."""
    q, k, v, dout = inputs(T + 5, T + 9, head_dim=64, dtype="bfloat16")
    q[..., -1], k[..., -1] = 8, shift
    PASSES[which].check(mask_gallery(T + 5, T + 9)[name], (q, k, v, dout))


@alone
@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (2, 0, 1, 3)])
def test_layouts(axes, which):
    n, back = T + 1, np.argsort(axes)
    values = [np.ascontiguousarray(x.transpose(axes)).transpose(back) for x in inputs(n, batch=2)]
    PASSES[which].check(mask_gallery(n)["causal"], values)


def test_an_out_with_a_layout_of_its_own():
    values, mask = inputs(9, batch=2), mask_gallery(9)["causal"]
    out, lse = reference.attention(*values[:3], mask)
    results = ordered(out.astype(np.float16), 1, 2, 0, 3), lse
    PASSES["one-pass"].check(mask, values, results=results)


BAD = (("q", np.nan), ("k", np.inf), ("k", np.nan), ("v", np.nan), ("dout", np.inf))
POISONED = [(name, *bad) for name in ("window", "dead-scattered") for bad in BAD]
POISONED += [("checkerboard", "k", np.nan), ("dense", "v", np.nan), ("dense", "dout", np.inf)]


@passes
@pytest.mark.parametrize(("name", "bad_one", "poison"), POISONED)
def test_one_poisoned_row(name, bad_one, poison, which):
    """Rows and keys that do not meet it keep their gradients bit for bit; the rows, and the key
    that it is or that it meets, show it."""
    n, bad = 2 * T + 1, T + 2
    mask, clean = mask_gallery(n)[name], inputs(n, head_dim=PASSES[which].head_dim)
    dirty = [x.copy() for x in clean]
    dirty[("q", "k", "v", "dout").index(bad_one)][:, bad] = poison
    keep, of_key = mask.dense(), bad_one in "kv"
    rows = keep[:, bad] if of_key else np.arange(n) == bad
    keys = keep[rows].any(axis=0)
    out, lse = (x.copy() for x in reference.attention(*clean[:3], mask))
    before = PASSES[which].run(mask, clean, results=(out, lse))
    out[:, rows] = np.nan
    if bad_one in "qk":
        lse[..., rows] = np.where(keep[rows].any(axis=1), np.nan, -np.inf)
    after = PASSES[which].run(mask, dirty, results=(out, lse))
    for of, a, b in zip(PASSES[which].names, after, before, strict=True):
        met = rows if of == "dq" else keys
        shown = rows & keep.any(axis=1) if of == "dq" else bad if of_key else keys
        np.testing.assert_array_equal(a[:, ~met], b[:, ~met])
        assert not np.isfinite(a[:, shown]).any()


@alone
@pytest.mark.parametrize("name", ["padding", "dead-keys", "documents"])
def test_what_nothing_attends_may_hold_anything(name, which):
    n = 2 * T + 1
    mask = mask_gallery(n)[name]
    clean = inputs(n, batch=2, heads=(2, 1), head_dim=PASSES[which].head_dim)
    results = reference.attention(*clean[:3], mask)
    before = PASSES[which].run(mask, clean, blocks=2, results=results)
    keep = np.broadcast_to(mask.dense(), (2, 2, n, n))
    unseen, idle = ~keep.any(axis=(1, 2)), ~keep.any(axis=3).transpose(0, 2, 1)
    q, k, v, dout = (x.copy() for x in clean)
    k[unseen], v[unseen], q[idle], dout[idle] = np.nan, np.inf, np.inf, np.nan
    after = PASSES[which].run(mask, (q, k, v, dout), blocks=2, results=results)
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)
