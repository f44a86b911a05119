"""Valid calls of what is public, by names of arguments, and values that are mostly wrong."""

import queue

import ml_dtypes
import numpy as np
from scipy import sparse

import masks
import nbflash
from nbflash import distributed, scores, selection, testing
from nbflash.distributed import LocalCommunicator, Sharding

N = 8
Q, K, V, DOUT = testing.make_qkv(2, N, N, 4, 2, 8)
MASK = masks.local(N, 2)
OUT, LSE = nbflash.attention(Q, K, V, MASK, return_lse=True)
ATTENTION = {"q": Q, "k": K, "v": V, "mask": MASK}
OPTIONS = {"causal": True, "window": (3, 2), "scale": 0.5, "score": scores.softcap(2.0)}
OPTIONS |= {"dropout": 0.5, "seed": 3, "impl": "auto"}
BACKWARD = {"dout": DOUT, **ATTENTION, "out": OUT, "lse": LSE, "dlse": np.zeros_like(LSE)}
LENGTHS = np.array([5, 7], np.int32)
SCALES = np.ones(2, np.float32)
DECODE = {"q": Q[:, :2], "k_cache": K, "v_cache": V, "lengths": LENGTHS, "window": (3, 0)}
DECODE |= {"scale": 0.5, "return_lse": True, "impl": "auto"}
PAGED = {"q": Q[:, :2], "k_cache": K.astype(np.int8), "v_cache": V.astype(np.int8)}
PAGED |= {"lengths": LENGTHS, "k_scale": SCALES, "v_scale": SCALES}
PAGED |= {"block_table": np.array([[0], [1]], np.int32), "mask": masks.causal(2, N)}
PAGED |= {"score": scores.alibi(0.1)}
MERGE = {"out_a": OUT, "lse_a": LSE, "out_b": OUT, "lse_b": LSE}
SINK = {"out": OUT, "lse": LSE, "sink": np.zeros(4, np.float32)}
CHOSEN = {"q": Q, "k": K, "block": 4, "causal": True, "sinks": 1, "local": 1}
BLOCKS = {"indices": np.zeros((1, 1, 2, 1), int), "shape": (N, N), "block": 4}
PATTERN = {"n": N, "block": 2, "causal": True}
SHARDING = Sharding.of(MASK, 1, 4)
MATRIX = sparse.csr_array(np.eye(4))


def _bent(s, b, h, q_idx, kv_idx):
    return s


def alone():
    """The communicator of one rank."""
    return LocalCommunicator(0, [[queue.SimpleQueue()]])


def _over_ranks(function):
    def call(**given):
        return function(comm=alone(), **given)

    call.__name__ = f"distributed.{function.__name__}"
    return call


def _method(name):
    """Of a cache with two sequences of three tokens."""

    def call(**given):
        cache = nbflash.KVCache(6, 2, 2, 8, np.float32)
        cache.append(cache.allocate(2), K[:, :3], V[:, :3])
        return getattr(cache, name)(**given)

    call.__name__ = f"KVCache.{name}"
    return call


