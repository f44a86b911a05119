"""The pass over columns, for dK and dV, on Hopper.

What it shares with the backward in one pass is not mutated.
"""

from dataclasses import replace

import numpy as np
from faults.sm90_backward import REGISTERS
from mutant_family import Family
from mutants import Mutant, lines, swapped
from sm90_bwd_runs import COLUMN, COLUMNS, SHARED, check
from sm90_runs import inputs

from nbflash.cuda import simulator as sim
from nbflash.testing import mask_gallery

KEYS, ROWS = "nbflash.cuda.tile.wgmma.gemm_register_a", "nbflash.cuda.tile.wgmma.store_rows"
LOAD, ALONE = "nbflash.backends.sm90.backward.producer", "nbflash.backends.sm90.backward.dkdv"
WIDE, KERNEL = "nbflash.backends.sm90.backward.dkdv_wide", "nbflash.backends.sm90.backward.kernel"
TILE = "nbflash.backends.sm90.backward.tile_math"
# In the order of their imports.
CHAIN = (KEYS, ROWS, LOAD, TILE, ALONE, WIDE, KERNEL)

# Configuration, mask, nq, nk, heads, blocks, seed; the odd seeds look for races.
KEPT, LAST = replace(COLUMN, head_dim=40, k_stages=1), replace(COLUMNS, k_stages=1)
CASES = {
    "kept": (KEPT, "checkerboard", 70, 129, (2, 1), 1, 0),
    "shared": (SHARED, "checkerboard", 70, 129, (2, 1), 1, 0),
    "shared-one": (SHARED, "checkerboard", 70, 65, (1, 1), 1, 0),
    "shared-two": (SHARED, "checkerboard", 70, 65, (2, 1), 1, 0),
    "heads-small": (LAST, "per-batch-per-head", 70, 70, (2, 2), 2, 0),
    "heads": (LAST, "per-batch-per-head", 129, 129, (2, 2), 2, 0),
    "kept-race": (KEPT, "causal", 193, 129, (1, 1), 1, 1),
    "shared-race": (SHARED, "causal", 193, 129, (1, 1), 1, 1),
    "columns-race": (COLUMNS, "window", 257, 257, (1, 1), 1, 1),
    "full-race": (KEPT, "dense", 321, 129, (1, 1), 1, 3),
    "dead-keys": (KEPT, "dead-keys", 70, 150, (1, 1), 2, 0),
}

