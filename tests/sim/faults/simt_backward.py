"""Faults of ``bwd_simt`` and of what runs before and after it, as data."""

from mutants import Mutant

BWD, GRADIENT = "nbflash.backends.simt.backward", "nbflash.cuda.tile.simt.gradient"
DELTA, ROUND = "nbflash.backends.simt.row_statistics", "nbflash.backends.simt.convert_dq"
EXECUTOR = "nbflash.backends.simt.executor"
MASKED = """\
if kind[t] != FULL:
                        first, last = plane * nq, plane * nq + nq - 1
                        x = apply_mask(
                            x, kind[t], lo, hi, first, last, m0, n0, bits, 4 * ty, 4 * tx
                        )
"""
BACKWARD = (
    Mutant("delta added", "x * (y - row_delta[i])", "x * (y + row_delta[i])"),
    Mutant(
        "hidden NaN in V counts",
        "ds += [select(equal(x, 0.0), 0.0, y) for x, y in zip(p, values, strict=True)]",
        "ds += values",
    ),
    Mutant(
        "scores not masked",
        "if kind[t] != FULL:\n                        first",
        "if False:\n                        first",
    ),
    Mutant(
        "bit tiles unmasked",
        "if kind[t] != FULL:\n                        first",
        "if kind[t] == 1:\n                        first",
    ),
    Mutant(
        "lse of hidden scores counts",
        f"x = exponents(smem, x, STATS + 4 * ty)\n{20 * ' '}{MASKED}",
        f"{MASKED}{20 * ' '}x = exponents(smem, x, STATS + 4 * ty)\n",
    ),
    Mutant(
        "bounds of plane 0",
        "first, last = plane * nq, plane * nq + nq - 1",
        "first, last = 0, nq - 1",
    ),
    Mutant("hidden NaN in K counts", " and finite_n(smem, K, tid)", ""),
    Mutant("rows of keys", "row_base = (b * heads + h) * nq", "row_base = (b * heads + h) * nk"),
    Mutant("rows without the head", "row_base = (b * heads + h) * nq", "row_base = b * heads * nq"),
    Mutant(
        "rows without the tile",
        "lse, delta, row_base + m0, nq - m0",
        "lse, delta, row_base, nq - m0",
    ),
    Mutant(
        "one head of each group",
        "first_head, n_heads = h_kv * group, group",
        "first_head, n_heads = h_kv * group, 1",
    ),
    Mutant(
        "heads of another group",
        "first_head, n_heads = h_kv * group, group",
        "first_head, n_heads = h_kv, group",
    ),
    Mutant(
        "query head of keys",
        "b, h_kv = bh // heads, bh % heads // group",
        "b, h_kv = bh // heads, bh % heads % group",
    ),
    Mutant("plane without the batch", "plane = plane_of[b * heads + h]", "plane = plane_of[h]"),
    Mutant("walk of plane 0", "row_ptr[plane * n_row + tile], row_ptr", "row_ptr[tile], row_ptr"),
    Mutant(
        "walk ends a tile early",
        "row_ptr[plane * n_row + tile + 1]",
        "row_ptr[plane * n_row + tile + 1] - 1",
    ),
    Mutant("scale in the scores only", "dq_acc, scale)", "dq_acc, ONE)"),
    Mutant("scale dropped", "nq - m0, q_factor, tid", "nq - m0, ONE, tid"),
    Mutant("dK in base 2", "nk - n0, FROM_Q, tid", "nk - n0, ONE, tid"),
    Mutant(
        "dV with K's row stride",
        "fill_kt(smem, VT, v, at, v_stride[1]",
        "fill_kt(smem, VT, v, at, k_stride[1]",
    ),
    Mutant("dO with Q's row stride", "dout, at, do_stride[1]", "dout, at, q_stride[1]"),
    Mutant("dO without its tile", "at = do_base + m0 * do_stride[1]", "at = do_base"),
    Mutant(
        "V of another head", "b * v_stride[0] + h_kv * v_stride[2] + n0", "b * v_stride[0] + n0"
    ),
    Mutant(
        "halves swapped", "(Q, KT) if half == 0 else (DO, VT)", "(Q, KT) if half == 1 else (DO, VT)"
    ),
    Mutant(
        "dV and dK swapped",
        "(P, DO) if half == 0 else (DS, Q)",
        "(P, DO) if half == 1 else (DS, Q)",
    ),
    Mutant(
        "dQ of the first half's columns twice",
        "q_column = half * (WIDTH // 2) + 4 * tx",
        "q_column = 4 * tx",
    ),
    Mutant(
        "dQ accumulates over rows", "start = DQ_START if COLUMNS_WALK else dq_acc", "start = dq_acc"
    ),
    Mutant("dQ forgets", "start = DQ_START if COLUMNS_WALK else dq_acc", "start = DQ_START"),
    Mutant(
        "dQ of the last rows scattered",
        "                inside = m < valid\n",
        "                inside = m >= 0\n",
    ),
    Mutant("dQ of padding columns scattered", "inside = both(inside, d < HEAD_DIM)", "pass"),
    Mutant(
        "depth beyond the zero columns",
        "DEPTH = -(-HEAD_DIM // 4) * 4",
        "DEPTH = -(-HEAD_DIM // 8) * 8",
    ),
    Mutant("K only for the first head", "not in_place:", "(t == begin and h == first_head):"),
    Mutant(
        "K never again in a row walk", "if not COLUMNS_WALK or not in_place:", "if not in_place:"
    ),
    Mutant("Q only once in a column walk", "if COLUMNS_WALK or t == begin:", "if t == begin:"),
    Mutant("hidden NaN in Q counts", "finite_m(smem, Q, tid)\n", "True\n"),
    Mutant("hidden NaN in dO counts", "and finite_m(smem, DO, tid)\n", "and True\n"),
    Mutant("atomics of every second column", "width = 4 if cfg.vector_red else 1", "width = 4"),
    Mutant("dQ not scaled by columns", "x * scale, 0.0)", "x, 0.0)"),
    Mutant(
        "dV past the end",
        "drain_n(smem, K, dv, v_at, dv_stride[1], nk - n0",
        "drain_n(smem, K, dv, v_at, dv_stride[1], TILE_N",
    ),
    Mutant("dK at dV's place", "dk, k_at, dk_stride[1]", "dk, v_at, dk_stride[1]"),
    Mutant("dQ without the head", " + bh % heads * dq_stride[2]", ""),
    Mutant("dO with Q's batch stride", "do_base = b * do_stride[0]", "do_base = b * q_stride[0]"),
    Mutant(
        "sums of dQ beyond the end",
        "at = select(inside, base + stride * m + d, base)",
        "at = base + stride * m + d",
    ),
    Mutant("statistics of the next rows", "load4(smem, at + ROWS[i])", "load4(smem, at + i)"),
    Mutant(
        "dQ without its column order",
        "(ROWS[i] * LD + COLUMNS[c]), dq[i * RQ",
        "(ROWS[i] * LD + c), dq[i * RQ",
    ),
    Mutant(
        "NaN of K looked for in tile_m rows", "finite_n(smem, K, tid)", "finite_m(smem, K, tid)"
    ),
    Mutant(
        "dQ summed at the key head",
        "at = b * dq_stride[0] + h * dq_stride[2]",
        "at = b * dq_stride[0] + h_kv * dq_stride[2]",
    ),
    Mutant("dK with K's batch stride", "k_at = b * dk_stride[0]", "k_at = b * k_stride[0]"),
)
# Shared with ``dscore_simt``.
GRADIENTS = (
    Mutant(
        "rows past the end count",
        "row_lse, row_delta = ACC(math.inf), ZERO",
        "row_lse, row_delta = ZERO, ZERO",
    ),
    Mutant("empty rows not guarded", "if natural != ACC(-math.inf):", "if True:"),
    Mutant("natural lse in base 2", "natural * ACC(LOG2_E)", "natural"),
    Mutant("delta dropped", "row_delta = ACC(delta[at + i])", "row_delta = ZERO"),
    Mutant("lse of the first rows", "lse[at + i]", "lse[i]"),
    Mutant("P transposed", "row * ld + columns[j]", "row + columns[j] * ld"),
)

