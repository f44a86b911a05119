"""Checks of the score functions that a caller gives."""

import inspect

INDICES = ("s", "b", "h", "q_idx", "kv_idx")


def where(fn):
    """Name, file and line of a function."""
    code = fn.__code__
    return f"{fn.__qualname__}, {code.co_filename}:{code.co_firstlineno}"


def check_signature(given, fn, n_params):
    """Raise unless ``fn`` takes a score's indices and so many parameters."""
    if not inspect.isfunction(fn):
        raise TypeError(f"{given} must be a Python function, got {type(fn).__qualname__}")
    expected = [*INDICES, *(f"params[{i}]" for i in range(n_params))]
    try:
        inspect.signature(fn).bind(*expected)
    except TypeError as error:
        raise TypeError(
            f"{given} must take ({', '.join(expected)}), {error}: {where(fn)}"
        ) from error


def of_arrays(param_grads, params):
    """The functions of ``param_grads`` by their names in messages."""
    if not isinstance(param_grads, (tuple, list)) or len(param_grads) != len(params):
        raise TypeError(
            f"param_grads must be a tuple of {len(params)} functions or None, one for each of "
            f"params, got {param_grads!r}"
        )
    for i, (part, x) in enumerate(zip(param_grads, params, strict=True)):
        if part is not None and (x.ndim == 0 or x.dtype.kind != "f"):
            raise ValueError(
                f"param_grads[{i}] needs an array of floating point, params[{i}] is {x!r}"
            )
    return {f"param_grads[{i}]": part for i, part in enumerate(param_grads)}