OF_RANK = {"q": Q, "k": K, "v": V, "sharding": SHARDING, "scale": 0.5, "stages": 1}
OF_RANK |= {"split": "ranks", "impl": "auto", "dropout": 0.0, "seed": 1, "return_lse": True}
CALLS = [
    (nbflash.attention, ATTENTION | OPTIONS | {"return_lse": True, "out": np.empty_like(Q)}),
    (nbflash.attention_backward, BACKWARD | OPTIONS | {"deterministic": True}),
    (nbflash.plan, ATTENTION | {x: OPTIONS[x] for x in OPTIONS if x != "seed"}),
    (nbflash.why_not, ATTENTION | {x: OPTIONS[x] for x in OPTIONS if x != "seed"}),
    (nbflash.score_backward, BACKWARD | {"score": scores.bias(np.zeros((N, N)))}),
    (nbflash.decode, DECODE),
    (nbflash.decode, PAGED),
    (nbflash.merge, MERGE),
    (nbflash.merge_backward, MERGE | {"dout": DOUT, "dlse": LSE}),
    (nbflash.merge_sink, SINK),
    (nbflash.merge_sink_backward, SINK | {"dout": DOUT, "dlse": LSE}),
    (nbflash.BlockMap, BLOCKS | {"counts": np.ones((1, 1, 2), int), "within": masks.causal(N)}),
    (nbflash.BlockMap, BLOCKS | {"checked": True}),
    (
        nbflash.BlockMap.from_dense,
        {
            "keep": np.ones((1, 1, 2, 2), bool),
            "shape": (N, N),
            "block": 4,
            "within": masks.causal(N),
        },
    ),
    (
        nbflash.BlockMap.from_csr,
        {
            "indptr": np.array([0, 1, 2]),
            "indices": np.array([0, 1]),
            "shape": (N, N),
            "block": 4,
            "width": 1,
        },
    ),
    (
        nbflash.KVCache,
        {"pages": 2, "page_size": 2, "heads_kv": 1, "head_dim": 8, "dtype": np.int8}
        | {"device": "cpu", "device_id": 0},
    ),
    (_method("append"), {"sequences": [0, 1], "k": K[:, :1], "v": V[:, :1]}),
    (_method("allocate"), {"count": 2}),
    (_method("fork"), {"sequence": 0}),
    (_method("free"), {"sequences": [0]}),
    (_method("truncate"), {"sequence": 0, "length": 1}),
    (_method("lengths"), {"sequences": [0, 1], "out": np.empty(2, np.int32)}),
    (
        _method("block_table"),
        {"sequences": [0, 1], "width": 3, "out": np.empty((2, 3), np.int32)},
    ),
    (selection.mean_pooled, CHOSEN | {"topk": 1}),
    (selection.compressed, CHOSEN | {"topk": 1, "length": 2}),
    (selection.cumulative, CHOSEN | {"threshold": 0.5}),
    (selection.antidiagonal, CHOSEN | {"threshold": 0.5, "stride": 2, "most": 1}),
    (
        selection.vertical_slash,
        {"q": Q, "k": K, "block": 4, "vertical": 1, "slash": 1, "last": 2},
    ),
    (
        selection.coverage,
        {"q": Q, "k": K, "block_map": nbflash.BlockMap(**BLOCKS), "scale": 1.0, "queries": [1]},
    ),
    (scores.softcap, {"cap": 2.0}),
    (scores.alibi, {"slopes": [0.5, 0.25]}),
    (scores.relative, {"table": np.zeros((4, 3))}),
    (scores.bias, {"array": np.zeros((N, N))}),
    (scores.custom, {"fn": _bent, "grad": _bent, "params": (), "param_grads": ()}),
    (Sharding.of, {"mask": MASK, "ranks": 2, "tile": 4, "key_cost": 0.0}),
    (SHARDING.positions, {"rank": 0, "of": "keys"}),
    (distributed.scatter, {"x": Q, "sharding": SHARDING, "rank": 0, "axis": 1, "of": "queries"}),
    (_over_ranks(distributed.gather), {"x": Q, "sharding": SHARDING, "axis": 1, "of": "keys"}),
    (_over_ranks(distributed.attention), OF_RANK),
    (
        _over_ranks(distributed.decode),
        {x: DECODE[x] for x in ("q", "k_cache", "v_cache", "lengths", "scale")} | {"newest": 0},
    ),
    (masks.dense, {"nq": N, "nk": N}),
    (masks.causal, {"nq": N, "nk": N}),
    (masks.window, {"nq": N, "nk": N, "left": 1, "right": 2}),
    (masks.prefix, {"n": N, "prefix_len": 2, "nk": N}),
    (masks.documents, {"lengths": [3, 5], "lengths_k": [4, 2], "causal": True}),
    (
        masks.documents_from_cu_seqlens,
        {"cu_seqlens": [0, 3, 5], "cu_seqlens_k": [0, 4, 4], "causal": True},
    ),
    (masks.padding, {"lengths": [3, 5], "nq": 4, "nk": N, "causal": True}),
    (masks.chunked, {"n": N, "chunk": 3, "causal": True, "nk": N}),
    (masks.block_diagonal, {"n": N, "block": 3}),
    (masks.butterfly, PATTERN | {"stages": 1, "radix": 2}),
    (masks.local, PATTERN | {"width": 1}),
    (masks.strided, PATTERN | {"stride": 2, "width": 1}),
    (masks.toeplitz, PATTERN | {"offsets": [0, 1]}),
    (masks.dilated, {"n": N, "width": 2, "dilation": 2, "causal": True}),
    (masks.fixed, PATTERN | {"stride": 2, "summary": 1}),
    (masks.global_local, PATTERN | {"n_global": 1, "width": 1}),
    (masks.bigbird, PATTERN | {"n_random": 1, "width": 1, "seed": 3}),
    (masks.random, PATTERN | {"density": 0.5, "seed": 3}),
    (masks.sinks, {"n": N, "sink": 1, "window": 2, "nk": N}),
    (masks.vertical_slash, {"n": N, "verticals": [0], "slashes": [0, 3]}),
    (masks.axial, {"height": 2, "width": 4, "causal": True}),
    (masks.neighborhood, {"shape": (4, 4), "kernel": 2, "stride": 1, "dilation": 1}),
    (masks.tree, {"parents": [-1, 0, 0], "prefix": 2, "nk": N}),
    (masks.from_dense, {"array": np.ones((N, N), bool)}),
    (masks.from_function, {"fn": lambda q, kv: q >= kv, "nq": N, "nk": N}),
    (masks.from_scipy, {"matrix": MATRIX, "block": 2, "shape": (N, N)}),
    (masks.restrict, {"mask": MASK, "q_idx": [1, 2], "kv_idx": [0, 5]}),
    (masks.reorder, {"mask": MASK, "tile": 2}),
    (
        masks.coverage,
        {"q": Q, "k": K, "mask": MASK, "scale": 1.0, "within": MASK, "queries": [1]},
    ),
    (MASK.tiles, {"tile_m": 2, "tile_n": 3}),
    (MASK.live_tiles, {"tile_m": 2, "tile_n": 3}),
    (MASK.to_scipy, {"block": 2, "touched": True}),
    (MASK.stats, {"tile": 2, "head_dim": 8, "itemsize": 2}),
    (MASK.draw, {"size": 4}),
    (MASK, {"q_idx": [0], "kv_idx": [1], "head": 0, "batch": 0}),
]