ROW_KERNELS = (
    (
        DELTA,
        Mutant(
            "batch and query swapped",
            "row // heads % nq, row // heads // nq",
            "row // heads // nq, row // heads % nq",
        ),
    ),
    (DELTA, Mutant("rows past the end", "if row < rows:", "if row <= rows:")),
    (DELTA, Mutant("O with dO's row stride", "i * o_stride[1]", "i * do_stride[1]")),
    (DELTA, Mutant("one lane only", "total = warp_sum(total)", "total = total * 1")),
    (DELTA, Mutant("delta by query first", "(b * heads + h) * nq + i", "(b * nq + i) * heads + h")),
    (
        DELTA,
        Mutant(
            "first element twice", "to_accumulator(out[o_base + d])", "to_accumulator(out[o_base])"
        ),
    ),
    (DELTA, Mutant("dlse added", "total - dlse[at]", "total + dlse[at]")),
    (DELTA, Mutant("dlse dropped", "total - dlse[at]", "total")),
    (DELTA, Mutant("dlse of the first batch", "at = b * l_stride[0] + h", "at = h")),
    (
        DELTA,
        Mutant(
            "dlse by query and head",
            "h * l_stride[1] + i * l_stride[2]",
            "i * l_stride[1] + h * l_stride[2]",
        ),
    ),
    (EXECUTOR, Mutant("dlse with O's strides", "(dout, out, dlse))\n", "(dout, out, out))\n")),
    (ROUND, Mutant("target with the source's stride", "i * t_stride[1]", "i * s_stride[1]")),
    (ROUND, Mutant("last column not written", "HEAD_DIM, WARP)", "HEAD_DIM - 1, WARP)")),
    (EXECUTOR, Mutant("atomics add to what was there", "                target.fill(0)\n", "")),
    (
        EXECUTOR,
        Mutant(
            "columns walked as rows", "schedule, group = schedule.T, p.group", "group = p.group"
        ),
    ),
    (
        EXECUTOR,
        Mutant(
            "strides of out are q's",
            "qkv_strides, arrays.strides(out)",
            "qkv_strides, arrays.strides(q)",
        ),
    ),
    (EXECUTOR, Mutant("base e in base 2", "scale, self.score is not None)", "scale, True)")),
    (
        EXECUTOR,
        Mutant(
            "lse as it lies",
            "lse = lse if lse.flags.c_contiguous else lse.copy()",
            "lse = lse[...]",
        ),
    ),
    (
        EXECUTOR,
        Mutant(
            "passes of another alignment", "key = deterministic, vectors", "key = deterministic"
        ),
    ),
)
SURVIVORS = {
    "simt.backward: bwd_simt: syncthreads 9 deleted": (
        "a row walk reads only dS and K after its last barrier, and dQ goes to Q's place"
    ),
}
