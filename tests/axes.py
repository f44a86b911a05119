"""The axes of kernel cases, with the values that faults have hidden behind, and designs of them.

A grid of a kernel family takes its axes from here and adds those of its configurations. A new
special value is added here, and so to every family.
"""

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import poisoned_rows
from allpairspy import AllPairs

import masks
from nbflash import scores, testing


@dataclass(frozen=True)
class Length:
    """So many tiles and so many tokens more."""

    tiles: int
    more: int = 0

    def __call__(self, tile):
        return self.tiles * tile + self.more

    def __str__(self):
        return f"{self.tiles}t{self.more:+}"


def _order(x, *axes):
    """``x`` with its axes in another order in memory."""
    return np.ascontiguousarray(x.transpose(axes)).transpose(np.argsort(axes))


def _packed(x):
    return x


def _heads_first(x):
    return _order(x, 0, 2, 1, 3)


def _tokens_first(x):
    return _order(x, 1, 0, 2, 3)


def _gap(x):
    """``x`` with NaN, or what integers have instead, behind the last head of every token."""
    heads = x.shape[2]
    behind = 77 if x.dtype.kind == "i" else np.nan
    return np.insert(x, heads, behind, axis=2)[:, :, :heads]


# Lengths below one tile, at its edge and beside it, and beside the edge of the second.
LENGTHS = tuple(Length(*x) for x in ((0, 1), (0, 2), (1, -1), (1, 0), (1, 1), (2, -1), (2, 1)))
# An odd number of tiles that are more than a warp has lanes; such rows are few, for their time.
MANY = Length(33)
# Query heads and key heads.
HEADS = (2, 2), (2, 1), (3, 1), (4, 2)
# The scale of Q Kᵀ, below 0 where the smallest product is the largest score, and what is added to
# every score and so to the LSE.
LEVELS = (None, 0), (-0.4, 0), (None, 1000), (None, -1000), (-0.4, 1000)
# By the number of heads. Slopes below 0 raise what is far away.
SCORES = {
    "none": lambda heads: None,
    "falling": lambda heads: scores.alibi(np.resize([-0.4, 0.3], heads)),
    "softcap": lambda heads: scores.softcap(5.0),
}
# Of q, k, v and dout.
LAYOUTS = {
    "packed": (_packed,) * 4,
    "heads-first": (_heads_first,) * 4,
    "k-unlike-v": (_heads_first, _tokens_first, _gap, _packed),
}
# Which input has NaN in the last key of the first tile.
POISONS = None, "k", "v"

# A mask of one plane for all heads of the first batch entry, and of one for each of the second.
SHARED_PLANE = "shared-plane"
# Masks by what a kernel sees of them: one interval a row, blocks, bits, nothing, planes.
GROUPS = {
    "interval": "dense causal window window-causal prefix documents documents-causal chunked",
    "blocks": "butterfly butterfly-causal local butterfly-or-local-causal random fixed global-local"
    " bigbird",
    "bits": "sinks strided dilated vertical-slash axial neighborhood tree checkerboard",
    "nothing": "dead-first dead-last dead-scattered dead-keys empty",
    "planes": f"padding per-head per-batch per-batch-per-head {SHARED_PLANE}",
}
GROUPS = {group: names.split() for group, names in GROUPS.items()}

AXES = {
    "nq": LENGTHS,
    "nk": LENGTHS,
    "heads": HEADS,
    "level": LEVELS,
    "score": tuple(SCORES),
    "layout": tuple(LAYOUTS),
    "poison": POISONS,
    "mask": tuple(GROUPS),
}
SOME = "window", "checkerboard", "dead-scattered"  # of these there are rows of many tiles


@functools.cache
def gallery(nq, nk, heads):
    """Masks by name; those of several batch entries have two."""
    causal = masks.causal(nq, nk)
    planes = masks.window(nq, nk, left=nk // 4, right=nq // 5), masks.dense(nq, nk)
    own = masks.per_head([planes[head % 2] for head in range(heads)])
    found = testing.mask_gallery(nq, nk, batch=2, heads=heads)
    return found | {SHARED_PLANE: masks.per_batch([causal, own])}


def pairs(axes):
    """Cases, dicts by axis, in which every two values of two axes meet."""
    cases = [dict(zip(axes, row, strict=True)) for row in AllPairs(list(axes.values()))]
    for one, other in itertools.combinations(axes, 2):
        met = {(case[one], case[other]) for case in cases}
        assert met == set(itertools.product(axes[one], axes[other])), (one, other)
    return cases


def design(axes, **of_many):
    """The cases of `pairs`, and rows of many tiles.

    The masks of a group take turns. ``of_many`` are values for the rows of many tiles, for their
    time.
    """
    cases = pairs(axes)
    for group, names in GROUPS.items():
        of_group = [case for case in cases if case["mask"] == group]
        assert len(of_group) >= len(names), group
        for case, name in zip(of_group, itertools.cycle(names), strict=False):
            case["mask"] = name
    short = [case for case in cases if case["nq"].tiles == 0]
    many = {"nk": MANY, "heads": (2, 1), "poison": None, **of_many}
    return cases + [{**case, "mask": name, **many} for case, name in zip(short, SOME, strict=False)]


def label(case, *more):
    """A case's name: its mask, lengths and heads, and ``more`` of its values."""
    heads = "over".join(map(str, case["heads"]))
    scale, shift = case["level"]
    special = [case["score"], case["layout"], f"{scale}+{shift}", f"nan{case['poison']}"]
    names = [case["mask"], f"{case['nq']}x{case['nk']}", heads, *special, *more]
    return "-".join(str(x) for x in names if x not in ("none", "packed", "None+0", "nanNone"))


def problem(case, tile, head_dim, dtype, seed=0):
    """The mask, q, k, v and dout, and the arguments ``scale`` and ``score``."""
    (heads, heads_kv), (scale, shift) = case["heads"], case["level"]
    nq, nk = case["nq"](tile[0]), case["nk"](tile[1])
    mask = gallery(nq, nk, heads)[case["mask"]]
    inputs = testing.make_qkv(mask.batch or 1, nq, nk, heads, heads_kv, head_dim, dtype, seed)
    # In float64 the reference rounds, too. Without other columns all scores would be exact.
    if shift and dtype != np.float64 and head_dim > 1:
        q, k = inputs[:2]
        q[..., -1] = 8
        k[..., -1] = shift / (8 * (head_dim**-0.5 if scale is None else scale))
    laid_out = [order(x) for order, x in zip(LAYOUTS[case["layout"]], inputs, strict=True)]
    return mask, laid_out, {"scale": scale, "score": SCORES[case["score"]](heads)}


def check(run, check_clean, case, tile_n, mask, inputs, how, names=poisoned_rows.NAMES):
    """Hold a case's results to their budgets, and NaN to where the reference has it.

    Parameters
    ----------
    run : callable
        ``run(mask, *inputs, **how)`` returns the results of ``names``, or the first few of them.
    check_clean : callable
        The same, and holds them to their budgets: for cases without NaN.
    """
    if case["poison"] is None:
        check_clean(mask, *inputs, **how)
        return
    at = min(tile_n, inputs[1].shape[1]) - 1
    poisoned_rows.check(
        lambda *dirty: run(mask, *dirty, **how),
        mask,
        inputs,
        case["poison"],
        at,
        names,
        must=False,
        **how,
    )
