"""ALiBi by a product in the Hopper forward."""

from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
from mutant_family import Family
from mutants import Mutant
from sm90_runs import ALONE, PAIR, check, inputs, precise, raise_scores

import masks
from nbflash import reference, scores
from nbflash.backends.sm90.forward.config import Sm90Config
from nbflash.cuda import simulator as sim

T = 64
RAMP, WHOLE = (
    "nbflash.backends.sm90.forward.alibi_gemm",
    "nbflash.backends.sm90.forward.mainloop_pingpong",
)
COMPUTE, FWD = "nbflash.backends.sm90.forward.consumer", "nbflash.backends.sm90.forward.kernel"
CHAIN = (RAMP, WHOLE, COMPUTE, FWD)


def blocks_behind(nq, nk):
    """Of keys before a query's own tile: what is nearest is in a tile beside the diagonal's."""
    return masks.from_function(lambda q, kv: (kv < q // T * T) | (kv > nk - 3), nq, nk)


def dense_but(nq, nk):
    """Some tiles are masked, on both sides."""
    return masks.from_function(lambda q, kv: (q + kv) % 37 != 0, nq, nk)


def some_dead(nq, nk):
    """One row in 16 sees nothing: m of all others is looked at in every tile."""
    return masks.from_function(lambda q, kv: (q % 16 != 3) & (kv >= 0), nq, nk)


@dataclass(frozen=True)
class Case:
    """A problem; ``levels`` raise the scores (`raise_scores`)."""

    name: str
    config: Sm90Config
    mask: callable
    nq: int
    nk: int
    slopes: tuple = (0.3, 0.02)
    dtype: str = "float16"
    levels: tuple = ()
    scale: float = 0.4
    race: bool = False
    more: dict = field(default_factory=dict)

    def __str__(self):
        return self.name

    def check(self, spec_of):
        nq, nk, slopes = self.nq, self.nk, np.array(self.slopes)
        mask = self.mask(nq, nk)
        q, k, v, _ = inputs(nq, nk, heads=(2, 1), dtype=self.dtype)
        how = {"scale": self.scale, "score": scores.alibi(slopes), **self.more}
        if self.levels:
            raise_scores(q, k, self.levels, self.scale)
            how["yardstick"] = precise
        with sim.options(race=self.race):
            _, lse = check(self.config, mask, q, k, v, spec_of=spec_of, **how)
        if not self.levels:
            _, exact = reference.attention(q, k, v, mask, self.scale, how["score"])
            live = np.isfinite(exact)
            off, most = np.zeros((2, *exact.shape))
            np.subtract(lse, exact, out=off, where=live)
            np.add(2.0**-16 * (1 + slopes[:, None]), 2.0**-22 * abs(exact), out=most, where=live)
            assert (abs(off) <= most).all()


CASES = (
    Case("behind and ahead", ALONE, masks.dense, T + 9, 4 * T),
    Case("more queries", PAIR, masks.dense, 3 * T, 2 * T, dtype="bfloat16", race=True),
    Case("causal", PAIR, masks.causal, 4 * T, 4 * T, more={"blocks": 2}),
    Case("masked", PAIR, dense_but, 2 * T + 9, 3 * T),
    Case("steep", ALONE, blocks_behind, 3 * T, 3 * T, slopes=(30.0, 3.3)),
    Case("wide tiles", replace(ALONE, tile_n=112), masks.dense, 70, 300),
    Case("steep beside it", ALONE, masks.dense, T, 2 * T, slopes=(30.0, 3.3)),
    Case("dead rows", ALONE, some_dead, T, 8 * T, slopes=(30.0, 0.5)),
    Case("few", ALONE, masks.dense, 5, 9, race=True),
    Case("lost", PAIR, masks.dense, 2 * T, 3 * T, levels=((T, 600), (2 * T, 1200))),
    Case("lost beside it", ALONE, dense_but, 2 * T, 4 * T, levels=((2 * T, 600),)),
)


PARTS = (
    Mutant("one part", "_LOWER | second", "_LOWER | second & 0"),
    Mutant("two parts", "equal(column, 1)", "equal(column, 2)"),
    Mutant("parts rounded", "_UPPER, _LOWER = -(1 << 16)", "_UPPER, _LOWER = -(1 << 17)"),
)


def check_parts(module):
    """Three bfloat16 are all of a float32, of either sign; the other columns are 0."""
    for x in np.random.default_rng(0).normal(size=99).astype(np.float32) * np.float32(37):
        words = np.array([module._words(x, np.int32(c)) for c in range(4)], np.uint32)
        parts = words.view(ml_dtypes.bfloat16).astype(np.float64)
        assert parts[:3].sum() == x
        assert not parts[3:].any()


PARTS_OF_X = Family(
    "ramp_parts",
    CHAIN[:1],
    {"parts": lambda modules: check_parts(modules[RAMP])},
    [(RAMP, mutant) for mutant in PARTS],
    errors=(AssertionError,),
)


FAULTS = (
    (RAMP, Mutant("numbers from 1", "types.float32(thread))", "types.float32(thread + 1))")),
    (RAMP, Mutant("R as it is counted", "(thread & 7) * 4", "(thread & 0) * 4")),
    (
        RAMP,
        Mutant(
            "no zeros",
            "(mirror ^ 4), (zero, zero, zero, zero)",
            "mirror, (half << 16 | half, half, zero, zero)",
        ),
    ),
    (RAMP, Mutant("tiles that reach the diagonal", "start >= TILE_N - 1", "start >= 0")),
    (RAMP, Mutant("tiles that begin behind it", "start + 63 <= 0", "start <= 0")),
    (RAMP, Mutant("the first warpgroup's rows", "+ 64 * warpgroup", "+ 0 * warpgroup")),
    (RAMP, Mutant("ends swapped", "64 * warpgroup + nk - nq", "64 * warpgroup + nq - nk")),
    (RAMP, Mutant("ends of the slant swapped", "(q + nk - nq - n0)", "(q + nq - nk - n0)")),
    (
        RAMP,
        Mutant(
            "ahead as behind",
            "if start > 0 else held[0] * MINUS",
            "if start > 0 else held[0]",
        ),
    ),
    (RAMP, Mutant("one row", "start + 8.0", "start + 0.0")),
    (RAMP, Mutant("there for back", "ramp[0] * unit * MINUS", "ramp[0] * unit")),
    (RAMP, Mutant("back by what it rose", "x + (b - a)", "x - (b - a)")),
    (RAMP, Mutant("flat beyond the diagonal", "-2.0, y", "-1.0, y")),
    (RAMP, Mutant("bent everywhere", "maximum(beyond, zero)", "beyond")),
    (RAMP, Mutant("bent by one row", "column_of(i) - 8 * row_of(i)", "column_of(i)")),
    (RAMP, Mutant("bent from the tile's begin", "x * (first - start)", "x * first")),
    (RAMP, Mutant("first column of all", "2 * (opaque(thread) & 3)", "0 * (opaque(thread) & 3)")),
    (
        RAMP,
        Mutant(
            "no ramp again",
            "bent(_climb(acc_s, ramp[0], first_of(thread)), ramp",
            "bent(acc_s, ramp",
        ),
    ),
    (
        RAMP,
        Mutant(
            "straight again",
            "bent(_climb(acc_s, ramp[0], first_of(thread)), ramp, thread)",
            "_climb(acc_s, ramp[0], first_of(thread))",
        ),
    ),
    (
        RAMP,
        Mutant("m of the row", "acc_s, _in_tile(m_i, x * unit, start), ramp", "acc_s, m_i, ramp"),
    ),
    (
        WHOLE,
        Mutant(
            "m of the tile for the row before", "m_prior, l_prior = m_row", "m_prior, l_prior = m_i"
        ),
    ),
    (WHOLE, Mutant("m of the tile after it", "if due else m_row", "if due else m_i")),
    (
        WHOLE,
        Mutant("m that rose", "after_softmax(m_i, m_row, ramp, scale) if due else m_row", "m_row"),
    ),
    (
        RAMP,
        Mutant(
            "m that drifts",
            "return _risen(m_row, _in_tile(m_row, ramp[0] * unit, ramp[1]), m_i)",
            "return _in_tile(m_i, ramp[0] * unit * (MINUS + 0), ramp[1])",
        ),
    ),
    (
        WHOLE,
        Mutant(
            "m of a row's first tile",
            "m_i = after_softmax(m_i, m_row, ramp, scale)\n",
            "pass\n",
        ),
    ),
    (
        RAMP,
        Mutant("never bent", "bent(acc_s, ramp, thread) if masked else acc_s", "acc_s"),
    ),
    (
        COMPUTE,
        Mutant(
            "all straight",
            "kind == FULL and straight(m_block, n0, params, warpgroup)",
            "kind == FULL",
        ),
    ),
    (FWD, Mutant("no R", "        fill_ramp(smem, place, tid)\n", "")),
)


def case_of(case):
    return lambda modules: case.check(modules[FWD].fwd_sm90_spec)


FAMILY = Family(
    "ramp",
    CHAIN,
    {case.name: case_of(case) for case in CASES},
    FAULTS,
    generate=(RAMP,),
    errors=(sim.SimError, AssertionError),
)
