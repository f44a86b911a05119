"""The functions of a `nbflash.scores.Score` in their order, with the derivatives by its arrays.

With dS' the gradient of the last function's scores, that of an array of function i is dS' times the
slopes of the functions after it times ∂s'/∂array[index], added up at ``index``:

    s₀ = S   sᵢ = fnᵢ(sᵢ₋₁)      d array[index] += dS' · Π_{j > i} ∂sⱼ/∂sⱼ₋₁ · ∂sᵢ/∂array[index]

Everything that needs it (reference, CPU and CUDA) compiles this one definition in its own way.
"""


def chain(functions, compiled, real):
    """What the gradients of arrays need of one score, of ``(fn, grad, part functions)`` in order.

    Parameters
    ----------
    functions : sequence of (callable, callable, tuple of callables)
    compiled : callable
        Makes every function what it is to be: a decorator.
    real : type
        Scores and derivatives are of this type.

    Returns
    -------
    callable
        ``run(s, b, h, q_idx, kv_idx, params) -> (s', ∂s'/∂s, ((index, ∂s'/∂array[index]), ...))``
        with one pair for every part. The first number is that after the last function.
    """
    if not functions:

        @compiled
        def nothing(s, b, h, q_idx, kv_idx, params):
            return s, real(1), ()

        return nothing
    (fn, grad, parts), *others = functions
    first, slope_of, rest = compiled(fn), compiled(grad), chain(others, compiled, real)
    own = _pairs(parts, compiled, real)

    @compiled
    def run(s, b, h, q_idx, kv_idx, params):
        x = real(first(s, b, h, q_idx, kv_idx, *params[0]))
        slope = real(slope_of(s, b, h, q_idx, kv_idx, *params[0]))
        x, later, pairs = rest(x, b, h, q_idx, kv_idx, params[1:])
        return x, slope * later, own(later, s, b, h, q_idx, kv_idx, params[0]) + pairs

    return run


def _pairs(parts, compiled, real):
    """The pairs of one function's parts, of which ``later`` is the slope of those after it."""
    if not parts:

        @compiled
        def none(later, s, b, h, q_idx, kv_idx, params):
            return ()

        return none
    first, rest = compiled(parts[0]), _pairs(parts[1:], compiled, real)

    @compiled
    def pairs(later, s, b, h, q_idx, kv_idx, params):
        index, factor = first(s, b, h, q_idx, kv_idx, *params)
        return ((index, later * real(factor)), *rest(later, s, b, h, q_idx, kv_idx, params))

    return pairs
