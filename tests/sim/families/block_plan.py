"""The kernels that plan block maps on the device: lists of tiles, their transpose, order, room."""

import numpy as np
from block_plan_runs import check_plan, random_map
from mutant_family import Family
from mutants import Mutant, without

from nbflash.cuda import simulator as sim
from nbflash.cuda.device import cuda_device

ROOM = "nbflash.backends.block_plan"
LIST, SUM, TRANSPOSE = f"{ROOM}.list_tiles", f"{ROOM}.running_sum", f"{ROOM}.transpose"
ORDER, OVERFLOW, HOST = f"{ROOM}.work_order", f"{ROOM}.overflow", f"{ROOM}.host"
ATOMIC, MATH = "nbflash.cuda.tile.atomic_int", "nbflash.cuda.tile.warp_math"
CHAIN = (ATOMIC, MATH, LIST, SUM, TRANSPOSE, ORDER, OVERFLOW, HOST)

# shape, block, extent of the map, k, within, seed; tile; the rest of `check_plan`.
ROWS = {"batch": 2, "heads": 2}
COLUMNS = ROWS | {"transposed": True, "group": 2, "columns": True}
CASES = {
    "patterns": ((20, 36), (4, 4), (2, 2), 5, "causal", 0, (8, 8), ROWS),
    "splits": ((20, 20), (8, 8), (1, 1), 4, "documents", 1, (4, 4), ROWS | {"groups": 2}),
    "by-columns": ((36, 20), (4, 4), (1, 2), 5, "causal", 0, (8, 8), COLUMNS),
    "splits-by-columns": ((20, 20), (8, 8), (1, 1), 3, "padding", 2, (4, 8), COLUMNS),
    "whole": ((24, 48), (4, 4), (2, 4), 6, "all", 2, (4, 4), COLUMNS | {"heads": 4}),
    "masked-first": ((20, 20), (8, 8), (1, 1), 3, "documents", 6, (4, 4), COLUMNS),
    "wide": ((16, 1024), (4, 4), (1, 1), 80, "all", 2, (4, 4), {"batch": 1, "heads": 1}),
    "rounds": ((8, 2052), (4, 4), (1, 1), 200, "all", 4, (8, 8), {"batch": 1, "heads": 1}),
    "tall": ((280, 4), (4, 4), (1, 1), 2, "all", 3, (4, 4), {"batch": 1, "heads": 4}),
}


def plan_of(shape, block, extent, k, within, seed, tile, options):
    def check(modules):
        given = random_map(shape, block, extent, k, within, seed)
        with sim.options(race=True, seed=seed):
            check_plan(given, tile, module=modules[HOST], **options)

    return check


def sums(modules):
    """Three rounds of counts."""
    module, device, n = modules[SUM], cuda_device(0), 550
    counts = np.random.default_rng(0).integers(0, 9, n).astype(np.int32)
    made, cursor = device.integers((n + 1, n))
    spec = module.running_sum_spec(module.RunningSumConfig(64, cursor=True))
    with sim.options(race=True, seed=1):
        device.bind(spec, 1, (n,))(device.words((counts, made, cursor)))
    expected = np.concatenate([[0], np.cumsum(counts)])
    np.testing.assert_array_equal(made, expected)
    np.testing.assert_array_equal(cursor, expected[:-1])


