"""Faults of ``decode_simt``, its tile functions and what binds it, as data."""

from mutants import Mutant

KERNEL = "nbflash.backends.simt.decode"
TILES = "nbflash.cuda.tile.simt"
GATHER, SLOTS, SCORES = (f"{TILES}.{name}" for name in ("paged_rows", "slots", "row_scores"))
SHARES, BINDING, CUDA = (
    "nbflash.backends.split_kv.splits",
    "nbflash.backends.simt.decode_host",
    "nbflash.planning.decode_plan",
)
CHAIN = (GATHER, SLOTS, SCORES, KERNEL, SHARES, BINDING, CUDA)  # in the order of their imports

KERNEL_MUTANTS = (
    Mutant(
        "batch and head swapped", "b, h = divmod_int32(bh, heads)", "h, b = divmod_int32(bh, heads)"
    ),
    Mutant("item and split swapped", "item, split = divmod_int32(", "split, item = divmod_int32("),
    Mutant("key head of a query head", "divmod_int32(h, group), NOWHERE", "(h, 0), NOWHERE"),
    Mutant("lengths of the first sequence", "lengths[b]", "lengths[0]"),
    Mutant("causal rule a key short", "own + right + 1)", "own + right)"),
    Mutant("causal rule a key long", "own + right + 1)", "own + right + 2)"),
    Mutant("causal rule of the first tile", "length - nq + q0)", "length - nq)"),
    Mutant("only the first token's keys", "min(high + QUERIES - 1, length)", "min(high, length)"),
    Mutant("window a key short", "own - left)", "own - left + 1)"),
    Mutant("window a key long", "own - left)", "own - left - 1)"),
    Mutant("window of the first token", "low + QUERIES - 1  #", "low  #"),
    Mutant("window ignored where all keys are seen", " or n0 < seen_from", ""),
    Mutant("tiles before the window", "types.int32(max(first, 0))", "types.int32(0)"),
    Mutant("listed tiles before the window", "if first_tile > 0:", "if first_tile < 0:"),
    Mutant("tokens before the first key", "limit = types.int32(0)", "limit = limit + 0"),
    Mutant(
        "scores of the first sequence", "scored(scores(rq, rk), b, h", "scored(scores(rq, rk), 0, h"
    ),
    Mutant("plane of the batch", "plane_of[packed]", "plane_of[b]"),
    Mutant("walk of the first query tile", "plane * n_row + row,", "plane * n_row,"),
    Mutant("share rounded down", "end - begin + splits - 1", "end - begin"),
    Mutant("share past its end", "first, min(first + count, end)", "first, first + count"),
    Mutant("every split takes all", "first = begin + split * count", "first = begin"),
    Mutant("a tile before the length left out", "types.int32(n + TILE_N - 1)", "types.int32(n)"),
    Mutant("keys of all slots alike", "tile * TILE_N + slot", "tile * TILE_N"),
    Mutant("the list's index as a tile", "col_idx[t] if MASKED else t", "t"),
    Mutant("pages of this tile for the next", "first_key(col_idx, t + 1, slot)", "key"),
    Mutant("table of the first sequence", "b * table_stride", "0 * table_stride"),
    Mutant("scale dropped", "nq - 1 - q0, scale", "nq - 1 - q0, ACC(1)"),
    Mutant("tokens past the end", "nq - 1 - q0, scale", "nq, scale"),
    Mutant("Q of the first tile", "q0 * q_stride[1]", "0 * q_stride[1]"),
    Mutant("nothing hidden", "hidden = n0 + TILE_N > limit", "hidden = False"),
    Mutant("hidden by the tile's number", "(s, key, own, low", "(s, n0, own, low"),
    Mutant("mask ignored", "if MASKED and kind[t] != FULL", "if MASKED and kind[t] == FULL"),
    Mutant("bounds of plane 0", "plane * nq, plane * nq + nq - 1", "0, nq - 1"),
    Mutant("NaN under the mask counts", "                hidden = True\n", ""),
    Mutant(
        "NaN behind the limit counts",
        "add_careful(acc, alpha, p, rv)\n            else",
        "add(acc, alpha, p, rv)\n            else",
    ),
    Mutant("maximum not kept", "            m = m_new\n", ""),
    Mutant("alpha upside down", "rescale(m, m_new)", "rescale(m_new, m)"),
    Mutant("slots not rescaled", "alpha = rescale(m, m_warp)", "alpha = rescale(m, m)"),
    Mutant("maximum of one slot", "m_warp = joint_max(m)", "m_warp = m"),
    Mutant("l of one slot", "joint_sum(scale_l(l, alpha))", "scale_l(l, alpha)"),
    Mutant("O of one slot", "joint_sum(scale_rows(acc, alpha))", "scale_rows(acc, alpha)"),
    Mutant("maximum of one warp", "m = larger(m, smem[M + w * ROWS + r])", "m = smem[M + r]"),
    Mutant("l of one warp", "f * smem[L + w * ROWS + r]", "f * smem[L + r]"),
    Mutant("O of one warp", "f * smem[(w * ROWS + r) * WIDTH + d]", "f * smem[r * WIDTH + d]"),
    Mutant("warps not rescaled", "f = weight(", "f = weight(m, m) or ("),
    Mutant("O not divided", "                o /= l_row\n", ""),
    Mutant("lse of no key is zero", "value = MINUS_INF", "value = ZERO"),
    Mutant("lse in base 2", "(m_row + ACC(math.log2(l_row))) * ACC(LN2)", "m_row"),
    Mutant("rows past the end stored", "min(QUERIES, nq - q0)", "QUERIES"),
    Mutant(
        "tokens as heads",
        "token, at_head = divmod_int32(r, PACK)",
        "at_head, token = divmod_int32(r, PACK)",
    ),
    Mutant("part of another split", "split * batch + b", "split + b"),
    Mutant("statistics of one row", "store(smem, at + (L + r), l[r])", "store(smem, at + L, l[r])"),
    Mutant("O's columns in another order", "c * LANES), quad", "c), quad"),
    Mutant(
        "a tile but for its last key",
        "hidden = n0 + TILE_N > limit",
        "hidden = n0 + TILE_N - 1 > limit",
    ),
    Mutant(
        "bit tiles of all rows",
        "[u * SLOTS for u in range(KEYS)], QUERIES, TILE_N",
        "[u * SLOTS for u in range(KEYS)], ROWS, TILE_N",
    ),
    Mutant(
        "LSE of parts as O lies",
        "(sequence * heads + at_head) * nq + token",
        "(sequence * nq + token) * heads + at_head",
    ),
    Mutant(
        "m of a slot for its warp's O",
        "store_stats(smem, warp * ROWS, m_warp, l)",
        "store_stats(smem, warp * ROWS, m, l)",
    ),
    Mutant("pages of a tile behind the last", "if t + 1 < end:", "if t < end:"),
    Mutant(
        "lengths beyond the capacity",
        "length = min(max(lengths[b], 0), capacity)",
        "length = max(lengths[b], 0)",
    ),
    Mutant("logarithm of nothing", "            if l_row != ZERO:\n", "            if True:\n"),
)
GATHER_MUTANTS = (
    Mutant("keys past the length read", "select(k < length, k, length - 1)", "k"),
    Mutant(
        "one key too many", "select(k < length, k, length - 1)", "select(k < length + 1, k, length)"
    ),
    Mutant("keys of a slot side by side", "first + u * slots", "first + u"),
    Mutant("the first page", "at + k // page_size", "at"),
    Mutant("pages of the first sequence", "at + k // page_size", "k // page_size"),
    Mutant("places within a page forgotten", "(k % page_size)", "k"),
    Mutant("the first head", "of_head * head", "of_head * 0"),
    Mutant("values of the keys", "places[which * keys : (which + 1) * keys]", "places[:keys]"),
    Mutant(
        "scales of the keys",
        "places[(2 + which) * keys : (3 + which) * keys]",
        "places[2 * keys : 3 * keys]",
    ),
    Mutant("scales dropped", "[x * f for x in row]", "list(row)"),
    Mutant(
        "columns past the end count",
        "    if cfg.head_dim == cfg.width:\n        return values\n",
        "    return values\n",
    ),
    Mutant("heads as tokens in Q", "of_head * (r % cfg.pack)", "of_head * (r // cfg.pack)"),
    Mutant(
        "tokens as heads in Q", "select(last < r // cfg.pack, last, r // cfg.pack)", "r % cfg.pack"
    ),
    Mutant(
        "Q past the last token",
        "select(last < r // cfg.pack, last, r // cfg.pack)",
        "r // cfg.pack",
    ),
    Mutant(
        "one column too many", "column + offset < cfg.head_dim", "column + offset <= cfg.head_dim"
    ),
)
SLOTS_MUTANTS = (
    Mutant("scores of one lane", "across_lanes(found, cfg.lanes, operator.add)", "tuple(found)"),
    Mutant("scores without their last column", "pairs[1:]", "pairs[1:-1]"),
    Mutant("O not rescaled", "x * alpha[r] for", "x for"),
    Mutant("weights of the first row", "p[r * cfg.keys + u]", "p[u]"),
    Mutant(
        "every V may hold NaN",
        "make_add(False), make_add(True)",
        "make_add(False), make_add(False)",
    ),
    Mutant("causal rule of the first token", "r // cfg.pack for r", "0 for r"),
    Mutant("causal rule of heads", "r // cfg.pack for r", "r for r"),
    Mutant("a key too many", "key + c < high + step", "key + c < high + step + 1"),
    Mutant("a key too many to the left", "key + c >= low + step", "key + c >= low + step - 1"),
    Mutant("a key too few to the left", "key + c >= low + step", "key + c > low + step"),
    Mutant("windows of the first token", "key + c >= low + step", "key + c >= low"),
    Mutant("keys behind the length", "both(inside, key + c < length)", "inside"),
    Mutant("tokens before the first key", "own + step >= 0", "own + step >= -9"),
    Mutant("keys of a slot alike", "(step, u * cfg.slots)", "(step, 0)"),
    Mutant("neighbouring lanes as slots", "first=cfg.lanes", "first=1"),
    Mutant("half of the slots", "WARP // cfg.lanes", "WARP // cfg.lanes // 2"),
    Mutant(
        "scores by key and row",
        "for step in steps for u in range(cfg.keys)",
        "for u in range(cfg.keys) for step in steps",
    ),
)
SCORES_MUTANTS = (
    Mutant("keys of a slot alike", "(0, u * cfg.slots)", "(0, 0)"),
    Mutant("scores in base e", "return scaled(s, rest(params, ONE, UNIT))", "return s"),
    Mutant("tokens as heads", "(TOKEN, HEAD), ONE", "(HEAD, TOKEN), ONE"),
    Mutant("scores of the first row", "r * cfg.keys, (r + 1)", "0, (0 + 1)"),
    Mutant("slopes of the first head", "hold(head, params", "hold(h, params"),
    Mutant("places of the first head", "at = b, head,", "at = b, h,"),
    Mutant("positions of the first token", "types.int32(own + TOKEN)", "own"),
)
BINDING_MUTANTS = (
    Mutant("scale of natural scores", "(p.scale, score is not None)", "(p.scale, True)"),
    Mutant("scale in base 2 before a score", "(p.scale, score is not None)", "(p.scale, False)"),
    Mutant("K's strides for V", "map(arrays.strides, (k, v))", "map(arrays.strides, (k, k))"),
    Mutant("table as if contiguous", "table.strides[0] // table.itemsize", "table.shape[1]"),
    Mutant(
        "a contiguous cache in pages", "p.capacity if p.page_size is None", "1 if not p.page_size"
    ),
    Mutant(
        "alignment of V not looked at",
        "for x in (q, cache.k_cache, cache.v_cache)",
        "for x in (q, cache.k_cache)",
    ),
)
SHARES_MUTANTS = (
    Mutant("scales by head", "if x.ndim == 3 else", "if x.ndim == 4 else"),
    Mutant("masks of a group as one", "group if (planes == planes[:, :1]).all() else 1", "group"),
    Mutant("planes of single heads", "[::pack]", "[::1]"),
)
MUTANTS = [
    *((KERNEL, mutant) for mutant in KERNEL_MUTANTS),
    *((GATHER, mutant) for mutant in GATHER_MUTANTS),
    *((SLOTS, mutant) for mutant in SLOTS_MUTANTS),
    *((SCORES, mutant) for mutant in SCORES_MUTANTS),
    *((BINDING, mutant) for mutant in BINDING_MUTANTS),
    *((SHARES, mutant) for mutant in SHARES_MUTANTS),
]
