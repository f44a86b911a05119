"""Bad arguments: the error names the argument and its value."""

import io

import numpy as np
import pytest
from scipy import sparse

import masks


def csr(indices=(0, 1), indptr=(0, 1, 2), shape=(2, 2), dtype=bool):
    """A CSR array with its index arrays set unchecked."""
    matrix = sparse.csr_array(shape, dtype=dtype)
    matrix.indptr, matrix.indices = np.array(indptr), np.array(indices)
    matrix.data = np.ones(len(indices), dtype)
    return matrix


def bsr(data):
    return sparse.bsr_array((np.array(data), [0], [0, 1]), shape=(2, 2))


NO_TRUTH = (
    "a mask is neither true nor false: masks combine with &, |, ^, - and ~, not with and, or and"
)

VALUE = {
    "and of Python": (lambda: masks.causal(4) and masks.window(4, left=1), NO_TRUTH),
    "or of Python": (lambda: masks.causal(4) or masks.window(4, left=1), NO_TRUTH),
    "not of Python": (lambda: not ~masks.dense(4), NO_TRUTH),
    "and of planes": (lambda: masks.padding([1, 2], 4) and masks.causal(4), NO_TRUTH),
    "nq negative": (lambda: masks.dense(-1), "nq=-1: must be at least 0"),
    "nk negative": (lambda: masks.causal(4, -2), "nk=-2: must be at least 0"),
    "nq huge": (lambda: masks.dense(2**31), f"nq={2**31}: must be at most"),
    "left": (lambda: masks.window(4, left=-1), "left=-1: must be at least 0"),
    "right": (lambda: masks.window(4, right=-3), "right=-3: must be at least 0"),
    "prefix_len": (lambda: masks.prefix(4, 5), "prefix_len=5: must be at most 4"),
    "prefix_len negative": (lambda: masks.prefix(4, -1), "prefix_len=-1: must be at least 0"),
    "lengths negative": (lambda: masks.documents([3, -1]), r"lengths\[1\]=-1: must lie in"),
    "lengths 2-D": (lambda: masks.documents([[3]]), "lengths has 2 dimensions"),
    "lengths_k": (lambda: masks.documents([1, 2], [3]), "lengths_k has 1 documents: must have 2"),
    "cu_seqlens start": (
        lambda: masks.documents_from_cu_seqlens([1, 2]),
        r"cu_seqlens starts with \[1\]",
    ),
    "cu_seqlens empty": (
        lambda: masks.documents_from_cu_seqlens([]),
        r"cu_seqlens starts with \[\]: must start with 0",
    ),
    "cu_seqlens order": (
        lambda: masks.documents_from_cu_seqlens([0, 5, 4]),
        r"cu_seqlens\[2\]=4: must not be less",
    ),
    "cu_seqlens_k order": (
        lambda: masks.documents_from_cu_seqlens([0, 1], [0, -1]),
        r"cu_seqlens_k\[1\]=-1: must lie in",
    ),
    "padding length": (lambda: masks.padding([3, 9], 8), r"lengths\[1\]=9: must lie in \[0, 8\]"),
    "padding empty": (lambda: masks.padding([], 8), "lengths is empty"),
    "chunk": (lambda: masks.chunked(4, 0), "chunk=0: must be at least 1"),
    "block diagonal": (lambda: masks.block_diagonal(4, 0), "block=0: must be at least 1"),
    "butterfly n": (lambda: masks.butterfly(-4, 2), "n=-4: must be at least 0"),
    "butterfly block": (lambda: masks.butterfly(4, 0), "block=0: must be at least 1"),
    "butterfly stages": (lambda: masks.butterfly(4, 1, stages=-1), "stages=-1: must be at least 0"),
    "butterfly radix": (lambda: masks.butterfly(4, 1, radix=1), "radix=1: must be at least 2"),
    "local width": (lambda: masks.local(4, 1, -1), "width=-1: must be at least 0"),
    "stride": (lambda: masks.strided(4, 1, 0), "stride=0: must be at least 1"),
    "strided width": (lambda: masks.strided(4, 1, 1, -1), "width=-1: must be at least 0"),
    "offsets negative": (lambda: masks.toeplitz(4, [0, -1]), r"offsets\[1\]=-1: must lie in"),
    "offsets ragged": (lambda: masks.toeplitz(4, [[1], [1, 2]]), "offsets holds lists of several"),
    "n of prefix": (lambda: masks.prefix(-1, 0), "^n=-1: must be at least 0"),
    "n of chunked": (lambda: masks.chunked(-1, 1), "^n=-1: must be at least 0"),
    "tile of stats": (lambda: masks.causal(4).stats(0), "^tile=0: must be at least 1"),
    "tiles of stats": (lambda: masks.causal(4).stats((1, 2, 3)), "tile=.*: must be one integer"),
    "offsets twice": (lambda: masks.toeplitz(4, [1, 1]), "offsets holds 1 more than once"),
    "dilation": (lambda: masks.dilated(4, 1, 0), "dilation=0: must be at least 1"),
    "dilated width": (lambda: masks.dilated(4, -1, 1), "width=-1: must be at least 0"),
    "fixed stride": (lambda: masks.fixed(4, 1, 0), "stride=0: must be at least 1"),
    "summary": (lambda: masks.fixed(4, 1, 2, 3), "summary=3: must be at most"),
    "n_global": (lambda: masks.global_local(4, 1, -1), "n_global=-1: must be at least 0"),
    "n_random": (lambda: masks.bigbird(4, 1, n_random=-1), "n_random=-1: must be at least 0"),
    "seed": (lambda: masks.random(4, 1, 0.5, seed=-1), "seed=-1: must be at least 0"),
    "density high": (lambda: masks.random(4, 1, 1.5), r"density=1.5: must lie in \[0, 1\]"),
    "density low": (lambda: masks.random(4, 1, -0.1), r"density=-0.1: must lie in \[0, 1\]"),
    "density nan": (lambda: masks.random(4, 1, float("nan")), "density=nan: must lie"),
    "sink": (lambda: masks.sinks(4, -1, 2), "sink=-1: must be at least 0"),
    "sinks window": (lambda: masks.sinks(4, 1, 0), "window=0: must be at least 1"),
    "verticals": (lambda: masks.vertical_slash(4, [4], []), r"verticals\[0\]=4: must lie in"),
    "verticals twice": (
        lambda: masks.vertical_slash(4, [2, 2], []),
        "verticals holds 2 more than once",
    ),
    "verticals of nothing": (
        lambda: masks.vertical_slash(0, [0], [0]),
        "verticals has 1 entries: must be empty",
    ),
    "slashes": (lambda: masks.vertical_slash(4, [], [0, -1]), r"slashes\[1\]=-1: must lie in"),
    "axial": (lambda: masks.axial(0, 4), "height=0: must be at least 1"),
    "axial width": (lambda: masks.axial(4, -4), "width=-4: must be at least 1"),
    "parent itself": (lambda: masks.tree([-1, 1]), r"parents\[1\]=1: must come before node 1"),
    "parent later": (lambda: masks.tree([-1, 2, 0]), r"parents\[1\]=2: must come before"),
    "parent below -1": (lambda: masks.tree([-2]), r"parents\[0\]=-2: must lie in"),
    "tree prefix": (lambda: masks.tree([-1], -1), "prefix=-1: must be at least 0"),
    "tree width": (lambda: masks.tree([-1, 0], 3, nk=4), "nk=4: must be at least 5"),
    "shape 4-D": (lambda: masks.neighborhood((2, 2, 2, 2), 1), "must have 1 to 3 dimensions"),
    "shape zero": (lambda: masks.neighborhood((2, 0), 1), r"shape\[1\]=0: must be at least 1"),
    "kernel large": (
        lambda: masks.neighborhood((8, 8), (3, 5), dilation=2),
        r"kernel\[1\]=5: kernel \* dilation = 10 must not exceed shape\[1\]=8",
    ),
    "kernel zero": (lambda: masks.neighborhood(8, 0), r"kernel\[0\]=0: must be at least 1"),
    "kernel count": (lambda: masks.neighborhood(8, (3, 3)), r"kernel=\(3, 3\): must have 1"),
    "stride large": (lambda: masks.neighborhood(8, 3, 4), r"stride\[0\]=4: must not exceed kernel"),
    "dense 3-D": (lambda: masks.from_dense(np.ones((2, 2, 2), bool)), "array has 3 dimensions"),
    "dense no heads": (lambda: masks.from_dense(np.ones((1, 0, 2, 2), bool)), "must be at least 1"),
    "function shape": (
        lambda: masks.from_function(lambda q, kv: np.ones((3, 3, 3), bool), 4).dense(),
        r"fn returned shape \(3, 3, 3\): must be \(1, 1\)",
    ),
    "indptr start": (lambda: masks.from_scipy(csr(indptr=(1, 1, 2))), "matrix.indptr: must start"),
    "indptr length": (lambda: masks.from_scipy(csr(indptr=(0, 2))), "and have 3 entries"),
    "indptr order": (
        lambda: masks.from_scipy(csr(indptr=(0, 2, 1))),
        r"matrix.indptr\[2\]=1: must not decrease",
    ),
    "indptr end": (
        lambda: masks.from_scipy(csr(indptr=(0, 1, 3))),
        r"matrix.indptr\[-1\]=3: must equal len\(indices\)=2",
    ),
    "index out of range": (
        lambda: masks.from_scipy(csr(indices=(0, 2))),
        r"matrix.indices\[1\]=2: must lie in \[0, 1\]",
    ),
    "index negative": (
        lambda: masks.from_scipy(csr(indices=(-1, 1))),
        r"matrix.indices\[0\]=-1: must lie in",
    ),
    "index duplicate": (
        lambda: masks.from_scipy(csr(indices=(1, 1), indptr=(0, 2, 2))),
        r"matrix.indices\[1\]=1: is duplicated",
    ),
    "index duplicate unsorted": (
        lambda: masks.from_scipy(csr(indices=(1, 0, 1), indptr=(0, 3, 3))),
        r"matrix.indices\[2\]=1: is duplicated .*; matrix.sum_duplicates\(\) adds",
    ),
    "coo vector": (
        lambda: masks.from_scipy(sparse.coo_array(np.ones(3))),
        r"matrix has shape \(3,\): must have 2 dimensions",
    ),
    "csr vector": (
        lambda: masks.from_scipy(sparse.csr_array(np.ones(3))),
        r"matrix has shape \(3,\): must have 2 dimensions",
    ),
    "coo duplicate": (
        lambda: masks.from_scipy(sparse.coo_array((np.ones(2), ([1, 1], [0, 0])), shape=(2, 2))),
        "more than once",
    ),
    "scipy block": (lambda: masks.from_scipy(csr(), 0), "block=0: must be at least 1"),
    "scipy block triple": (lambda: masks.from_scipy(csr(), (1, 2, 3)), r"block=\(1, 2, 3\)"),
    "scipy shape": (
        lambda: masks.from_scipy(csr(), 4, shape=(9, 8)),
        r"shape=\(9, 8\): does not match 2 x 2 blocks",
    ),
    "bsr block": (
        lambda: masks.from_scipy(bsr([[[1, 1], [1, 1]]]), 4),
        r"block=\(4, 4\): must equal the BSR blocksize \(2, 2\)",
    ),
    "bsr mixed": (
        lambda: masks.from_scipy(bsr([[[1, 0], [1, 1]]])),
        "matrix block 0 holds zeros and non-zeros",
    ),
    "union shapes": (lambda: masks.dense(4) | masks.dense(5), r"shapes \(4, 4\) and \(5, 5\)"),
    "planes shapes": (
        lambda: masks.per_head([masks.dense(4), masks.dense(5)]),
        r"per_head\[1\].shape=\(5, 5\): must be \(4, 4\)",
    ),
    "planes of other rows": (
        lambda: masks.per_batch([masks.dense(4), masks.dense(5, 4)]),
        r"per_batch\[1\].shape=\(5, 4\): must be \(4, 4\)",
    ),
    "planes none": (lambda: masks.per_batch([]), r"per_batch\(\[\]\): needs at least one"),
    "planes nested": (
        lambda: masks.per_head([masks.per_head([masks.dense(4), masks.causal(4)]), masks.dense(4)]),
        r"per_head\[0\].heads=2: must not vary already",
    ),
    "planes disagree": (
        lambda: masks.per_batch(
            [
                masks.per_head([masks.dense(4), masks.causal(4)]),
                masks.per_head([masks.dense(4)] * 3),
            ]
        ),
        r"per_batch: entries disagree, \[2, 3\]",
    ),
    "planes broadcast": (
        lambda: masks.padding([1, 2], 4) | masks.padding([1, 2, 3], 4),
        r"\(2, None\) and \(3, None\) do not combine",
    ),
    "planes tiles": (lambda: masks.padding([1, 2], 4).tiles(4), "tiles of a mask with batch=2"),
    "planes stats": (lambda: masks.padding([1, 2], 4).stats(), "on each mask of .planes"),
    "planes to_scipy": (lambda: masks.padding([1, 2], 4).to_scipy(), "to_scipy of a mask with"),
    "planes plot": (lambda: masks.padding([1, 2], 4).plot(), "plot of a mask with"),
    "planes batch": (lambda: masks.padding([1, 2], 4)(0, 0, batch=2), "batch=2: must be at most 1"),
    "planes head": (
        lambda: masks.per_head([masks.dense(4), masks.causal(4)])(0, 0, head=-1),
        "head=-1: must be at least 0",
    ),
    "tile_m": (lambda: masks.dense(4).tiles(0), "tile_m=0: must be at least 1"),
    "tile_n": (lambda: masks.dense(4).tiles(4, -4), "tile_n=-4: must be at least 1"),
    "query index": (lambda: masks.dense(4)(4, 0), r"q_idx holds 4: must lie in \[0, 4\)"),
    "key index": (lambda: masks.dense(4, 6)(0, [5, -1]), r"kv_idx holds -1: must lie in \[0, 6\)"),
    "to_scipy block": (lambda: masks.dense(4).to_scipy(0), "block=0: must be at least 1"),
    "to_scipy partial": (
        lambda: masks.causal(4).to_scipy(2),
        r"block=2: block \(0, 0\) is attended only in part",
    ),
    "draw": (lambda: masks.dense(4).draw(0), "size=0: must be at least 1"),
    "stats head_dim": (lambda: masks.dense(4).stats(head_dim=0), "head_dim=0: must be at least 1"),
    "reorder rectangle": (lambda: masks.reorder(masks.dense(4, 5)), r"shape=\(4, 5\): must be"),
    "reorder planes": (lambda: masks.reorder(masks.padding([1, 2], 4)), "reorder its .planes"),
    "reorder tile": (lambda: masks.reorder(masks.dense(4), 0), "tile=0: must be at least 1"),
    "save function": (
        lambda: masks.save(io.BytesIO(), masks.dense(4) & masks.from_function(np.equal, 4)),
        "mask holds the function [a-z_]+, which cannot be saved",
    ),
}

