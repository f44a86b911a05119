"""The public functions of a package, and what of their signatures is not annotated."""

import inspect

OPERATORS = "__call__", "__or__", "__and__", "__invert__"
# Called by other modules of nbflash, not by users.
INTERNAL = "run_", "write_", "score_shapes", "reading"


def functions(thing) -> list:
    """The public functions of a class that are its own, properties too; a function itself."""
    if not inspect.isclass(thing):
        return [thing]
    names = [x for x in vars(thing) if x in OPERATORS or not x.startswith(("_", *INTERNAL))]
    found = [vars(thing)[name] for name in names]
    found = [getattr(x, "fget", getattr(x, "func", getattr(x, "__func__", x))) for x in found]
    return [x for x in found if inspect.isfunction(x)]


def public(*packages) -> dict:
    """By their names, what ``__all__`` of the packages gives."""
    things = [getattr(package, name) for package in packages for name in package.__all__]
    found = [f for thing in things if callable(thing) for f in functions(thing)]
    return {f"{f.__module__}.{f.__qualname__}": f for f in found}


def missing(function) -> list[str]:
    """Parameters without an annotation, and "return"."""
    signature = inspect.signature(function)
    names = [
        p.name
        for p in signature.parameters.values()
        if p.annotation is p.empty and p.name not in ("self", "cls")
    ]
    return [*names, "return"] if signature.return_annotation is signature.empty else names
