"""Faults of the Hopper decode kernel."""

from mutants import Mutant
from mutants_sm90_load import without

KERNELS = "nbflash.kernels."
STORED, LOADING, COMPUTING, KERNEL = (
    f"{KERNELS}decode_sm90{part}" for part in ("_stored", "_load", "_compute", "")
)
CHAIN = (STORED, LOADING, COMPUTING, KERNEL)
RELEASE = "mbarrier_arrive(base + EMPTY + 8 * stage)"
WAIT_V = "mbarrier_wait(base + FULL_V + 8 * stage, phase)"
WAIT_K = "mbarrier_wait(base + FULL_K + 8 * stage, phase)"
STORE = (
    Mutant("swizzle of what is stored", "((piece % 8) ^ swizzle) * 4", "(piece % 8) * 4"),
    Mutant(
        "swizzle of the tile",
        "types.int32(panel + (chunk ^ swizzle) * 4)",
        "types.int32(panel + chunk * 4)",
    ),
    Mutant("halves in one place", "((chunk + 1) ^ swizzle)", "(chunk ^ swizzle)"),
    Mutant("V without scales", "if scales >= 0:", "if False:"),
    Mutant("scale of the first key", "smem[scales + key]", "smem[scales]"),
    Mutant("one scale for both columns", "scales[n % 2]", "scales[0]"),
    Mutant("scale of K for V", "v = v_scale[", "v = k_scale["),
    Mutant("scales behind the length", "if key < length:", "if True:"),
    Mutant("first page of all", "table[first_page + nth]", "table[first_page]"),
    Mutant("pages by tokens", "nth, inside = divided(key, page_size)", "nth = key"),
    Mutant("scales of the lower keys twice", "n0 + lane + 32", "n0 + lane"),
    Mutant("scales of V in the place of K's", "at + (TILE_N + 32 * i)", "at + 32 * i"),
    Mutant("scales of the first head", "head * k_stride[2]", "0"),
)
LOAD = (
    Mutant(
        "one tile more",
        "min(begin + (split + 1) * share, end)",
        "min(begin + (split + 1) * share + 1, end)",
    ),
    Mutant("every split from the first tile", "min(begin + split * share, end)", "begin"),
    Mutant("share rounded down", "(end - begin + splits - 1) // splits", "(end - begin) // splits"),
    Mutant("tiles rounded down", "(length + TILE_N - 1) // TILE_N", "length // TILE_N"),
    Mutant("mask of the first plane", "types.int32(row_ptr[plane])", "types.int32(row_ptr[0])"),
    Mutant("tiles behind the length", "first_behind(col_idx, begin, last, end, lane)", "last"),
    Mutant("ragged tiles in full", "if n0 + TILE_N > seen_by_all:", "if False:"),
    Mutant("bytes of all boxes", "(full_k, boxes", "(full_k, TILE_N // BOX"),
    Mutant("boxes one upon the other", "+ lane * BOX * ROW_BYTES", ""),
    Mutant("one box for all lanes", "n0 + lane * BOX", "n0"),
    Mutant("boxes that are not there", "if lane < boxes:", "if lane < TILE_N // BOX:", 1, 2),
    Mutant("the same tile ahead", "types.int32(t + 1)", "types.int32(t)"),
    Mutant("V for K", "KV_BYTES, k_map,", "KV_BYTES, v_map,"),
    Mutant("K for V", "KV_BYTES, v_map,", "KV_BYTES, k_map,"),
    without("arrival of the scales", "mbarrier_arrive(full_v)"),
    without("wait for an empty stage", "mbarrier_wait(base + EMPTY + 8 * stage, phase)", 2),
    Mutant("stages in turn", "stage, phase = advance(stage, phase)", "pass"),
    Mutant("swizzle of Q", "((chunk % 8) ^ (r % 8))", "(chunk % 8)"),
    Mutant("rows behind the last", "if first + r < count and chunk < USED:", "if chunk < USED:"),
    Mutant("columns behind the last", "first + r < count and chunk < USED", "first + r < count"),
    Mutant(
        "token of the head",
        "token, head = divided(types.int32(first + r), pack)",
        "head, token = divided(types.int32(first + r), pack)",
    ),
    without("fence after Q", "fence_proxy_async()"),
    without("warp's barrier behind the scales", "cuda.syncwarp()"),
)
COMPUTE = (
    without("wait for V", WAIT_V),
    without("wait for K", WAIT_K),
    Mutant("stages in turn", "stage, phase = advance(stage, phase)", "pass"),
    Mutant("the same end for all tokens", "types.int32(length - nq + token + 1)", "length"),
    Mutant("place of a row that is none", "if row >= nq * pack:", "if False:"),
    Mutant("bounds of the first plane", "i = plane * nq + token", "i = token"),
    Mutant("intervals in full", "if kind == INTERVAL:", "if False:"),
    Mutant("bits in full", "elif kind != FULL:", "elif False:"),
    Mutant(
        "bits of row 0",
        "types.int32(kind - BITS), token, quad)",
        "types.int32(kind - BITS), 0, quad)",
    ),
    Mutant(
        "keys behind the length",
        "keep = keep_interval(types.int32(0), end, n0, quad)",
        "keep = keep_interval(types.int32(0), n0 + cfg.tile_n, n0, quad)",
    ),
    without("mask", "s = apply_keep(s, (upper, below))"),
    Mutant(
        "mask of the upper row twice",
        "apply_keep(s, (upper, below))",
        "apply_keep(s, (upper, upper))",
    ),
    without("poison", "l = poisoned(l, (types.uint32(upper & bad), types.uint32(below & bad)))"),
    Mutant(
        "poison for all", "(types.uint32(upper & bad), types.uint32(below & bad))", "(bad, bad)"
    ),
    without("sums", "l = l[0] + sums[0], l[1] + sums[1]"),
    Mutant("O not rescaled", "pack(weights), scale_fragment(acc, alpha)", "pack(weights), acc"),
    without("fence before S", "wgmma_fence()", 2),
    without("fence before P V", "wgmma_fence()", 2, 1),
    without("commit of S", "wgmma_commit()", 2),
    without("commit of P V", "wgmma_commit()", 2, 1),
    without("wait for S", "wait_all()", 2),
    without("wait for P V", "wait_all()", 2, 1),
    without("release", RELEASE, 2, 1),
    Mutant("O not divided", "x * inverse[row_of(i)]", "x"),
    Mutant("upper row's O below", "o[4 * j + 2 * which + e]", "o[4 * j + e]"),
    Mutant(
        "scales of V for K", "types.int32(scales + quad)", "types.int32(scales + TILE_N + quad)"
    ),
    Mutant(
        "scales of K for V", "types.int32(scales + TILE_N), thread)", "types.int32(scales), thread)"
    ),
    Mutant("scores as they are", "s = scale_scores(s, smem, types.int32(scales + quad))", "pass"),
    without("barrier before S", "bar_sync(COMPUTING, 128)", 3, 1),
    without("barrier before P V", "bar_sync(COMPUTING, 128)", 3, 2),
    without("release of a stored tile", RELEASE, 2, 0),
)
PLACES = (
    Mutant("lengths beyond the capacity", "min(max(lengths[b], 0), capacity)", "lengths[b]"),
    Mutant("ragged behind the length", "types.int32(length - nq + 1)", "length"),
    Mutant("pages of the first sequence", "types.int32(b * table_width)", "types.int32(0)"),
    Mutant("query head for key head", "types.int32(head // group)", "head"),
    Mutant("first row tile", "types.int32(row_tile * ROWS)", "types.int32(0)"),
    Mutant(
        "Q of the next head",
        "q_start = b * q_stride[0] + head * q_stride[2]",
        "q_start = b * q_stride[0]",
    ),
    Mutant("upper row twice", "row_at(row + 8,", "row_at(row,"),
    Mutant("plane of the first heads", "types.int32(plane_of[rest])", "types.int32(plane_of[0])"),
    Mutant("lse of every split in the first", "types.int32(split * batch + b)", "types.int32(b)"),
)
MUTANTS = [
    (target, mutant)
    for target, mutants in zip(CHAIN, (STORE, LOAD, COMPUTE, PLACES), strict=True)
    for mutant in mutants
]