TYPE = {
    "causal of bigbird": (
        lambda: masks.bigbird(4, 1, causal=np.ones(2, bool)),
        "causal=.*: must be True or False",
    ),
    "n float": (lambda: masks.butterfly(8.0, 2), "n=8.0: must be an integer, not float"),
    "n bool": (lambda: masks.dense(True), "nq=True: must be an integer, not a bool"),
    "n str": (lambda: masks.causal("8"), "nq='8': must be an integer, not str"),
    "block none": (lambda: masks.local(8, None), "block=None: must be an integer"),
    "causal int": (lambda: masks.butterfly(8, 2, causal=1), "causal=1: must be True or False"),
    "causal chunked": (lambda: masks.chunked(8, 2, causal=None), "causal=None: must be True"),
    "causal documents": (lambda: masks.documents([8], causal=0), "causal=0: must be True or False"),
    "lengths generator": (
        lambda: masks.documents(n for n in (1, 2)),
        "lengths is generator: must be a sequence of integers",
    ),
    "lengths float": (lambda: masks.documents([1.5]), "lengths has dtype float64"),
    "density str": (lambda: masks.random(8, 2, "all"), "density='all': must be a number"),
    "density bool": (lambda: masks.random(8, 1, True), "density=True: must be a number, not bool"),
    "density digits": (lambda: masks.random(8, 1, "0.5"), "density='0.5': must be a number"),
    "parents float": (lambda: masks.tree([-1.0]), "parents has dtype float64"),
    "dense ints": (lambda: masks.from_dense(np.ones((2, 2))), "array has dtype float64: must be"),
    "function": (lambda: masks.from_function(3, 4), "fn is int: must be callable"),
    "function dtype": (lambda: masks.from_function(lambda q, kv: q + kv, 4), "fn returned dtype"),
    "function text": (lambda: masks.from_function(lambda q, kv: "yes", 4), "fn returned dtype"),
    "scipy": (lambda: masks.from_scipy(np.eye(3)), "matrix is ndarray: must be a scipy.sparse"),
    "scipy dtype": (lambda: masks.from_scipy(csr(dtype=complex)), "matrix has dtype complex128"),
    "scipy shape": (lambda: masks.from_scipy(csr(), 4, shape=5), "shape=5: must be a pair"),
    "scipy shape single": (
        lambda: masks.from_scipy(csr(), 4, shape=(12,)),
        r"shape=\(12,\): must be a pair",
    ),
    "planes of a mask": (
        lambda: masks.per_head(masks.causal(3)),
        "masks is Interval: must be a sequence of Mask",
    ),
    "planes of a number": (lambda: masks.per_batch(3), "masks is int: must be a sequence of Mask"),
    "planes head": (
        lambda: masks.per_head([masks.dense(4), masks.causal(4)])(0, 2, head="a"),
        "head='a': must be an integer, not str",
    ),
    "planes": (lambda: masks.per_head([np.eye(2)]), r"per_head\[0\] is ndarray: must be a Mask"),
    "function of heads": (
        lambda: masks.from_function(lambda b, h, q, kv: q >= kv, 4),
        r"fn must take \(q_idx, kv_idx\), missing .* by masks.per_head and masks.per_batch",
    ),
    "function of queries": (lambda: masks.from_function(lambda q: q > 1, 4), "fn must take .* too"),
    "or": (lambda: masks.dense(4) | 1, "unsupported operand"),
    "or array": (
        lambda: masks.causal(4) | np.ones((4, 4), bool),
        r"wrap the array in masks.from_dense\(array\)",
    ),
    "array or": (lambda: np.ones((4, 4), bool) | masks.causal(4), "wrap the array"),
    "and array": (lambda: masks.causal(4) & np.ones((4, 4), bool), "wrap the array"),
    "array and": (lambda: np.ones((4, 4), bool) & masks.causal(4), "wrap the array"),
    "and before": (lambda: 1 & masks.dense(4), "unsupported operand"),
    "and": (lambda: masks.dense(4) & 1, "unsupported operand"),
    "index float": (lambda: masks.dense(4)(0.5, 0), "q_idx has dtype float64: must be integers"),
    "tile": (lambda: masks.dense(4).tiles("big"), "tile_m='big': must be an integer"),
    "reorder": (lambda: masks.reorder(np.eye(4)), "mask is ndarray: must be a Mask"),
    "save": (lambda: masks.save(io.BytesIO(), np.eye(4)), "mask is ndarray: must be a Mask"),
    "touched": (lambda: masks.causal(4).to_scipy(2, touched=1), "touched=1: must be True or False"),
}


