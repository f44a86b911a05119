"""Dropout in a part of a sequence: executors on some of its tokens, held to the whole sequence."""

import functools

import numpy as np
from dropout_cases import HOW, SEED
from simt_runs import FACTORS, RESULTS

import masks
from nbflash import reference, testing
from nbflash.definitions.constants import DROPOUT_BLOCK as BLOCK
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.positions import Positions
from nbflash.inputs.problem import check_forward

LENGTH = 5 * BLOCK + 9  # the last block has 9 tokens
QUERIES, KEYS = (2, 5), (1, 3, 5)  # blocks, no two of which follow each other


def tokens(blocks):
    """Their places in the sequence."""
    places = [np.arange(BLOCK * block, min(BLOCK * (block + 1), LENGTH)) for block in blocks]
    return np.concatenate(places)


@functools.cache
def problem(dtype, head_dim):
    """Mask and inputs of the whole sequence, and five exact and five plain results of its part."""
    queries, keys = tokens(QUERIES), tokens(KEYS)
    seen = np.zeros((LENGTH, LENGTH), bool)
    seen[np.ix_(queries, keys)] = True
    mask = masks.from_dense(seen)
    q, k, v, dout = testing.make_qkv(1, LENGTH, LENGTH, 1, 1, head_dim, dtype)
    found = []
    for forward, backward in (
        (reference.attention, reference.attention_backward),
        (testing.low_precision, testing.low_precision_backward),
    ):
        whole = forward(q, k, v, mask, **HOW) + backward(dout, q, k, v, mask, **HOW)
        found.append(part_of(whole))
    return mask, (q, k, v, dout), *found


def part_of(results):
    """Of (out, lse, dq, dk, dv) what belongs to the part."""
    queries, keys = tokens(QUERIES), tokens(KEYS)
    out, lse, dq, dk, dv = results
    return out[:, queries], lse[..., queries], dq[:, queries], dk[:, keys], dv[:, keys]


def check(executor_of, dtype, head_dim, deterministic=False):
    """Forward and backward of ``executor_of(spec)`` on the part, held to their budgets."""
    mask, (q, k, v, dout), exact, low = problem(dtype, head_dim)
    queries, keys = tokens(QUERIES), tokens(KEYS)
    q, dout = (np.ascontiguousarray(x[:, queries]) for x in (q, dout))
    k, v = (np.ascontiguousarray(x[:, keys]) for x in (k, v))
    given = check_forward(q, k, v, None), masks.restrict(mask, queries, keys), None
    executor = executor_of(AttentionSpec(*given, HOW["dropout"], Positions(queries, keys)))
    out, dq, dk, dv = (testing.poisoned(x.shape, x.dtype) for x in (q, q, k, v))
    lse = testing.poisoned((1, 1, queries.size), np.float32)
    executor.forward(q, k, v, out, lse, SEED)
    gradients = dq, dk, dv
    none = np.zeros_like(lse)
    executor.backward(dout, q, k, v, out, lse, none, *gradients, deterministic, SEED)
    for name, factor, *three in zip(
        RESULTS, FACTORS, (out, lse, *gradients), exact, low, strict=True
    ):
        testing.assert_within_reference(*three, name=name, factor=factor)
