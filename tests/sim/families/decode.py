"""Decode without tensor cores: its kernel and what binds it."""

import decode_rules
import ml_dtypes
import numpy as np
from decode_cases import check, contiguous, paged
from decode_runs import decoded
from faults.decode import CHAIN, KERNEL, MUTANTS
from mutant_family import Family
from simt_runs import with_alignment

import masks
from nbflash.cuda import simulator as sim
from nbflash.definitions.quantised import dequantise, quantise

CAPACITY, NQ, PAGE = 48, 3, 4
LENGTHS = np.array([2, 41], np.int32)
SMALL = {"warps": 2, "keys": 2, "queries": 2, "splits": 2}  # 8 slots and 16 keys a tile, of d=64


def problem(head_dim=64, lengths=LENGTHS, capacity=CAPACITY):
    return contiguous(NQ, (4, 2), head_dim, lengths=lengths, capacity=capacity)


def check_paged(modules):
    """Rows of the table that lie apart, and V in an order of its own."""
    q, k, v = problem()
    k_pages, v_pages, table = paged(k, v, lengths=LENGTHS, page_size=PAGE)
    v_pages = np.ascontiguousarray(v_pages.swapaxes(0, 2)).swapaxes(0, 2)
    table = np.pad(table, ((0, 0), (0, 5)))[:, :-5]
    for race in (False, True):
        with sim.options(race=race):
            how = {"block_table": table, "modules": modules, **SMALL}
            check(decoded(q, k_pages, v_pages, LENGTHS, **how), q, k, v, LENGTHS)


def check_contiguous(modules):
    """Columns that are not used, one split, the last key at the end of memory.

    One length counts up to there, and rows of V are no whole vectors apart.
    """
    lengths = np.array([2, 45], np.int32)
    q, k, v = problem(20, lengths, 45)
    v, far = np.pad(v, ((0, 0), (0, 0), (0, 0), (0, 1)))[..., :-1], np.array([2, 54], np.int32)
    with with_alignment():
        got = decoded(q, k, v, far, modules=modules, **SMALL | {"splits": 1})
    check(got, q, k, v, lengths)


def check_poisoned(modules):
    """V of the last token is infinite: tokens before it do not attend it.

    The first one attends all but the last key of two tiles.
    """
    lengths = np.array([33], np.int32)
    q, k, v = problem(lengths=lengths)
    v[0, lengths[0] - 1] = np.inf
    out, lse = decoded(q, k, v, lengths, modules=modules, **SMALL)
    assert np.isinf(out[:, 2]).all()
    short = lengths - 1
    check((out[:, :2], lse[..., :2]), q[:, :2], k, v, short)


def check_masks(modules):
    """Of every head its own, some of bits, over keys whose NaN nobody sees.

    One has keys of the second warp alone.
    """
    rows, columns = np.ogrid[:NQ, :CAPACITY]
    bits = masks.from_dense((5 * rows + 7 * columns) % 11 < 4)
    window = masks.window(NQ, CAPACITY, left=30, right=0)
    second = masks.from_dense((columns % 8 >= 4) & (rows >= 0))
    per_head = masks.per_head([bits, window, second, bits])
    for mask in (masks.per_batch([window | bits, masks.dense(NQ, CAPACITY)]), per_head):
        q, k, v = problem()
        dense = np.broadcast_to(mask.dense(), (2, 4, NQ, CAPACITY))
        seen = dense.any(axis=2).reshape(2, 2, 2, CAPACITY).any(axis=2).swapaxes(1, 2)
        k[~seen], v[~seen] = np.nan, np.nan
        how = {"mask": mask, "modules": modules, **SMALL}
        if mask is per_head:
            del how["queries"]
        got = decoded(q, k, v, LENGTHS, **how)
        clean = [np.nan_to_num(x) for x in (k, v)]
        check(got, q, *clean, LENGTHS, keep=lambda b, dense=dense: dense[b, ..., : LENGTHS[b]])


def check_quantised(modules):
    q, k, v = problem()
    (k, k_scale), (v, v_scale) = (quantise(x, ml_dtypes.float8_e4m3fn) for x in (k, v))
    v_scale = np.ascontiguousarray(v_scale.swapaxes(0, 1)).swapaxes(0, 1)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    got = decoded(q, k, v, LENGTHS, **scales, modules=modules, **SMALL)
    real = np.dtype(np.float32)
    check(got, q, dequantise(k, k_scale, real), dequantise(v, v_scale, real), LENGTHS)


def on_tiles(modules):
    """What `decode_rules` runs, on tiles of 16 keys."""

    def run(q, k, v, lengths, table=None, mask=None, **named):
        how = {"block_table": table, "mask": mask, "modules": modules, **SMALL}
        return decoded(q, k, v, lengths, **how, **named)

    return decode_rules.Kernel(run, 16, np.float32, head_dim=64)


def of_rules(rule):
    return lambda modules: rule(on_tiles(modules))


CHECKS = check_contiguous, check_poisoned, check_paged, check_masks, check_quantised


FAMILY = Family(
    "decode",
    CHAIN,
    {check.__name__.removeprefix("check_"): check for check in CHECKS}
    | {name: of_rules(rule) for name, rule in decode_rules.RULES.items()},
    MUTANTS,
    generate=(KERNEL,),
)