@pytest.mark.parametrize("name", VALUE)
def test_value_errors(name):
    call, message = VALUE[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", TYPE)
def test_type_errors(name):
    call, message = TYPE[name]
    with pytest.raises(TypeError, match=message):
        call()


Q, K = np.zeros((2, 6, 4, 8)), np.zeros((2, 5, 2, 8))
M = masks.dense(6, 5)

COVERAGE = {
    "q rank": (ValueError, lambda: masks.coverage(Q[0], K, M), r"q.shape=\(6, 4, 8\): must be"),
    "k rank": (ValueError, lambda: masks.coverage(Q, K[0], M), r"k.shape=\(5, 2, 8\): must be"),
    "dtype": (TypeError, lambda: masks.coverage(Q.astype(int), K, M), "q has dtype int64"),
    "batch": (ValueError, lambda: masks.coverage(Q, K[:1], M), "batch and head_dim must match"),
    "dim": (ValueError, lambda: masks.coverage(Q, K[..., :4], M), "batch and head_dim must match"),
    "heads": (ValueError, lambda: masks.coverage(Q[:, :, :3], K, M), "k has 2 heads: the 3 heads"),
    "mask type": (TypeError, lambda: masks.coverage(Q, K, np.eye(6)), "mask is ndarray"),
    "q ragged": (ValueError, lambda: masks.coverage([[1], [1, 2]], K, M), "q holds lists of"),
    "no mask": (TypeError, lambda: masks.coverage(Q, K, None), "mask is NoneType: must be a Mask"),
    "mask shape": (
        ValueError,
        lambda: masks.coverage(Q, K, masks.dense(5, 6)),
        r"mask.shape=\(5, 6\): must be \(6, 5\)",
    ),
    "within shape": (
        ValueError,
        lambda: masks.coverage(Q, K, M, within=masks.causal(6)),
        r"within.shape=\(6, 6\): must be \(6, 5\)",
    ),
    "mask heads": (
        ValueError,
        lambda: masks.coverage(Q, K, masks.per_head([M, ~M])),
        "mask.heads=2: must be 4",
    ),
    "mask batch": (
        ValueError,
        lambda: masks.coverage(Q, K, masks.per_batch([M] * 3)),
        "mask.batch=3: must be 2",
    ),
    "queries rank": (
        TypeError,
        lambda: masks.coverage(Q, K, M, queries=3),
        "queries: must be a 1-D",
    ),
    "queries 2-D": (TypeError, lambda: masks.coverage(Q, K, M, queries=[[3]]), "got 2-D int64"),
    "queries dtype": (
        TypeError,
        lambda: masks.coverage(Q, K, M, queries=[0.5]),
        "queries: must be a 1-D array of integers, got 1-D float64",
    ),
    "queries range": (
        ValueError,
        lambda: masks.coverage(Q, K, M, queries=[0, 6]),
        r"queries reach from 0 to 6: must be in \[0, 6\)",
    ),
    "scale": (ValueError, lambda: masks.coverage(Q, K, M, scale=np.nan), "scale=nan: must be"),
    "scale str": (TypeError, lambda: masks.coverage(Q, K, M, scale="a"), "scale='a': must be a"),
    "scale bool": (TypeError, lambda: masks.coverage(Q, K, M, scale=True), "scale=True: must be a"),
}


@pytest.mark.parametrize("name", COVERAGE)
def test_coverage_errors(name):
    kind, call, message = COVERAGE[name]
    with pytest.raises(kind, match=message):
        call()


def test_a_failed_mask_leaves_arrays_writable():
    indices = np.array([0, 1])
    matrix = sparse.csr_array((np.ones(2, bool), indices, np.array([0, 1, 2])), shape=(2, 2))
    masks.from_scipy(matrix)
    assert matrix.indices.flags.writeable
    packed = np.ones((2, 2), bool)
    masks.from_dense(packed)
    assert packed.flags.writeable
