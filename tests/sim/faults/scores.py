"""Faults of score functions: of their forms, and of where the kernels call them."""

from mutants import Mutant, lines, swapped

from .simt_backward import BWD

FWD, SCORE = "nbflash.backends.simt.forward", "nbflash.cuda.tile.score"
PARAMS = "nbflash.cuda.score_params"
FORMS = (
    Mutant(
        "functions in natural units", "factor = form.rest(own, factor)", "form.rest(own, factor)"
    ),
    Mutant("slope of one function", "for slope in slopes)", "for slope in slopes[:1])"),
    Mutant("query of the fragment", "self.q + self.dq", "self.q"),
    Mutant("key of the fragment", "self.kv + self.dkv", "self.kv"),
    Mutant("queries past the end", "select(q < last_q, q, last_q)", "q"),
    Mutant("keys past the end", "select(kv < last_kv, kv, last_kv)", "kv"),
    Mutant("ends swapped", "self.nq, self.nk = sizes", "self.nk, self.nq = sizes"),
    Mutant("batch for head", "return self.b, self.h,", "return self.h, self.b,"),
    Mutant("first query with first key", "self.q + aligned - self.kv", "self.q - self.kv"),
    Mutant("distances against the fragment", "self.dq - self.dkv", "self.dkv - self.dq"),
    Mutant("past and future differ", "absolute(fma(held, more, start * held))", "start * held"),
    Mutant("slope of the first head", "load(slopes, h)", "load(slopes, 0)"),
    Mutant("cap of nothing", "return params[0]", "return factor"),
    Mutant("score before the cap", "self._inverse(opaque_value(cap)) * factor", "factor"),
    Mutant("tanh without its slope", "fma(x[i], x[i] * -1.0, 1.0)", "x[i] * 0.0 + 1.0"),
    Mutant("tanh without its slope among others", "fma(t, t * -1.0, 1.0)", "t * 0.0 + 1.0"),
    Mutant("gradient of the result", "call(self._grad, s, s,", "call(self._grad, s, x,"),
    Mutant(
        "slopes if all have one",
        "return any(grad is not score_functions.one for _, grad in self.functions)",
        "return all(grad is not score_functions.one for _, grad in self.functions)",
    ),
    Mutant(
        "first factor for every function",
        "next(held) if form.holds else None, own, before)",
        "next(held) if form.holds else None, own, factor)",
    ),
)
# Of a scale that is not 1, which Q of the SIMT kernels carries.
SCALES = (
    Mutant("softcap before the scale", "(opaque_value(cap)) * factor", "(opaque_value(cap))"),
    Mutant("slope of scaled scores", "slope * reciprocal(factor)", "slope"),
    Mutant("ALiBi without the scale", "return factor", "return 1.0"),
    Mutant("functions before the scale", "s * factor, place", "s * 1.0, place"),
    Mutant("natural units", "return unit * last", "return last * 1.0"),
    Mutant(
        "sums by the last function",
        'return self.forms == ("alibi",)',
        'return self.forms[-1:] == ("alibi",)',
    ),
    Mutant("tanh in another unit", "* factor * self._times", "* factor"),
)
FORWARD = (
    Mutant("scores as they are", "if SCORED:", "if False:"),
    Mutant("query of the row", "at = b, h, q0 + 4 * ty", "at = b, h, q0 + ty"),
    Mutant(
        "key of the tile", "n0 + 4 * tx\n                s = apply", "n0\n                s = apply"
    ),
    Mutant("natural scores in base 2", "params, ONE, UNIT)", "params, ONE, ONE)"),
    Mutant("head of the group", "hold(h, params, ONE)", "hold(h // group, params, ONE)"),
)
BACKWARD = (
    Mutant("scores as they are", "if SCORED and half == 0:", "if False:"),
    Mutant("query of the tile", "(b, h, m0 + 4 * ty", "(b, h, m0"),
    Mutant("key of the tile", "n0 + 4 * tx), hold", "n0), hold"),
    Mutant("key head", "place, held = (b, h,", "place, held = (b, h_kv,"),
    Mutant("dK in base 2", "ACC(1 if SCORED else LN2)", "ACC(LN2)"),
    Mutant(
        "no slopes",
        "if SLOPED:\n                    slopes",
        "if False:\n                    slopes",
    ),
    Mutant("slopes for P", "store_slopes(smem, DS + own, x)", "store_slopes(smem, P + own, x)"),
    Mutant("scores for slopes", "slope_at(cfg.score, s, i)", "s[i]"),
    Mutant(
        "slope of the key head",
        "n0 + 4 * tx), hold(h, params, ONE)",
        "n0 + 4 * tx), hold(h_kv, params, ONE)",
    ),
    Mutant("natural scores in base 2", "rest(params, ONE, UNIT)", "rest(params, ONE, ONE)"),
)
OF_PARAMETERS = (
    Mutant("slopes below zero in a form for others", "(slopes >= 0) & (slopes <=", "(slopes <="),
    Mutant("ends swapped", "problem.nq), np.int32(problem.nk", "problem.nk), np.int32(problem.nq"),
    Mutant("arrays taken for numbers", "array(kind, x.ndim) if x.ndim", "array(kind, x.ndim) if 0"),
    Mutant("float32 for all", 'real = "float64" if problem', 'real = "float32" if problem'),
    Mutant("no gradient", "(fn, grad) for fn, grad, _ in", "(fn, None) for fn, grad, _ in"),
)
SIMT = (
    *((SCORE, mutant) for mutant in FORMS),
    *((FWD, mutant) for mutant in FORWARD),
    *((BWD, mutant) for mutant in BACKWARD),
    *((PARAMS, mutant) for mutant in OF_PARAMETERS),
)
PLACE, COMPUTE = "nbflash.backends.sm90.shared.score", "nbflash.backends.sm90.forward.consumer"
HOOKS, RAMP, WHOLE, HALVES, FWD_SM90 = (
    f"nbflash.backends.sm90.forward.{name}"
    for name in ("score_hooks", "alibi_gemm", "mainloop_pingpong", "mainloop_overlap", "kernel")
)
HOPPER = (
    *((SCORE, mutant) for mutant in SCALES),
    (PLACE, Mutant("row of the tile", "TILE_M + row_of_thread(thread)", "TILE_M")),
    (PLACE, Mutant("key of the tile", "n0 + 2 * (opaque(thread) & 3)", "n0")),
    (
        PLACE,
        Mutant(
            "head and batch", "b, h = divmod_int32(bh, heads)", "h, b = divmod_int32(bh, heads)"
        ),
    ),
    (PLACE, Mutant("first part of the keys", "n * part + column_of(i)", "column_of(i)")),
    (PLACE, Mutant("one row", "8 * row_of(i)", "0 * row_of(i)")),
    (
        COMPUTE,
        Mutant(
            "place of the first row",
            "where, row_words = row_at(next_block, next_bh, sources, thread)",
            "pass",
            1,
            2,
        ),
    ),
    (HOOKS, Mutant("no ALiBi", "acc_s = scored(acc_s, scoring)", "pass")),
    (HOOKS, Mutant("scores as they are", "acc_s if ADDS else scored(acc_s, scoring)", "acc_s")),
    (HOOKS, Mutant("ALiBi twice", "acc_s if ADDS else scored(acc_s", "scored(acc_s")),
    (WHOLE, Mutant("products instead of a sum", "accumulate=ADDS", "accumulate=False")),
    (HALVES, Mutant("first half as it is", "scored_a(s_a, score)", "s_a")),
    (HALVES, Mutant("second half as it is", "scored_b(s_b, score)", "s_b")),
    (HOOKS, Mutant("lost scores without ALiBi", "if SCORED else", "if SCORED and not ADDS else")),
    (
        HALVES,
        swapped(
            "score of what is hidden",
            lines(12, "s_a = scored_a(s_a, score)"),
            lines(12, "if masked and (not first or kind != FULL):", "    s_a = keep_a(s_a, keep)"),
        ),
    ),
)
