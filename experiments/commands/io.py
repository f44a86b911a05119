"""Counted HBM accesses and extra memory of the papers' algorithms, forward and backward.

Every algorithm runs literally (`experiments.libraries.paper_algorithms`, `memory_efficient` and
`rabe_staats`), its output and gradients are checked against the float64 reference inside the error
budget, and the accesses that were counted must equal the closed form.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from experiments.harness.backends import open_backend
from experiments.harness.console import progress, say
from experiments.harness.errors import OutOfBudget
from experiments.harness.oracle import GRADIENTS, Oracle, nearest
from experiments.harness.passes import BACKWARD, FORWARD
from experiments.harness.provenance import provenance
from experiments.harness.sweeps import cases, load
from experiments.libraries import memory_efficient as linear
from experiments.libraries import paper_algorithms as alg
from experiments.libraries import rabe_staats as chunked
from experiments.libraries.features import STATE, Feature
from experiments.libraries.hbm import HBM, Accesses
from experiments.report.tables import show, write_csv, wrote
from nbflash.testing import make_qkv

COMPARISON, DROPOUT = "comparison", "dropout"


@dataclass(frozen=True)
class Algorithm:
    """One pass of a paper.

    Attributes
    ----------
    name : str
    run : callable
        ``run(hbm, keep=...)``.
    accesses : Accesses
        The closed form.
    theta : float
        The order of growth.
    saved : tuple of str
        What the forward pass leaves in HBM for the backward pass; without O, of a forward pass.
    backward : Algorithm or None
        The other pass, which finds O and what is ``saved``.
    """

    name: str
    run: Callable
    accesses: Accesses
    theta: float
    saved: tuple[str, ...] = ()
    backward: "Algorithm | None" = None


def _standard(n, head_dim):
    theta = alg.theta_standard(n, head_dim)
    backward = Algorithm(
        "3: standard",
        lambda hbm, keep: alg.standard_backward(hbm),
        alg.standard_backward_accesses(n, head_dim),
        theta,
    )
    accesses = alg.standard_forward_accesses(n, head_dim)
    return Algorithm("0: standard", alg.standard_forward, accesses, theta, ("P",), backward)


def _flash(n, head_dim, sram, live=None, p_drop=0.0):
    """Algorithm 2, or with ``live`` Algorithm 5, and Algorithm 4."""
    density = 1 if live is None else live.mean()
    growth = (n, head_dim, sram)
    theta = alg.theta_flash(*growth)
    forward, how = alg.flash_forward, {"p_drop": p_drop}
    name = "1: flash" if not p_drop else "2: flash"
    if live is not None:
        theta = alg.theta_block_sparse(*growth, density)
        forward, name = partial(alg.block_sparse_forward, live=live), "5: block-sparse"
    reads, writes = alg.flash_forward_accesses(*growth, live)
    again = alg.flash_backward_accesses(*growth, live)
    saved, state = ("l", "m"), 0
    if p_drop:
        saved, state = ("l", "m", "R"), len(STATE)
    backward = Algorithm(
        "4: flash",
        partial(alg.flash_backward, sram=sram, live=live, **how),
        Accesses(again.reads + state, again.writes),
        theta,
    )
    run = partial(forward, sram=sram, state=STATE, **how)
    return Algorithm(name, run, Accesses(reads, writes + state), theta, saved, backward)


def _query_outer(n, head_dim, sram, live=None):
    density = 1 if live is None else live.mean()
    return Algorithm(
        "query outer",
        partial(alg.query_outer_forward, sram=sram, live=live),
        alg.query_outer_forward_accesses(n, head_dim, sram, live),
        alg.theta_block_sparse(n, head_dim, sram, density),
    )


def _memory_efficient(n, head_dim):
    theta = linear.theta_memory_efficient(n, head_dim)
    accesses = linear.memory_efficient_backward_accesses(n, head_dim)
    backward = Algorithm("B.2", linear.memory_efficient_backward, accesses, theta)
    accesses = linear.memory_efficient_forward_accesses(n, head_dim)
    return Algorithm("B.1", linear.memory_efficient_forward, accesses, theta, ("L",), backward)


def _rabe_staats(n, head_dim, query_chunk):
    theta, name = chunked.theta_rabe_staats(n, head_dim), "Rabe and Staats"
    size, how = (n, head_dim, query_chunk), {"query_chunk": query_chunk}
    run = partial(chunked.rabe_staats_backward, **how)
    backward = Algorithm(name, run, chunked.rabe_staats_backward_accesses(*size), theta)
    run = partial(chunked.rabe_staats_forward, **how)
    accesses = chunked.rabe_staats_forward_accesses(*size)
    return Algorithm(name, run, accesses, theta, (), backward)


def _algorithms(sweep, n, head_dim, sram, live, p_drop, query_chunk):
    if sweep == DROPOUT:
        return [_flash(n, head_dim, sram, live, p_drop)]
    if live is not None:
        return [_flash(n, head_dim, sram, live), _query_outer(n, head_dim, sram, live)]
    if sweep == COMPARISON:
        others = [_memory_efficient(n, head_dim), _rabe_staats(n, head_dim, query_chunk)]
        return [_standard(n, head_dim), *others, _flash(n, head_dim, sram)]
    forms = (_flash, _query_outer)
    return [_standard(n, head_dim), *(make(n, head_dim, sram) for make in forms)]


def count(sweep, n, head_dim, sram, case=None, p_drop=0.0, query_chunk=None, seed=0):
    """Run every algorithm on one problem; one row for each pass.

    Raises
    ------
    OutOfBudget
        If a result is wrong or a count differs from its closed form.
    """
    arrays = make_qkv(1, n, n, 1, 1, head_dim, np.float32, seed)
    mask = None if case is None else case.mask
    feature = Feature(dropout=p_drop) if p_drop else None
    oracle = Oracle(open_backend("cpu"), arrays, mask, np.arange(n), feature=feature)
    keep, live, density = None, None, 1.0
    if case is not None:
        b_c, b_r = alg.block_sizes(sram, head_dim)
        keep = mask.dense()
        live = mask.tiles(b_r, b_c).kinds.toarray() != 0
        density = float(live.mean())
    problem = {
        "sweep": sweep,
        "mask": "" if case is None else case.expression,
        "n": n,
        "head_dim": head_dim,
        "sram": sram,
        "density": density,
        "p_drop": p_drop,
        "seed": seed,
    }
    inputs = dict(zip(("Q", "K", "V", "dO"), (x[0, :, 0] for x in arrays), strict=True))
    rows = []
    for algorithm in _algorithms(sweep, n, head_dim, sram, live, p_drop, query_chunk):
        rows += [problem | row for row in _passes(algorithm, inputs, keep, oracle)]
    return rows


def _passes(forward, inputs, keep, oracle):
    """The rows of a forward pass and of the backward pass that belongs to it."""
    hbm = HBM(**{name: inputs[name] for name in "QKV"})
    forward.run(hbm, keep=keep)
    yield _row(FORWARD, forward, hbm, oracle, {"out": "O"}, hbm.extra("O"))
    if (backward := forward.backward) is None:
        return
    saved = {name: hbm[name] for name in forward.saved}
    hbm = HBM(**inputs, O=hbm["O"], **saved)
    backward.run(hbm, keep=keep)
    results = dict(zip(GRADIENTS, ("dQ", "dK", "dV"), strict=True))
    extra = hbm.extra(*results.values()) + sum(x.size for x in saved.values())
    yield _row(BACKWARD, backward, hbm, oracle, results, extra)


def _row(which, algorithm, hbm, oracle, results, extra):
    name, (n, head_dim) = algorithm.name, hbm["Q"].shape
    try:
        found = oracle.check(**{key: hbm[x][None, :, None] for key, x in results.items()})
    except OutOfBudget as error:
        raise OutOfBudget(f"{name}, {which}, {n=}: {error}") from None
    if hbm.accesses != algorithm.accesses:
        closed = algorithm.accesses
        raise OutOfBudget(f"{name}, {which}, {n=}: counted {hbm.accesses}, closed form {closed}")
    verdict = nearest(found)
    return {
        "algorithm": name,
        "pass": which,
        "reads": hbm.accesses.reads,
        "writes": hbm.accesses.writes,
        "accesses": hbm.accesses.total,
        "theta": algorithm.theta,
        "accesses_over_theta": hbm.accesses.total / algorithm.theta,
        "extra": extra,
        "recomputed_s": hbm.recomputed["S"] / n**2,
        "recomputed_o": hbm.recomputed["temporary O"] / (n * head_dim),
        "error": verdict.error,
        "budget": verdict.budget,
    }


def problems(sweep):
    """Arguments of `count` for every problem of the sweep file."""
    length, sram, density = sweep["length"], sweep["sram"], sweep["density"]
    found = [("length", n, length["head_dim"], length["sram"]) for n in length["n"]]
    found += [("sram", sram["n"], sram["head_dim"], m) for m in sram["sram"]]
    found += [
        ("density", density["n"], density["head_dim"], density["sram"], case)
        for case in cases(density["family"], density["n"], density["block"])
    ]
    both = sweep[COMPARISON]
    size = both["head_dim"], both["sram"]
    found += [(COMPARISON, n, *size, None, 0.0, both["query_chunk"]) for n in both["n"]]
    drop = sweep[DROPOUT]
    masks = [None, *cases(drop["family"], drop["n"], drop["block"])]
    size = drop["n"], drop["head_dim"], drop["sram"]
    return found + [(DROPOUT, *size, case, drop["p_drop"]) for case in masks]


def run(out, seed=0):
    """Count, print the tables, write ``io.csv`` and ``io.png`` to the directory ``out``."""
    todo = problems(load("io"))
    origin, rows = provenance("cpu"), []
    with progress("Counting HBM accesses", len(todo)) as advance:
        for problem in todo:
            rows += count(*problem, seed=seed)
            advance()
    _show_counts([row for row in rows if row["sweep"] != COMPARISON])
    _show_comparison([dict(row) for row in rows if row["sweep"] == COMPARISON])
    from experiments.report.figures import draw_io

    write_csv(out / "io.csv", [row | origin for row in rows])
    draw_io([row for row in rows if row["pass"] == FORWARD], out / "io.png")
    wrote(out / "io.csv", out / "io.png")


def _show_counts(rows):
    columns = {"algorithm": "", "pass": "", "mask": "", "N": "d", "M": "d", "density": ".1%"}
    columns |= {"reads": ",d", "writes": ",d", "/ Θ": ".2f"}
    keys = ("algorithm", "pass", "mask", "n", "sram", "density", "reads", "writes")
    keys += ("accesses_over_theta",)
    show("HBM accesses of one head, in elements", columns, [[r[key] for key in keys] for r in rows])
    say(
        "Θ: N d + N² for Algorithms 0 and 3 and N² d² / M for Algorithms 1, 2 and 4 (Theorems 2 "
        "and 5), N d + s N² d² / M for Algorithm 5 (Proposition 4) and for the query-outer order "
        "of FlashAttention-2. A constant ratio means that the count grows as stated; every count "
        "equals its closed form."
    )


def _show_comparison(rows):
    standard = {(r["n"], r["pass"]): r["accesses"] for r in rows if "standard" in r["algorithm"]}
    columns = {"algorithm": "", "pass": "", "N": "d", "accesses": ",d", "/ standard": ".2f"}
    columns |= {"extra memory": ",d", "S again": ".0f", "temporary O again": ".0f"}
    keys = ("algorithm", "pass", "n", "accesses", "over_standard")
    keys += ("extra", "recomputed_s", "recomputed_o")
    for row in rows:
        row["over_standard"] = row["accesses"] / standard[row["n"], row["pass"]]
    title = "Appendix B.5: the three differences"
    show(title, columns, [[row[key] for key in keys] for row in rows])
    say(
        "First: Rabe and Staats save memory and not accesses. Second: their forward pass holds a "
        "temporary output of each chunk of keys, FlashAttention one O and 2 N statistics. Third: "
        "their backward pass computes these outputs again, FlashAttention S alone, once. Extra "
        "memory is in elements beside inputs and results, with what the forward pass saves."
    )