STORE = (
    Mutant("swizzle of what is stored", "lane % 8 // PERIOD)", "lane % 4)"),
    Mutant("swizzle of what is loaded", "^ row // PERIOD)", "^ 0)"),
    Mutant("swizzle of the first rows", "ROWS * i % 8 // PERIOD * 4", "0 * i"),
    Mutant("second step in the place of the first", "row ^ (32 * k)", "row"),
    Mutant("row past the end", "if row + ROWS * i < rows:", "if row + ROWS * i <= rows:"),
    Mutant("lower row past the end", "if row + ROWS * i < rows:", "if row < rows:"),
    Mutant("rows at half their distance", "ROWS // 2 * i * stride", "ROWS // 4 * i * stride"),
    Mutant("upper rows twice", "swizzled + 4 * CHUNKS * ROWS * i)", "swizzled)"),
    Mutant("columns past the end", "if chunk < chunks:", "if chunk <= chunks:"),
    Mutant("half of the columns", "chunks = min(columns, head_dim - first) // 8", "chunks = 2"),
    Mutant("columns stored over the first ones", "(first + 8 * chunk)) // 2", "(8 * chunk)) // 2"),
    Mutant("last chunk not stored", "range((chunks + 1) // 2)", "range(chunks // 2)"),
)
KEPT_KEYS = (
    Mutant("keys not swizzled", "(swizzle ^ chunk)", "(chunk)"),
    Mutant("lower key is the upper one", "8 * i * (ROW_BYTES // 4)", "0 * i"),
    Mutant("one step of Q", "2 * STEP * i >> 4", "0 * i"),
    Mutant("products that begin anew", "accumulate=accumulate or i > 0", "accumulate=i > 0"),
)
LOADING = (
    Mutant("V in K's phase", "empty, bar, v_phase)", "empty, bar, phase ^ 1)"),
    Mutant("one phase of V", "v_phase = types.int32(v_phase ^ 1)", "pass"),
    Mutant("one stage of K", "stage, phase = advance(stage, phase)", "pass"),
    Mutant("K counted as V", "base + FULL_K + 8 * stage\n", "base + FULL_V\n"),
    Mutant("K in one place", "base + K + stage * KV_BYTES", "base + K"),
    Mutant(
        "keys of batch 0",
        "n_block, b, h_kv = work[at], work[at + 1]",
        "n_block, b, h_kv = work[at], 0",
    ),
    Mutant("dO not counted", "(1 if cfg.with_dq else 2)", "1"),
    Mutant("keys of an empty column", "if item < live:", "if item <= live:", 0, 3),
)
BITS_AT_ONCE = "        if kind == INTERVAL:\n            mask, key"
COPIES = (
    Mutant("bits taken for intervals", BITS_AT_ONCE, BITS_AT_ONCE.replace("==", ">=")),
    Mutant(
        "full tiles taken for bits",
        "        if kind == FULL:\n            return full(",
        "        if kind != kind:\n            return full(",
    ),
    Mutant("dS of what is hidden", "return masked(p, gradients(p, dp))", "return gradients(p, dp)"),
)
READ = lines(
    16,
    "_, n_block, bh, _ = read_descriptor(",
    "    smem, words + DESCRIPTORS // 4 + COLUMN_DESCRIPTOR_WORDS * stage_of(tile)",
    ")",
)
ENDED = lines(
    16,
    "if is_leader(thread):",
    "    mbarrier_arrive(base + EMPTY_K + 8 * k_stage_of(column))",
    "    mbarrier_arrive(base + EMPTY_V)",
    "acc_dk, acc_dv = accumulate(",
    "    acc_dk, acc_dv, p, dp, kind, smem, stats, place, tile, drawing, thread",
    ")",
    "tile += one",
    "column += one",
    "kind = following",
    "if kind != END:",
    "    k = arrived_keys(smem, place, column, warpgroup, thread)",
    "s = scores(k, place, tile)",
    "acc_dk = behind_dk(acc_dk, place, types.int32(tile - one), thread)",
)
COMPUTE = (
    Mutant("K of stage 0", "K + stage * KV_BYTES", "K"),
    Mutant("fragment of the first warpgroup", "at + warpgroup * 64 * ROW_BYTES", "at"),
    Mutant("kept keys of one row", "row * (ROW_BYTES // 4) + pair // 2", "pair // 2"),
    Mutant("dK of dO", "issue_acc(acc_dk, ds, q)", "issue_acc(acc_dk, ds, dout)"),
    Mutant("P and dS swapped", "dropped(packed_of(p), drawn)", "packed_of(dp)"),
    Mutant(
        "statistics of stage 0",
        "(_, pair), stage = rows_of(thread), stage_of(tile)",
        "(_, pair), stage = rows_of(thread), 0",
    ),
    Mutant("S left in flight", "                    wait_all_but_one()\n", ""),
    Mutant("dP left in flight", "        wait_all()\n        return p", "        return p"),
    Mutant(
        "dV left in flight",
        "        wait_all_but_one()\n        return acc_dk",
        "        return acc_dk",
    ),
    Mutant(
        "released before dK",
        "        wait_all_but_one()\n        if is_leader",
        "        if is_leader",
    ),
    Mutant("released by every warp", "equal(thread % 128, 0)", "equal(thread % 32, 0)"),
    Mutant("release of the next tile", "types.int32(tile - one), thread)", "tile, thread)", 0, 2),
    Mutant("kind of the tile before", "kind = following\n                    wait", "wait"),
    Mutant("K of the last column", "column += one", "column += 0 * one"),
    Mutant("dK not scaled", "finish(dk, acc_dk, scale,", "finish(dk, acc_dk, types.float32(1),"),
    Mutant("dV scaled", "finish(dv, acc_dv, share,", "finish(dv, acc_dv, scale,"),
    Mutant("one warp's memory for all", "types.int32(OUT + WARP_BYTES * warp)", "types.int32(OUT)"),
    Mutant("head 0", "b * stride[0] + h * stride[2]", "b * stride[0]"),
    Mutant("batch 0", "b * stride[0] + h * stride[2]", "h * stride[2]"),
    Mutant("last row left out", "nk - first)", "nk - first - 1)"),
    Mutant(
        "batch for head",
        "warp, (b, h) = types.int32(thread >> 5), divmod_int32(bh, heads_kv)",
        "warp, (h, b) = types.int32(thread >> 5), divmod_int32(bh, heads_kv)",
    ),
    Mutant(
        "statistics of the last column's tile",
        "minus_deltas, shifts = statistics_of(stats, place, tile, thread)",
        "pass",
        2,
        3,
    ),
    Mutant(
        "descriptor read after its release",
        READ + ENDED,
        ENDED + READ.replace("tile)", "types.int32(tile - one))"),
    ),
    swapped(
        "V kept before it is there",
        lines(16, "mbarrier_wait(base + FULL_V, v_phase_of(column))"),
        lines(16, "v = keys_of(smem, place, V, warpgroup, thread)"),
    ),
)
ROLES = (
    Mutant("P stored before it is read", "bar_sync(P_FREE, THREADS)\n        store", "store"),
    Mutant("P given back before it is read", "bar_arrive(P_FREE, THREADS)\n        dp", "dp"),
    Mutant("dV of Q", "QUERIES, VALUES = (0, DO)", "QUERIES, VALUES = (0, 0)"),
    Mutant("dP of Q", "else (DO, 0)", "else (0, 0)"),
    Mutant(
        "rows of both in one place", "make_finish(cfg, 0 if of_keys else 4)", "make_finish(cfg)"
    ),
    Mutant("gradients swapped", "place, dv, factor, result", "place, dk, factor, result"),
    Mutant(
        "P free from the start twice", "bar_arrive(P_FREE, THREADS)\n            thread", "thread"
    ),
    swapped(
        "P free before it is loaded",
        lines(8, "p = load_part(stats, place[1] + P // 4 + 4 * thread)"),
        lines(8, "bar_arrive(P_FREE, THREADS)"),
    ),
)
ARRIVALS = (Mutant("dO of its own without dQ", "cfg.with_dq, 1 + cfg.with_dq", "cfg.with_dq, 2"),)
MUTANTS = [
    (module, mutant)
    for module, mutants in (
        (ROWS, STORE),
        (KEYS, KEPT_KEYS),
        (LOAD, LOADING),
        (TILE, COPIES),
        (ALONE, COMPUTE),
        (WIDE, ROLES),
        (KERNEL, ARRIVALS),
    )
    for mutant in mutants
]