def wrong():
    """Values of every kind, new ones each time: some calls write into them, or use them up."""
    return [
        *(None, "a", b"a", "", np.nan, np.inf, -np.inf, -1, 0, 2.5, True, 1j),
        *([], [1], (1, 2, 3), (-1, 2), (None,), [[1], [1, 2]], {}, {"a": 1}, object()),
        *(np.float32(2.5), np.int8(-3), np.array(2), np.array([1.5, 2]), np.array(["a"])),
        *(np.array([None]), np.array([np.nan]), np.array([2**63], np.uint64), np.zeros((0, 0))),
        *(np.zeros((2, 3, 4)), Q[:, :3], Q[..., :5], Q.astype(np.float64), Q.astype(complex)),
        *(Q.astype(ml_dtypes.bfloat16), Q.astype(np.int64), Q > 0, Q.T, Q[:0], Q.astype("U3")),
        *(
            LENGTHS.copy(),
            LSE[:, :1],
            LSE.astype(np.float64),
            LSE.swapaxes(1, 2),
            np.zeros((1,) * 5),
        ),
        *(MASK, masks.causal(3), masks.per_head([MASK, ~MASK, MASK]), nbflash.BlockMap(**BLOCKS)),
        *(MATRIX, sparse.csr_array((3, 3)), SHARDING, scores.alibi([1.0, 2.0, 3.0]), np, len),
        *(
            lambda: 0,
            lambda *x: None,
            range(3),
            iter([1]),
            np.dtype("f4"),
            slice(3),
            "cuda",
            "int8",
        ),
    ]
