"""Faults of the mma kernels of the backward pass, as data."""

from mutants import Mutant, without

OF_ROWS = (
    Mutant("shift with its sign", "found = -natural * BASE", "found = natural * BASE"),
    Mutant("shift in nature's base", "found = -natural * BASE", "found = -natural"),
    Mutant("a row that attends nothing", "if natural != NEG_INF:", "if True:"),
    Mutant("no dLSE", "number -= dlse[b", "number -= 0 * dlse[b"),
    Mutant("dLSE of head 0", " + h * l_stride[1] + i", " + i"),
    Mutant("delta of a lane", "number = warp_sum(number)\n", "pass\n"),
    Mutant("delta of the first pair", "for u, v in pairs:", "for u, v in list(pairs)[:1]:"),
    Mutant(
        "O in dO's layout",
        "o_at = b * o_stride[0] + i * o_stride[1]",
        "o_at = b * do_stride[0] + i * do_stride[1]",
    ),
    Mutant("delta of what dropout leaves", "number * share", "number"),
    without("clearing", "clear(total, types.int64(row) * WIDTH + at, ZERO)"),
    Mutant(
        "half of a row cleared",
        "range(4 * lane, WIDTH, 4 * WARP)",
        "range(4 * lane, WIDTH // 2, 4 * WARP)",
    ),
    Mutant("LSE of head 0", "lse[types.int64(bh) * nq + i]", "lse[i]"),
    Mutant("dQ without factor", "x[n] * factor, x[n + 1] * factor", "x[n], x[n + 1]"),
    Mutant(
        "dQ of rows below",
        "store_row(dq, to >> 1, upper, factor)",
        "store_row(dq, to >> 1, below, factor)",
    ),
    Mutant("rows of dQ past the end", "if row + 8 < nq:", "if True:"),
    Mutant("rows of dQ side by side", "(to + 8 * stride[1]) >> 1", "(to + stride[1]) >> 1"),
    Mutant("dQ of head 0", "b * stride[0] + h * stride[2] + row", "b * stride[0] + row"),
    Mutant("four of dQ in another order", "quads[q][2 * i + e]", "quads[q][2 * e + i]"),
    Mutant("dQ in another order", "by_element[2 * i + e][q]", "by_element[2 * e + i][q]"),
    Mutant("columns of dQ past the end", "if column < CHUNKS and row < nq:", "if row < nq:"),
)
OF_DQ = (
    Mutant(
        "dS of the first warp",
        "thread // 32 * (16 * M_TILES) + lane // 4, lane % 4",
        "lane // 4, lane % 4",
    ),
    Mutant("dS in the upper rows", "16 * t + 8 * below", "16 * t"),
    Mutant("dS of one word", "store(smem, at + place + word", "store(smem, at + place"),
    Mutant("dQ of the first queries", "warp // PARTS * TILES, warp", "warp * 0, warp"),
    Mutant("dQ of the first columns", "warp % PARTS * (COLUMNS // 16)", "warp * 0"),
    Mutant(
        "pieces of dQ in one place",
        "piece = (t * PIECES + j) * PIECE",
        "piece = t * PIECES * PIECE",
    ),
    Mutant("rows of dQ in one place", "piece = (t * PIECES + j) * PIECE", "piece = j * PIECE"),
    Mutant("lanes of dQ in one place", "(lane * 4 if cfg.vector_red else lane)", "lane * 0"),
    Mutant("part of dQ over the first", "base + (x_step * PIECES + b_step * 2) * PIECE", "base"),
)
OF_WALKS = (
    Mutant(
        "shift for delta",
        "send_chunk(types.int32(to + 4 * LENGTH), delta",
        "send_chunk(types.int32(to + 4 * LENGTH), shift",
    ),
    Mutant("numbers of half a tile", "if thread < LENGTH // 4:", "if thread < LENGTH // 8:"),
    Mutant("head 0", "opaque(b) * strides[0] + opaque(h) * strides[2]", "opaque(b) * strides[0]"),
    Mutant("batch 0", "opaque(b) * strides[0] + opaque(h) * strides[2]", "opaque(h) * strides[2]"),
    Mutant("row 0", " + row * strides[1]", ""),
    Mutant("keys of the query head", "head, _ = divmod_int32(h, group)", "head = h"),
    Mutant("one tile over the other", "types.int32(ring + OTHER), place_of", "ring, place_of"),
    Mutant("tiles in the first stage", "first + RING + stage * STAGE_BYTES", "first + RING"),
    Mutant(
        "numbers in the first stage", "first + NUMBERS + stage * (8 * LENGTH)", "first + NUMBERS"
    ),
    Mutant(
        "numbers of head 0",
        "types.int64(opaque(b) * heads + h) * padded",
        "types.int64(opaque(b) * heads) * padded",
    ),
    Mutant(
        "second kept tile over the first",
        "types.int32(first + SECOND), place_of",
        "first, place_of",
    ),
    Mutant("empty heads are walked", "        if t < end:\n            break\n", "        break\n"),
    Mutant(
        "one head of a group",
        "    h = types.int32(h + 1)\n    return first_tile",
        "    h = last\n    return first_tile",
    ),
    Mutant(
        "first tile of a head again",
        "t = types.int32(t + 1)\n    if t < end:",
        "if t + 1 < end and h < 0:",
    ),
)
BACKWARDS = (
    Mutant(
        "first head of all",
        "types.int32(h_kv * group), types.int32((h_kv + 1) * group)",
        "types.int32(0), types.int32(group)",
    ),
    Mutant(
        "kept rows past the end",
        "valid = types.int32(kept_length - kept_row)\n",
        "valid = types.int32(KEPT)\n",
    ),
    Mutant(
        "walked rows past the end",
        "valid = types.int32(length - begin)",
        "valid = types.int32(LENGTH)",
    ),
    Mutant(
        "waits for one group less",
        "cp_async_wait(max(STAGES - 2, 0))",
        "cp_async_wait(max(STAGES - 1, 0))",
    ),
    Mutant(
        "tile looked at for finite",
        "if tile_kind != FULL:\n                    careful = scan",
        "if tile_kind == -77:\n                    careful = scan",
    ),
    Mutant(
        "second tile taken for finite",
        "careful = types.int32(careful | scan(smem, at + OTHER // 4, thread))",
        "pass",
    ),
    Mutant("K taken for finite", "if ATOMIC and not met:", "if False:"),
    Mutant("units not poisoned", "units = poison_units(units, kept_at)", "pass"),
    Mutant("numbers of stage 0", "at + stage * (2 * LENGTH) + left", "at + left"),
    Mutant(
        "numbers of the first lane", "at + stage * (2 * LENGTH) + left", "at + stage * (2 * LENGTH)"
    ),
    Mutant(
        "S of the first stage",
        "gemm_s(S_START, kept_at, staged(by_columns, stage))",
        "gemm_s(S_START, kept_at, by_columns)",
    ),
    Mutant(
        "dP of Q", "types.int32(staged(by_columns, stage) + OTHER)", "staged(by_columns, stage)"
    ),
    Mutant(
        "dP of K",
        "gemm_dp(S_START, types.int32(kept_at + SECOND), second)",
        "gemm_dp(S_START, kept_at, second)",
    ),
    Mutant(
        "nothing hidden",
        "        if not FULL_TILES and tile_kind != FULL:\n                plane",
        "        if False:\n                plane",
    ),
    Mutant(
        "plane of the first head", "plane = plane_of[b * heads + h]", "plane = plane_of[b * heads]"
    ),
    Mutant("deltas are shifts", "types.int32(at + LENGTH)", "at"),
    Mutant(
        "deltas of keys",
        "own_shifts, own_deltas = numbers_of(shift, at, top), numbers_of(delta,",
        "own_shifts, own_deltas = numbers_of(shift, at, top), numbers_of(shift,",
    ),
    Mutant("P not poisoned", "packed = poison_rows(packed, types.int32(one + OTHER))", "pass"),
    Mutant("dV of what was dropped", "packed = drop_packed(packed, kept_words)", "pass"),
    Mutant("dP of what was dropped", "acc_dp = drop_values(acc_dp, kept_words)", "pass"),
    Mutant("no slopes", "slopes_of = cfg.score if", "slopes_of = None if"),
    Mutant(
        "dS of what is hidden",
        "ds = pack(gradients_masked(p, acc_s, acc_dp, deltas))",
        "ds = pack(gradients(p, acc_s, acc_dp, deltas))",
    ),
    Mutant("tile not cleaned", "clean(smem, to, opaque(thread))", "pass"),
    Mutant("second tile not cleaned", "clean(smem, to + OTHER // 4, opaque(thread))", "pass"),
    Mutant("dV of Q", "gemm(acc_1, packed, types.int32(one + OTHER))", "gemm(acc_1, packed, one)"),
    Mutant(
        "dK of P",
        "acc_2 = gemm(acc_2, ds, one)",
        "acc_2 = gemm(acc_2, packed if WITH_DV else ds, one)",
    ),
    Mutant(
        "dQ of the first head",
        "types.int64(b * heads + h) * padded + start",
        "types.int64(b * heads) * padded + start",
    ),
    Mutant("dQ of the first tile", "h) * padded + start) * WIDTH", "h) * padded) * WIDTH"),
    Mutant("dV without factor", "acc_1 = times(acc_1, dropping[1])", "pass"),
    Mutant("dK without factor", "scale *= dropping[1]", "pass"),
    Mutant(
        "dV over dK",
        "pack_acc(acc_1), smem, second, thread)",
        "pack_acc(acc_1), smem, word, thread)",
    ),
    Mutant(
        "dK not scaled",
        "packed = pack_acc(times(acc_2, scale))\n            store_rows(dk",
        "packed = pack_acc(acc_2)\n            store_rows(dk",
    ),
    Mutant(
        "dQ not scaled",
        "packed = pack_acc(times(acc_2, scale))\n            store_rows(dq",
        "packed = pack_acc(acc_2)\n            store_rows(dq",
    ),
    Mutant("results of the first warp", "types.int64(kept_row + own)", "types.int64(kept_row)"),
    Mutant(
        "results past the end", "types.int32(kept_length - kept_row - own)", "types.int32(KEPT)"
    ),
    Mutant(
        "dK in V's layout",
        "b * dk_stride[0] + h_kv * dk_stride[2] + row * dk_stride[1]",
        "b * dk_stride[0] + h_kv * dv_stride[2] + row * dv_stride[1]",
    ),
    Mutant("dQ of the last head", "(last - 1) * dq_stride[2]", "(heads - 1) * dq_stride[2]"),
    Mutant("sign of the scale", "LENGTH, TILE, negate=cfg.negate)", "LENGTH, TILE)"),
    Mutant(
        "kept tile of the first warp",
        "M_TILES, LENGTH, TILE_M, TILE_N)",
        "M_TILES, LENGTH, TILE_N, TILE_M)",
    ),
)