def check_case(modules, config, name, nq, nk, heads, blocks, seed):
    """Raise unless the kernel is right; keys that nobody sees are NaN."""
    mask = mask_gallery(nq, nk, batch=2, heads=heads[0])[name]
    values = inputs(nq, nk, batch=mask.batch or 1, heads=heads, head_dim=config.head_dim)
    unseen = ~mask.dense().reshape(-1, nk).any(axis=0)
    for x in values[1:3]:
        x[:, unseen] = np.nan
    spec_of = modules[KERNEL].bwd_sm90_spec
    with sim.options(seed=seed, race=seed % 2 == 1):
        check(config, mask, values, blocks=blocks, scale=0.3, spec_of=spec_of)


SURVIVORS = {
    "backward.dkdv: accumulate: wgmma_fence 2 deleted": REGISTERS,
    "backward.dkdv_wide: role: wgmma_commit deleted": (
        "the commit of the next product takes this one along, and the wait behind it is for all"
    ),
}


def case_of(case):
    return lambda modules: check_case(modules, *case)


FAMILY = Family(
    "columns",
    CHAIN,
    {name: case_of(case) for name, case in CASES.items()},
    MUTANTS,
    generate=(ROWS, f"{LOAD}:load_keys", ALONE, WIDE),
    survivors=SURVIVORS,
)
