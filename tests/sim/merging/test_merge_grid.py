"""The kernel that merges two parts, over a covering design of its axes."""

import axes
import numpy as np
import pytest
from merge_runs import at_rows, check_merge, part
from simt_runs import DTYPES

from nbflash.backends.merging.merge import HEADS, QUERIES
from nbflash.cuda import simulator as sim

NAMES = "heads-first", "tokens-first", "gap", "packed"
ORDERS = dict(zip(NAMES, axes.LAYOUTS["k-unlike-v"], strict=True))
# Of both parts: the result has the dtype of the first.
PAIRS = [(name, name) for name in DTYPES] + [("float32", "float16"), ("float32", "bfloat16")]
AXES = {
    "queries": (1, QUERIES - 1, QUERIES, QUERIES + 1, 2 * QUERIES + 1),
    "heads": (1, HEADS, HEADS + 1),
    "head_dim": (1, 4, 6, 40),
    "dtypes": PAIRS,
    "a": tuple(ORDERS),
    "b": tuple(ORDERS),
    "lse_a": (0, 1000, -1000),
    "lse_b": (0, 1000, -1000),
    "empty": (0, 0.3, 1),
    "places": (False, True),
    "batch": (1, 2),
}
CASES = axes.pairs(AXES)


@pytest.mark.design
@pytest.mark.parametrize("seed", range(len(CASES)))
def test_merge(seed):
    case = CASES[seed]
    sizes = case["batch"], case["queries"], case["heads"], case["head_dim"]
    rng = np.random.default_rng(seed)
    places = rng.permutation(sizes[1])[: -(-sizes[1] // 2)].astype(np.int32)
    places = places if case["places"] else None
    parts = []
    for of, name in zip("ab", case["dtypes"], strict=True):
        how = {"seed": 2 * seed + (of == "b"), "empty": case["empty"]}
        out, lse = part(*sizes, DTYPES[name], **how)
        lse = (lse + case[f"lse_{of}"]).astype(lse.dtype)
        parts.append((ORDERS[case[of]](out), lse))
    a, b = parts[0], at_rows(parts[1], places)
    memory = ORDERS[case["a"]](a[0].copy()), a[1].copy()
    with sim.options(race=True, seed=seed):
        check_merge(a, b, places, memory=memory)
