"""Faults of ``fwd_simt``, as data."""

from mutants import Mutant

WAIT, LANDED = "wait(smem)\n", "cuda.syncthreads()  # V is in place, and P\n"
SENDING = (
    Mutant(
        "V sent with K's row stride", "send_v(smem, V, v, v_at, v_", "send_v(smem, V, v, v_at, k_"
    ),
    Mutant("V sent to K's place", "send_v(smem, V, v,", "send_v(smem, K, v,"),
    Mutant("K sent for V", "send_v(smem, V, v, v_at", "send_v(smem, V, k, v_at"),
    Mutant(
        "V sent from the next tile",
        "v, v_at, v_stride[1], nk",
        "v, v_at + TILE_N * v_stride[1], v_stride[1], nk",
        0,
        2,
    ),
    Mutant(
        "V sent from past the end",
        "v_at, v_stride[1], nk - n0, tid",
        "v_at, v_stride[1], TILE_N, tid",
    ),
    Mutant(
        "V sent as if no row were valid",
        "v_at, v_stride[1], nk - n0, tid",
        "v_at, v_stride[1], 1, tid",
    ),
    Mutant("wait only for the first V", WAIT, "t == begin and wait(smem)\n"),
    Mutant(
        "wait for V after the barrier",
        WAIT + " " * 16 + LANDED,
        "cuda.syncthreads()\n" + " " * 16 + WAIT,
    ),
    Mutant("warp barrier for V of all threads", LANDED, "cuda.syncwarp()\n"),
)
FORWARD = (
    *SENDING,
    Mutant(
        "batch and head swapped", "b, h = bh // heads, bh % heads", "h, b = bh // heads, bh % heads"
    ),
    Mutant("plane of the head only", "plane = plane_of[bh]", "plane = plane_of[h]"),
    Mutant(
        "key head of another group",
        "k_base = b * k_stride[0] + (h // group)",
        "k_base = b * k_stride[0] + (h % group)",
    ),
    Mutant(
        "value head of another group",
        "v_base = b * v_stride[0] + (h // group)",
        "v_base = b * v_stride[0] + (h % group)",
    ),
    Mutant("K with V's batch stride", "k_base = b * k_stride[0]", "k_base = b * v_stride[0]"),
    Mutant(
        "V with K's row stride",
        "fill_v(smem, V, v, v_at, v_stride[1]",
        "fill_v(smem, V, v, v_at, k_stride[1]",
    ),
    Mutant("Q tile without its row offset", " + q0 * q_stride[1]", ""),
    Mutant(
        "Q rows past the end are read",
        "q_stride[1], nq - q0, scale",
        "q_stride[1], nq, scale",
    ),
    Mutant("K rows past the end are read", "k_at, k_stride[1], nk - n0", "k_at, k_stride[1], nk"),
    Mutant("scale dropped", "nq - q0, scale, tid", "nq - q0, ONE, tid"),
    Mutant("query tile of the wrong height", "q0 = row * TILE_M", "q0 = row * TILE_N"),
    Mutant("key tile of the wrong width", "n0 = col_idx[t] * TILE_N", "n0 = col_idx[t] * TILE_M"),
    Mutant("walk of plane 0", "row_ptr[plane * n_row + row],", "row_ptr[row],"),
    Mutant(
        "walk ends a tile early",
        "row_ptr[plane * n_row + row + 1]\n",
        "row_ptr[plane * n_row + row + 1] - 1\n",
    ),
    Mutant(
        "walk starts a tile late", "for t in range(begin, end)", "for t in range(begin + 1, end)"
    ),
    Mutant("V at K's place in its head", "v_base + n0 * v_stride[1]", "k_base + n0 * v_stride[1]"),
    Mutant(
        "warp barrier where K is overwritten",
        "cuda.syncthreads()  # every thread has read the last",
        "cuda.syncwarp()  # every thread has read the last",
    ),
    Mutant("bit tiles unmasked", "if kind[t] != FULL:\n", "if kind[t] == 1:\n"),
    Mutant("interval tiles unmasked", "if kind[t] != FULL:\n", "if kind[t] > FULL:\n"),
    Mutant(
        "bounds of plane 0",
        "first, last = plane * nq, plane * nq + nq - 1",
        "first, last = 0, nq - 1",
    ),
    Mutant("bounds past the last row", "plane * nq + nq - 1", "plane * nq + nq"),
    Mutant("maximum not kept", "            m = m_new\n", ""),
    Mutant("alpha upside down", "rescale(m, m_new)", "rescale(m_new, m)"),
    Mutant("O not rescaled", "acc = scale_rows(acc, alpha)", "acc = scale_rows(acc, (ONE,) * RM)"),
    Mutant(
        "hidden NaN in V counts", "if kind[t] != FULL and not finite(smem, V, tid):", "if False:"
    ),
    Mutant(
        "NaN only looked for in full tiles",
        "if kind[t] != FULL and not finite",
        "if kind[t] == FULL and not finite",
    ),
    Mutant("l of one lane only", "        l = row_total(l)\n", ""),
    Mutant("O multiplied by l", "scale_rows(acc, inverse(l))", "scale_rows(acc, l)"),
    Mutant(
        "O rows past the end are stored", "o_stride[1], nq - q0, ONE", "o_stride[1], TILE_M, ONE"
    ),
    Mutant("O with Q's row stride", "out, o_base, o_stride[1]", "out, o_base, q_stride[1]"),
    Mutant(
        "lse past the end is stored",
        "range(tid, min(TILE_M, nq - q0), THREADS)",
        "range(tid, TILE_M, THREADS)",
    ),
    Mutant(
        "first lse not stored",
        "range(tid, min(TILE_M, nq - q0), THREADS)",
        "range(tid + 1, min(TILE_M, nq - q0), THREADS)",
    ),
    Mutant("lse of an empty row is zero", "value = NEG_INF\n", "value = ZERO\n"),
    Mutant("lse without the sum", " + ACC(math.log2(total))", ""),
    Mutant("lse in base 2", "ACC(math.log2(total))) * ACC(LN2)", "ACC(math.log2(total)))"),
    Mutant("lse of keys, not queries", "lse[bh * nq + q0 + i]", "lse[bh * nk + q0 + i]"),
    Mutant("maximum and sum swapped", "smem[P + TILE_M + i] + ACC", "smem[P + i] + ACC"),
    Mutant("P without its row order", "// 4 * SKEW + ROWS[i]", "// 4 * SKEW + i"),
    Mutant("P stored without its skew", " + COLUMNS[j] // 4 * SKEW", ""),
    Mutant("P of a thread without its skew", "tx * (4 * LDM + SKEW)", "tx * (4 * LDM)"),
    Mutant("P read without its skew", "skew=SKEW", "skew=0"),
    Mutant("O without its row order", "(ROWS[i] * LD + COLUMNS[c])", "(i * LD + COLUMNS[c])"),
    Mutant(
        "scores miss the last columns",
        "HEAD_DIM, unroll=cfg.unroll",
        "HEAD_DIM - 1, unroll=cfg.unroll",
    ),
    Mutant("O misses the last keys", "            TILE_N,\n", "            TILE_N - 4,\n"),
    Mutant(
        "Q of the key head",
        "q_base = b * q_stride[0] + h * q_stride[2]",
        "q_base = b * q_stride[0] + (h // group) * q_stride[2]",
    ),
    Mutant("O with Q's batch stride", "o_base = b * o_stride[0]", "o_base = b * q_stride[0]"),
    Mutant(
        "logarithm in float32", "ACC(math.log2(total))", "kinds.float32.numba(math.log2(total))"
    ),
    Mutant(
        "tiles of V as far apart as K's", "v_base + n0 * v_stride[1]", "v_base + n0 * k_stride[1]"
    ),
    Mutant(
        "mask of a tile on its side",
        "COLUMNS[:RN], TILE_M, TILE_N)",
        "COLUMNS[:RN], TILE_N, TILE_M)",
    ),
    Mutant("mask at the transposed place", "bits, 4 * ty, 4 * tx)", "bits, 4 * tx, 4 * ty)"),
)
