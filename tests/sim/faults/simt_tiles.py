"""Faults of the tile helpers that the kernels are made of, as data: (module, Mutant)."""

from mutants import Mutant

UNROLL, COPY, GEMM = (
    "nbflash.cuda.tile.tracing",
    "nbflash.cuda.tile.convert",
    "nbflash.cuda.tile.simt.gemm",
)
ATOMIC, GUARD = "nbflash.cuda.tile.simt.atomic", "nbflash.cuda.tile.guarded_max"
MASK, SOFTMAX, ASYNC = (
    "nbflash.cuda.tile.simt.mask",
    "nbflash.cuda.tile.simt.softmax",
    "nbflash.cuda.tile.cp_async",
)
CLAMP, PASSES = "row = select(row < valid, row, valid - 1)", "for i in range(passes):"
TILES = (
    (MASK, Mutant("lo off by one", "kv + c >= lo[i]", "kv + c >= lo[i] + 1")),
    (MASK, Mutant("hi off by one", "kv + c < hi[i]", "kv + c < hi[i] + 1")),
    (MASK, Mutant("bounds past the end", "select(p < last, p, last)", "p")),
    (
        MASK,
        Mutant(
            "bounds of the first row",
            "places = [at + r for r in rows]",
            "places = [at + 0 * r for r in rows]",
        ),
    ),
    (
        MASK,
        Mutant(
            "lo without the tile's offset",
            "row_bounds(lo, first + q0 + row",
            "row_bounds(lo, first + row",
        ),
    ),
    (
        MASK,
        Mutant(
            "hi without the tile's offset",
            "row_bounds(hi, first + q0 + row",
            "row_bounds(hi, first + row",
        ),
    ),
    (MASK, Mutant("keys without the tile's offset", "n0 + column)", "column)")),
    (MASK, Mutant("wrong word", "(column + c) // 32", "(column + c) // 64")),
    (MASK, Mutant("wrong bit", "(column + c) % 32)", "(column + c + 1) % 32)")),
    (MASK, Mutant("rows of one word", "+ r * words", "+ r")),
    (MASK, Mutant("bits inverted", "& 1, 0)", "& 1, 1)")),
    (MASK, Mutant("next bit tile", "kind - BITS", "kind - BITS + 1")),
    (
        MASK,
        Mutant(
            "bit tile without the row", "(tile * tile_m + row) * words", "(tile * tile_m) * words"
        ),
    ),
    (
        MASK,
        Mutant(
            "bit tile without the words", "(tile * tile_m + row) * words", "tile * tile_m + row"
        ),
    ),
    (MASK, Mutant("intervals read as bits", "kind == INTERVAL", "kind != INTERVAL")),
    (GUARD, Mutant("no guard against -inf", "select(equal(m, NEG_INF), 0.0, m)", "m")),
    (SOFTMAX, Mutant("maximum of the last tile only", "best = m[i]", "best = row(s, i)[0]")),
    (
        SOFTMAX,
        Mutant(
            "maximum of one lane",
            "across_lanes((best,), tx, maximum)",
            "(best,)",
        ),
    ),
    (SOFTMAX, Mutant("half the lanes", "(best,), tx,", "(best,), tx // 2,")),
    (SOFTMAX, Mutant("total of half the lanes", "(l, tx, ", "(l, tx // 2, ")),
    (SOFTMAX, Mutant("no maximum subtracted", "exp2(x - shift)", "exp2(x)")),
    (
        SOFTMAX,
        Mutant(
            "l not rescaled", "fma(l[i], alpha[i], total(row(p, i)))", "l[i] + total(row(p, i))"
        ),
    ),
    (SOFTMAX, Mutant("l forgets", "fma(l[i], alpha[i], total(row(p, i)))", "total(row(p, i))")),
    (
        SOFTMAX,
        Mutant(
            "empty row divides by zero",
            "select(equal(x, 0.0), 0.0, reciprocal(x))",
            "reciprocal(x)",
        ),
    ),
    (SOFTMAX, Mutant("rows scaled by another row", "* factor[i]", "* factor[0]")),
    (
        COPY,
        Mutant(
            "rows past the end not clamped", CLAMP, "row = select(row < valid, row, valid)", 0, 2
        ),
    ),
    (COPY, Mutant("sent rows not clamped", CLAMP, "row = row", 1, 2)),
    (
        COPY,
        Mutant(
            "sent rows clamped past the end", CLAMP, "row = select(row < valid, row, valid)", 1, 2
        ),
    ),
    (COPY, Mutant("last row sent for all", CLAMP, "row = valid - 1", 1, 2)),
    (COPY, Mutant("sent rows of stride one", "base + stride * from_row", "base + from_row")),
    (COPY, Mutant("first columns sent only", "stride * from_row + column", "stride * from_row")),
    (
        COPY,
        Mutant(
            "sent rows collide",
            "cp_async4(smem, at + row * ld",
            "cp_async4(smem, at + from_row * ld",
        ),
    ),
    (
        COPY,
        Mutant(
            "sent rows without padding",
            "cp_async4(smem, at + row * ld",
            "cp_async4(smem, at + row * width",
        ),
    ),
    (COPY, Mutant("first pass sent again", "places(tid + i * chunk)", "places(tid)")),
    (COPY, Mutant("first pass of the fill again", "first = tid + i * chunk", "first = tid")),
    (COPY, Mutant("first pass of the fill missing", PASSES, "for i in range(1, passes):", 0, 2)),
    (COPY, Mutant("last pass not sent", PASSES, "for i in range(passes - 1):", 1, 2)),
    (
        ASYNC,
        Mutant(
            "one element in two sent", "memory, to, source, at, 4)", "memory, to, source, at, 2)"
        ),
    ),
    (
        ASYNC,
        Mutant(
            "sent four elements early",
            "memory, to, source, at, 4)",
            "memory, to, source, at - 4, 4)",
        ),
    ),
    (
        COPY,
        Mutant(
            "columns past the end read",
            "column = select(inside, column, 0)",
            "column = select(inside, column, head_dim)",
        ),
    ),
    (COPY, Mutant("rows of stride one", "base + stride * row + column", "base + row + column")),
    (COPY, Mutant("factor dropped", "x * factor for x in fragment", "x for x in fragment")),
    (
        COPY,
        Mutant(
            "factor dropped on the way out",
            "at + row * ld + column] * factor",
            "at + row * ld + column]",
        ),
    ),
    (
        COPY,
        Mutant(
            "stores rows that do not exist",
            "if row < valid and column < head_dim:",
            "if column < head_dim:",
        ),
    ),
    (
        COPY,
        Mutant(
            "stores columns that do not exist",
            "if row < valid and column < head_dim:",
            "if row < valid:",
        ),
    ),
    (COPY, Mutant("transposed vectors overlap", "(column + c) * ld_rows", "column * ld_rows")),
    (
        COPY,
        Mutant(
            "transposed rows collide",
            "row + (column + c) * ld_rows",
            "row + (column + c) * rows",
        ),
    ),
    (COPY, Mutant("bfloat16 shifted short", "<< np.uint32(16)", "<< np.uint32(15)")),
    (
        COPY,
        Mutant(
            "half the tile searched for NaN",
            "range(tid, rows * per_row, threads)",
            "range(tid, rows * per_row // 2, threads)",
        ),
    ),
    (
        GEMM,
        Mutant(
            "one column for all", "fma(x, b[j], acc[i * n + j])", "fma(x, b[0], acc[i * n + j])"
        ),
    ),
    (
        GEMM,
        Mutant(
            "accumulates into the next column",
            "new = fma(x, b[j], acc[i * n + j])",
            "new = fma(x, b[j], acc[i * n + (j + 1) % n])",
        ),
    ),
    (GEMM, Mutant("operands of the step before", "            held = ahead\n", "", 0, 2)),
    (GEMM, Mutant("last operands of the step before", "            held = ahead\n", "", 1, 2)),
    (
        GEMM,
        Mutant(
            "last steps of AᵀB elsewhere",
            "finish(state, smem, a + (depth - unroll) * a_mean",
            "finish(state, smem, a",
        ),
    ),
    (GEMM, Mutant("skew of one iteration only", "a_row + skew // 4", "a_row")),
    (GEMM, Mutant("skew between iterations only", "u * a_row + u // 4 * skew", "u * a_row")),
    (GEMM, Mutant("skew every second step", "u // 4 * skew", "u // 2 * skew")),
    (
        GEMM,
        Mutant(
            "iterations break fours of the skew",
            "4 * _steps(depth, 4, unroll) if skew",
            "_steps(depth, 1, 4 * unroll) if skew",
        ),
    ),
    (COPY, Mutant("blocks not transposed", "piece[c::4]", "piece[4 * c : 4 * c + 4]")),
    (COPY, Mutant("one row for a whole block", "valid, row + r, column)", "valid, row, column)")),
    (GEMM, Mutant("zero times NaN", "if skip_zeros else new", "if False else new")),
    (GEMM, Mutant("vectors all the same", "load4(smem, at + i * step)", "load4(smem, at)")),
    (
        GEMM,
        Mutant(
            "first steps of AᵀB skipped",
            "range(0, depth - unroll, unroll)",
            "range(unroll, depth - unroll, unroll)",
        ),
    ),
    (
        GEMM,
        Mutant(
            "last steps of AB skipped",
            "for k in range(0, depth, 4 * unroll):",
            "for k in range(0, depth - 4, 4 * unroll):",
        ),
    ),
    (
        ATOMIC,
        Mutant(
            "plain add instead of atomic",
            "cuda.atomic.add(memory, index, value)",
            "memory[index] = memory[index] + value",
        ),
    ),
    (
        SOFTMAX,
        Mutant(
            "O of nothing rescaled from 0",
            "exp2(m[i] - guarded(m_new[i]))",
            "exp2(guarded(m[i]) - guarded(m_new[i]))",
        ),
    ),
    (
        COPY,
        Mutant(
            "last rows not drained",
            "range(tid, rows * width, threads)",
            "range(tid, rows * head_dim, threads)",
        ),
    ),
    (
        COPY,
        Mutant(
            "pieces of one pass in one place",
            "(i + u * threads) // period, (i + u * threads) % period",
            "(i + u * threads) // period, i % period",
        ),
    ),
    (
        COPY,
        Mutant(
            "NaN looked for in whole quads",
            "per_row = cfg.width // 4",
            "per_row = cfg.head_dim // 4",
        ),
    ),
    (COPY, Mutant("zero columns up to a pair", "if head_dim % 4:", "if head_dim % 2:")),
)