def ranked(modules):
    """More items of a group than a block ranks, and than it reads at a time; units of two heads."""
    module, device, n_row, heads = modules[ORDER], cuda_device(0), 71, 6
    lengths = np.random.default_rng(0).integers(0, 5, n_row * heads).astype(np.int32)
    plane_of = np.arange(heads, dtype=np.int32)[::-1].copy()
    (work,) = device.integers((2 * n_row * heads,))
    sizes = n_row, heads // 2, 2, 2, 2, 1, heads
    run = device.bind(
        module.work_order_spec(module.WorkOrderConfig(module.PAIRS, stretch=256)),
        4,
        sizes,
        (plane_of,),
    )
    run(device.words((lengths, lengths, work)))
    of_item = lengths.reshape(heads, n_row)[plane_of].ravel()
    order = np.lexsort((-of_item, np.arange(heads * n_row) // (2 * n_row) * 2 // 3))
    expected = np.stack([order % n_row, order // n_row], 1)
    np.testing.assert_array_equal(work.reshape(-1, 2), expected)


def room(modules):
    """Of two batch elements and four heads, two heads a map: rows of three blocks."""
    module, device = modules[OVERFLOW], cuda_device(0)
    counts = np.array([[[1, 2, 3], [3, 1, 2]], [[5, 2, 9], [0, 4, 2]]], np.int32)
    out, lse = np.zeros((2, 10, 4, 5), np.uint16), np.zeros((2, 4, 10, 2), np.uint16)
    sizes = 2, 24, 3, 4, 10, 4, 2, 2
    run = device.bind(module.overflow_spec(module.OverflowConfig(5, 2)), 7, sizes)
    strides = [*(n // 2 for n in out.strides[:3]), *(n // 2 for n in lse.strides[:3])]
    with sim.options(race=True, seed=1):
        run(device.words((counts, out, lse), strides))
    bad = (counts > 2).repeat(4, 2)[..., :10].repeat(2, 1)
    ones = np.broadcast_to(np.where(bad, 0xFFFF, 0)[..., None], (*bad.shape, 5))
    np.testing.assert_array_equal(out, ones.transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(lse, ones[..., :2])


LISTS = (
    Mutant("entries past a count", "min(types.int32(begins[at]), types.int32(width))", "width"),
    Mutant("entries of the row before", "types.int32(at * width)", "types.int32((at - 1) * width)"),
    Mutant("columns end with the row", "types.int32(begins[at + 1])", "types.int32(begins[at])"),
    Mutant("blocks of rows that are not there", "if first + i < n_rows:", "if True:"),
    Mutant("the first of a tile's rows alone", "plane_rows + first + i)", "plane_rows + first)"),
    Mutant(
        "lanes read the same entries", "range(begin + lane, end, WARP)", "range(begin, end, WARP)"
    ),
    Mutant("entries below 0", "if col >= 0 and col < n_cols:", "if col < n_cols:"),
    Mutant("entries past the end", "if col >= 0 and col < n_cols:", "if col >= 0:"),
    Mutant("rows of a tile on one bit", "bit_of(i, col % OTHER)", "bit_of(0, col % OTHER)"),
    Mutant("blocks of a tile on one bit", "bit_of(i, col % OTHER)", "bit_of(i, 0)"),
    Mutant("32 bits", "words + (bit >> 5))", "words)"),
    Mutant("a slot for each block", "col // OTHER * SLOT", "col * SLOT"),
    Mutant("slots without room", "col // OTHER * SLOT", "col // OTHER"),
    Mutant(
        "patterns lie on their side", "j * OWN + i if TRANSPOSED", "i * OTHER + j if TRANSPOSED"
    ),
    Mutant("patterns by columns", "else i * OTHER + j)", "else j * OWN + i)"),
    Mutant("stretches of the first word", "smem[words + (bit >> 5)]", "smem[words]"),
    Mutant("stretches of one map", "smem[words + (bit >> 5)]", "smem[bit >> 5]"),
    Mutant("stretches lowest in their word", "(word >> (bit & 31)) &", "word &"),
    Mutant("stretches without an end", " & ((1 << (STRETCH * SLOT)) - 1)", ""),
    Mutant("slots past the last", "if slot >= n_slots:", "if slot > n_slots:"),
    Mutant("rows past the map are missing", "(i > 0 and first + i >= n_rows)", "False"),
    Mutant("columns past the map are missing", "(j > 0 and slot * OTHER + j >= n_cols)", "False"),
    Mutant("rows past the map begin late", "first + i >= n_rows", "first + i > n_rows"),
    Mutant("columns past the map begin late", "OTHER + j >= n_cols", "OTHER + j > n_cols"),
    Mutant("the last slot missing", "(n_cols + OTHER - 1) // OTHER", "n_cols // OTHER"),
    Mutant("a slot of each lane", "start + lane * STRETCH", "start + lane"),
    Mutant("stretches of one warp", "0, n_slots, WARP * STRETCH", "0, n_slots, 1 << 30"),
    Mutant("patterns with what follows", "(left >> (nth * SLOT)) & ALL", "left >> (nth * SLOT)"),
    Mutant("past the map by the stretch", "past_map(first, slot + nth,", "past_map(first, slot,"),
    Mutant("a tile of each block", "(slot + nth) * OTHER_SPLIT + s", "slot + nth"),
    Mutant("tiles of a block in one place", "OTHER_SPLIT + s)", "OTHER_SPLIT)"),
    Mutant("columns of the stretch", "(slot + nth) * OTHER_SPLIT", "slot * OTHER_SPLIT"),
    Mutant("whole tiles end too late", "column < full_hi[row]", "column <= full_hi[row]"),
    Mutant("whole tiles begin too late", "full_lo[row] <= column", "full_lo[row] < column"),
    Mutant("edges behind the first", "low = types.int32(middle + 1)", "low = high"),
    Mutant("edges of another column", "if low < end and edge_col[low] == column", "if low < end"),
    Mutant("the next row's edges", "if low < end and edge_col", "if edge_col"),
    Mutant("every edge is the first", "types.int32(edge_id[low])", "types.int32(1)"),
    Mutant("patterns uncut", "BITS + edge * PATTERNS + pattern", "BITS + pattern"),
    Mutant("intervals whole", "FULL if edge == 0 else INTERVAL", "FULL"),
    Mutant("planes in order", "map_plane[plane] * n_rows", "plane * n_rows"),
    Mutant("intervals of plane 0", "within_plane[plane] * query_rows", "0 * query_rows"),
    Mutant("warps on one map", "(tid >> 5) * WORDS)", "0 * WORDS)"),
    Mutant("rows past the last", "if at >= all_rows:", "if at > all_rows:"),
    Mutant("first row of a block's tiles", "row // OWN_SPLIT * OWN", "row * OWN"),
    Mutant("one word is cleared", "range(lane, WORDS, WARP)", "range(lane, 1, WARP)"),
    Mutant(
        "query and key swapped",
        "(column if TRANSPOSED else row)",
        "(row if TRANSPOSED else column)",
    ),
    Mutant("tiles that intervals do not meet", "if edge >= 0:", "if edge >= -1:"),
    Mutant("columns past the end", "if column < n_col:", "if True:"),
    Mutant("this lane before itself", "place + found + up_to - of_lane", "place + found + up_to"),
    Mutant("rounds in one place", "place + found + up_to - of_lane", "place + up_to - of_lane"),
    Mutant("lanes in one place", "place + found + up_to - of_lane", "place + found"),
    Mutant(
        "rounds as long as their first lane",
        "cuda.shfl_sync(FULL_WARP, up_to, WARP - 1)",
        "cuda.shfl_sync(FULL_WARP, up_to, 0)",
    ),
    Mutant(
        "written behind what was counted",
        "                    of_lane = types.int32(0)\n                left",
        "                left",
    ),
    Mutant(
        "tiles of a lane in one place", "col_idx[first_place + of_lane]", "col_idx[first_place]"
    ),
    Mutant("kinds of a lane in one place", "kinds[first_place + of_lane]", "kinds[first_place]"),
    Mutant("the last round alone", "found = types.int32(found + of_lane)", "found = of_lane"),
    Mutant(
        "the last lane alone", "found, any_hidden = sums_of_lanes(found, lane),", "any_hidden ="
    ),
    Mutant("all tiles masked", "0 if kind == FULL else 1", "1"),
    Mutant("no tile masked", "0 if kind == FULL else 1", "0"),
    Mutant("the last tile masked", "hidden |= types", "hidden = types"),
    Mutant("the first lane's masked", "lanes_of(hidden != 0)", "hidden"),
    Mutant("rows without tiles", "max(found, types.int32(1))", "found"),
    Mutant(
        "rows without tiles are whole", "if any_hidden != 0 or found == 0", "if any_hidden != 0"
    ),
    Mutant("the empty tile whole", "kinds[place] = BITS", "kinds[place] = FULL"),
)
SUMS = (
    Mutant("the first sum", "            sums[0] = 0\n", "            pass\n"),
    Mutant("reads past the end", "counts[min(first + i, types.int32(n - 1))]", "counts[first + i]"),
    Mutant("one count of a thread", "counts[min(first + i,", "counts[min(first,"),
    Mutant("threads on each other", "start + OF_THREAD * tid", "start + tid"),
    Mutant("writes past the end", "min(types.int32(first + OF_THREAD), n)", "first + OF_THREAD"),
    Mutant("warps without their last", "if lane == WARP - 1:", "if lane == WARP - 2:"),
    Mutant("this warp twice", "if w < warp:", "if w <= warp:"),
    Mutant("rounds from 0", "before_round = types.int32(before_round + of_round)", "pass"),
    Mutant("sums without their count", "sums[i + 1] = before", "sums[i + 1] = before - counts[i]"),
    Mutant("a thread's own before it", "before + total - own", "before + total"),
    Mutant("cursor in one place", "cursor[i] = before", "cursor[i] = before - counts[i]"),
)
TRANSPOSES = (
    Mutant("entries past a count", "* width >= counts[of_all]", "* width > counts[of_all]"),
    Mutant("rows of other lengths", "at - types.int64(of_all) * width", "at % 2"),
    Mutant("columns past the end", "if col < 0 or col >= n_cols:", "if col < 0:"),
    Mutant("columns below 0", "if col < 0 or col >= n_cols:", "if col >= n_cols:"),
    Mutant("planes together", "plane * n_cols + col), ONE", "col), ONE"),
    Mutant("rows of all planes", "types.int32(of_all - plane * n_rows)", "of_all"),
    Mutant("threads past the last entry", "if at >= entries:", "if at > entries:"),
)
ORDERS = (
    Mutant("one head of a group", "(head + 1) * group)", "head * group + 1)"),
    Mutant("heads without planes", "values[plane_of[h] * n_row + row]", "values[h * n_row + row]"),
    Mutant("groups begin early", "of_group * units + groups - 1", "of_group * units"),
    Mutant("groups as long as their units", "types.int32(unit * items_of_unit)", "unit"),
    Mutant("units of one head", "types.int32(of_unit * n_row)", "n_row"),
    Mutant("chunks on each other", "begin + chunk * THREADS + tid", "begin + tid"),
    Mutant("shortest first", "(length > own)", "(length < own)"),
    Mutant("equals the other way", "(j < before)", "(j > before)"),
    Mutant("equals in one place", " + (j < before))", ")"),
    Mutant("stretches without their start", "types.int32(item - start)", "item"),
    Mutant("steps without their start", "types.int32(before - UNROLLED)", "before"),
    Mutant("the first length of a step", "types.uint64(i + j)", "types.uint64(i)"),
    Mutant("long ones past the end", "length = types.int32(-1)", "length = types.int32(99)"),
    Mutant("lengths past the end", "if start + i < end:", "if True:"),
    Mutant("lengths of each thread's first", "range(tid, STRETCH, THREADS)", "(tid,)"),
    Mutant("ranks of all groups", "types.int32(begin + rank)", "rank"),
    Mutant("batch for head", "COLUMNS * at + 1] = batch", "COLUMNS * at + 1] = head"),
    Mutant(
        "head of all batches",
        "batch, head = divmod_int32(head, heads)",
        "batch, _ = divmod_int32(head, heads)",
    ),
    Mutant("all columns masked", "1 if hidden > 0 else 0", "1"),
    Mutant("lengths for masks", "summed(masked, plane_of", "summed(counts, plane_of"),
)
OVERFLOWS = (
    Mutant("rows that are full", "<= width:", "< width:"),
    Mutant("batch 0", "min(b, of_batch - 1) * of_heads", "0 * of_heads"),
    Mutant("heads as maps", "h * of_heads // heads", "min(h, of_heads - 1)"),
    Mutant("queries past the end", "min((row + 1) * size, nq)", "(row + 1) * size"),
    Mutant(
        "a query of each block",
        "range(row * size, min((row + 1) * size, nq))",
        "range(row * size, row * size + 1)",
    ),
    Mutant("one piece", "range(lane, PIECES, WARP)", "range(lane, 1, WARP)"),
    Mutant(
        "LSE as it was",
        "lse[b * l_stride[0] + h * l_stride[1] + i * l_stride[2] + lane] = ONES",
        "pass",
    ),
    Mutant("pieces past an LSE", "if lane < LSE_PIECES:", "if lane <= LSE_PIECES:"),
    Mutant("rows past the last", "if at >= rows:", "if at > rows:"),
    Mutant("out of head 0", "i * o_stride[1] + h * o_stride[2]", "i * o_stride[1]"),
    Mutant("LSE of batch 0", "lse[b * l_stride[0] + h", "lse[h"),
)
SCANS = (
    Mutant("every lane adds", "if lane >= step:", "if True:"),
    Mutant("half a scan", "while step < WARP:", "while step < WARP // 2:"),
)
ATOMICS = (
    without("block set", "        cuda.atomic.or_(memory, index, value)"),
    Mutant(
        "one block of a word",
        "cuda.atomic.or_(memory, index, value)",
        "cuda.atomic.exch(memory, index, value)",
    ),
    Mutant(
        "the place behind",
        "return cuda.atomic.add(memory, index, value)",
        "return cuda.atomic.add(memory, index, value) + 1",
    ),
)
MUTANTS = [
    (module, mutant)
    for module, mutants in (
        (ATOMIC, ATOMICS),
        (MATH, SCANS),
        (LIST, LISTS),
        (SUM, SUMS),
        (TRANSPOSE, TRANSPOSES),
        (ORDER, ORDERS),
        (OVERFLOW, OVERFLOWS),
    )
    for mutant in mutants
]
REACH = {
    SUM: ("sums", "patterns"),
    ORDER: ("ranked", "patterns", "whole", "tall"),
    OVERFLOW: ("room",),
}


def reach(module):
    """Names of the cases that run a module."""
    return REACH.get(module, tuple(CASES))


FAMILY = Family(
    "block_plan",
    CHAIN,
    {name: plan_of(*case) for name, case in CASES.items()}
    | {"sums": sums, "ranked": ranked, "room": room},
    MUTANTS,
    generate=(LIST, SUM, TRANSPOSE, ORDER),
    reach=reach,
)
