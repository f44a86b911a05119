"""Every optional argument of a public function that changes its result arrives."""

import inspect
import queue

import ml_dtypes
import numpy as np
import pytest

import masks
import nbflash
from nbflash import distributed, scores, selection, testing
from nbflash.distributed import LocalCommunicator, Sharding

N, CAPACITY = 32, 48
Q, K, V, DOUT = testing.make_qkv(2, N, N, 4, 2, 8)
CACHES = [x.view(np.int8)[..., :8] for x in testing.make_qkv(2, 1, CAPACITY, 4, 2, 32, seed=1)[1:3]]
MASK, OTHER = masks.local(N, 4), masks.butterfly(N, 4)
BLOCKS = nbflash.BlockMap(np.zeros((1, 1, 4, 1), int), shape=(N, N), block=8)
SCORE = scores.bias(np.random.default_rng(0).standard_normal((2, 4, 1, N)))
SHARDING = Sharding.of(MASK, 1, 8)
APART = Sharding(masks.dense(N, N), 2, 4, np.arange(8) % 2, np.arange(8) // 4)
RNG = np.random.default_rng(2)


def alone():
    return LocalCommunicator(0, [[queue.SimpleQueue()]])


def results(**options):
    out, lse = nbflash.attention(Q, K, V, MASK, return_lse=True, **options)
    return {"dout": DOUT, "q": Q, "k": K, "v": V, "out": out, "lse": lse}


GIVEN = {"q": Q, "k": K, "v": V, "dropout": 0.25, "seed": 3}
PASSED = results(dropout=0.25, seed=3) | {"dropout": 0.25, "seed": 3}
LEARNED = results(score=SCORE, dropout=0.25, seed=3) | {"dropout": 0.25, "seed": 3, "score": SCORE}
PART = results()
DLSE = RNG.standard_normal(PART["lse"].shape).astype(np.float32)
MERGED = {"dout": DOUT, "out_a": PART["out"], "lse_a": PART["lse"], "out_b": V.repeat(2, 2)}
MERGED |= {"lse_b": DLSE}
DECODED = {"q": Q[:, :2], "k_cache": CACHES[0], "v_cache": CACHES[1]}
DECODED |= {"lengths": np.array([40, 9], np.int32)}
SCALES, MORE = RNG.uniform(0.001, 0.01, (2, 2, CAPACITY, 2)).astype(np.float32)
OF_RANK = {"block_table": np.array([[1], [0]], np.int32), "k_scale": MORE, "v_scale": MORE}
OF_RANK |= {"scale": 0.2, "return_lse": True}
OF_RANK |= {"mask": masks.restrict(masks.strided(CAPACITY, 1, 3), [20, 31])}
DECODED |= {"k_scale": SCALES, "v_scale": SCALES}
OF_DECODE = OF_RANK | {"window": (3, 0), "score": scores.softcap(0.5)}
OF_PASS = {"scale": 0.2, "dropout": 0.5, "seed": 4}
OF_WORDS = OF_PASS | {"seed": (4, 0)}
OF_CALL = OF_PASS | {"score": scores.softcap(0.5), "return_lse": True}
OF_MASK = {"mask": MASK, "causal": True, "window": (2, 1)}
POOLED = {"q": Q, "k": K, "block": 4, "causal": True, "sinks": 1, "local": 1}
KEPT = {"block": 8, "causal": False, "sinks": 2, "local": 3}

# Of a function: what it is called with, and another value of each optional argument.
CASES = {
    nbflash.attention: (GIVEN, OF_CALL | OF_MASK),
    nbflash.attention_backward: (PASSED, OF_PASS | OF_MASK | {"dlse": DLSE, "score": SCORE}),
    nbflash.score_backward: (LEARNED, OF_PASS | OF_MASK | {"dlse": DLSE}),
    nbflash.decode: (DECODED, OF_DECODE),
    nbflash.merge_backward: (MERGED, {"dlse": DLSE}),
    nbflash.merge_sink_backward: (
        {name: PART[name] for name in ("dout", "out", "lse")} | {"sink": DLSE[0, :, 0]},
        {"dlse": DLSE},
    ),
    nbflash.BlockMap: (
        {"indices": np.full((1, 1, 4, 2), 9), "shape": (N, N), "block": 8},
        {"counts": np.ones((1, 1, 4), int), "within": masks.causal(N)},
    ),
    nbflash.KVCache: (
        {"pages": 2, "page_size": 4, "heads_kv": 1, "head_dim": 8},
        {"dtype": np.int8},
    ),
    masks.coverage: (
        {"q": Q, "k": K, "mask": OTHER},
        {"scale": 1.0, "within": masks.causal(N), "queries": [3, 20]},
    ),
    masks.reorder: ({"mask": masks.strided(N, 1, 8)}, {"tile": 4}),
    masks.restrict: ({"mask": OTHER}, {"q_idx": range(8, 16), "kv_idx": range(4, 16)}),
    selection.mean_pooled: (POOLED | {"topk": 2}, KEPT),
    selection.compressed: (POOLED | {"length": 4, "topk": 3}, KEPT | {"length": 2, "topk": 4}),
    selection.cumulative: (POOLED, KEPT | {"threshold": 0.4}),
    selection.antidiagonal: (
        POOLED | {"threshold": 0.7, "stride": 2},
        KEPT | {"threshold": 0.4, "stride": 4, "most": 2},
    ),
    selection.vertical_slash: (
        {"q": Q, "k": K, "block": 4, "vertical": 3, "slash": 2},
        {"block": 8, "last": 3},
    ),
    selection.coverage: (
        {"q": Q, "k": K, "block_map": BLOCKS},
        {"scale": 1.0, "queries": [3, 20]},
    ),
    scores.custom: (
        {"fn": lambda s, b, h, q_idx, kv_idx, x: s * x[h], "params": (np.ones(4),)},
        {
            "grad": lambda s, b, h, q_idx, kv_idx, x: x[h],
            "params": (np.zeros(4),),
            "param_grads": (lambda s, b, h, q_idx, kv_idx, x: (h, s),),
        },
    ),
    distributed.attention: (GIVEN | {"sharding": SHARDING, "comm": alone()}, OF_CALL),
    distributed.attention_backward: (
        PASSED | {"sharding": SHARDING, "comm": alone()},
        OF_PASS | {"dlse": DLSE, "score": SCORE},
    ),
    distributed.score_backward: (
        LEARNED | {"sharding": SHARDING, "comm": alone()},
        OF_PASS | {"dlse": DLSE},
    ),
    distributed.decode: (DECODED | {"comm": alone()}, OF_RANK),
    distributed.scatter: (
        {"x": RNG.standard_normal((2, N, N)), "sharding": APART, "rank": 1},
        {"axis": 2, "of": "keys"},
    ),
    testing.make_qkv: (
        {"batch": 1, "nq": 2, "nk": 2, "heads": 1, "heads_kv": 1, "head_dim": 8},
        {"dtype": np.float16, "seed": 1},
    ),
    testing.small_integers: (
        {"batch": 1, "nq": 2, "nk": 2, "heads": 1, "heads_kv": 1, "head_dim": 8},
        {"dtype": np.float16, "seed": 1},
    ),
    testing.code_word_oracle: (
        {"nq": 8, "head_dim": 16},
        {"nk": 9, "mask": masks.causal(8), "dtype": np.float16, "scale": 0.5, "seed": 1},
    ),
    testing.error_budget: (
        {"ref64": Q.astype(float), "low": Q + 1},
        {"factor": 3.0, "reduce": lambda x: x.mean(axis=1)},
    ),
    testing.block_errors: (
        {"got": Q + np.arange(N)[:, None, None], "ref64": Q.astype(float), "tile": 4},
        {"axis": 2},
    ),
    testing.low_precision: (GIVEN | {"seed": (3, 0)}, OF_WORDS | {"mask": MASK, "score": SCORE}),
    testing.low_precision_backward: (
        GIVEN | {"dout": DOUT, "seed": (3, 0)},
        OF_WORDS | {"mask": MASK, "score": SCORE, "dlse": DLSE},
    ),
    testing.mask_gallery: ({"nq": 8}, {"nk": 9, "batch": 3, "heads": 4}),
    testing.poisoned: ({"shape": (3,)}, {"dtype": ml_dtypes.bfloat16}),
}
# What changes no result.
ANYHOW = {
    "checked": "what is refused",
    "newest": "who has the last keys; tests/host/distributed",
    "device": "where memory is",
    "device_id": "where memory is",
    "impl": "who computes",
    "deterministic": "another order of sums",
    "stages": "another order of messages",
    "split": "another order of messages",
    "reduce": "how sums of ranks are rounded",
    "out": "the result itself",
    "timeout": "how long a call waits",
}
# Functions whose arguments have tests of their own, and what has no result.
ELSEWHERE = {
    "AttentionPlan": "nbflash.plan makes it",
    "TileSchedule": "a mask's schedule makes it",
    "plan": "tests/host/planning/test_plan.py, keys/test_keys_calls.py",
    "why_not": "tests/host/backends/test_limits.py",
    "why_not_decode": "tests/host/backends/test_limits.py",
    "warm": "tests/host/planning/test_kernels.py",
    "set_cache_limit": "tests/host/planning",
    "show_config": "tests/host/planning",
    "gather": "tests/host/distributed/test_distributed_sharding.py",
    "MpiCommunicator": "tests/frameworks/test_distributed.py",
    "run": "tests/host/distributed",
    "assert_within_reference": "tests/host/api/test_testing.py",
    "assert_blocks_within_reference": "tests/host/api/test_testing.py",
    "low_score_gradient": "tests/host/scores",
}
PUBLIC = {
    masks: ("coverage", "reorder", "restrict"),  # makers: tests/host/masks/test_masks_ends.py
    nbflash: nbflash.__all__,
    selection: selection.__all__,
    scores: ("custom",),
    distributed: distributed.__all__,
    testing: testing.__all__,
}
ARGUMENTS = [(function, name) for function, (_, others) in CASES.items() for name in others]


def optional(function):
    found = inspect.signature(function).parameters.values()
    return {x.name for x in found if x.default is not inspect.Parameter.empty}


def test_the_table_is_complete():
    for module, names in PUBLIC.items():
        for name in names:
            function = getattr(module, name)
            if name in ELSEWHERE or not callable(function) or not optional(function):
                continue
            declared = CASES[function][1].keys() if function in CASES else set()
            assert optional(function) - declared - ANYHOW.keys() == set(), name


def told(x):
    """What a call returned, comparable."""
    if isinstance(x, np.ndarray):
        return x.shape, x.dtype.name, x.tobytes()
    if isinstance(x, (tuple, list)):
        return tuple(map(told, x))
    if isinstance(x, dict):
        return tuple((name, told(value)) for name, value in x.items())
    if isinstance(x, masks.Mask):
        return x.shape, x.key if hasattr(x, "key") else x.dense().tobytes()
    if isinstance(x, nbflash.BlockMap):
        return x.block, told((x.indices, x.counts)), x.within
    if isinstance(x, nbflash.KVCache):
        return x.k.shape, x.k.dtype
    if isinstance(x, scores.Score):
        return hash(x)
    return x


@pytest.mark.parametrize(
    ("function", "name"), ARGUMENTS, ids=[f"{f.__module__}.{f.__name__}-{x}" for f, x in ARGUMENTS]
)
def test_an_argument_arrives(function, name):
    given, others = CASES[function]
    assert told(function(**given | {name: others[name]})) != told(function(**given))
