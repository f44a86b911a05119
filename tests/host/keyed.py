"""What tells two things apart: values that differ in one place, and the property of all keys.

Every place where a key, a hash or an equality decides that two things are the same is declared in
`tests/host/keys`; `keyed_places` finds the places.
"""

import itertools

import numpy as np

REFUSED = TypeError, ValueError, IndexError


def others(x):
    """Values that differ from ``x`` in one place."""
    if isinstance(x, np.ndarray):
        yield from _other_arrays(x)
    elif isinstance(x, tuple | list):
        for i, part in enumerate(x):
            yield from (type(x)([*x[:i], other, *x[i + 1 :]]) for other in others(part))
        yield type(x)([*x, *x[-1:]]) if x else type(x)([0])
        if x:
            yield x[:-1]
        if list(x) != list(x)[::-1]:
            yield x[::-1]
    elif isinstance(x, bool | np.bool_):
        yield not x
    elif isinstance(x, int | np.integer):
        yield type(x)(x + 1)
        yield from _other_types(x)
    elif isinstance(x, float | np.floating):
        yield type(x)(np.nextafter(x, type(x)(np.inf)))
        yield -x if x else type(x)(1)
        yield from _other_types(x)
    elif isinstance(x, str | bytes):
        yield x + x[:1]
        yield x[1:]
    elif x is None:
        yield 0
    else:
        raise TypeError(f"nothing is known that differs from {x!r} in one place")


def _other_types(x):
    """The same bytes, or the same number, of another type."""
    if isinstance(x, np.generic):
        yield x.view(f"{'u' if x.dtype.kind != 'u' else 'i'}{x.itemsize}")
        yield x.item()


def _other_arrays(x):
    """Another element each, another type of the same bytes, another shape."""
    yield from each(x)
    kind = "u" if x.dtype.kind != "u" else "i"
    yield x.view(f"{kind}{x.dtype.itemsize}")
    yield x[None]
    if x.ndim > 1 and x.shape[0] != x.shape[-1]:
        yield x.reshape(x.shape[::-1])
    if x.shape[0]:
        yield x[:-1]


def each(x):
    """An array with each of its elements changed, one at a time."""
    x = np.asarray(x)
    for at in np.ndindex(x.shape):
        other = x.copy()
        other[at] = next(others(x[at]))
        yield other


def assert_same(one, other, what=""):
    """Equal in both orders, with equal hashes."""
    assert (one == other, other == one) == (True, True), what
    assert (one != other, other != one) == (False, False), what
    assert hash(one) == hash(other), what


def assert_apart(one, other, what=""):
    """Unequal in both orders, with other hashes."""
    assert (one == other, other == one) == (False, False), what
    assert (one != other, other != one) == (True, True), what
    assert hash(one) != hash(other), what


def _changed(base, changes, left_out, names):
    """Arguments with one changed, and what was: of all that ``names`` or ``base`` has.

    Fails where an argument is neither in ``changes`` nor in ``left_out``.
    """
    names = set(base if names is None else names)
    for name in sorted(names):
        assert name in changes or name in left_out, (
            f"{name} has no other value: add {name!r}: [...] to the changes, or the reason why no "
            "key has it to left_out"
        )
    assert set(changes) | set(left_out) == names, "declared, and not there any more"
    found = []
    for name, values in changes.items():
        values = list(values)
        assert values, name
        found += [(base | {name: x}, f"{name}: {base[name]!r} and {x!r}") for x in values]
    return found


def check_keyed(make, base, changes, left_out=(), names=None):
    """The property: one changed argument makes another thing, none changed the same one.

    Parameters
    ----------
    make : callable
        Of keyword arguments; returns what has a key.
    base, changes : dict
        Arguments, and of each a list of other values.
    left_out : dict
        Arguments that are deliberately not in the key, with the reason.
    names : iterable of str, optional
        The arguments as they are found by introspection; by default those of ``base``.
    """
    changed = _changed(base, changes, left_out, names)
    assert_same(make(**base), make(**base))
    for other, what in changed:
        assert_apart(make(**base), make(**other), what)


def check_cached(call, base, changes, left_out=(), names=None):
    """The property of a cache: equal calls give one object, and a changed one never gives that.

    A changed call may also be refused. ``call``, ``base`` and the others as of `check_keyed`.
    """
    changed = _changed(base, changes, left_out, names)
    found = call(**base)
    assert call(**base) is found
    for other, what in changed:
        assert call(**base) is found, "forgotten meanwhile"
        try:
            answer = call(**other)
        except REFUSED:
            continue
        assert answer is not found, what


def check_transparent(new, calls, same=lambda one, two: one == two):
    """A call of ``new()``, what remembers, answers behind every other call as it does alone."""
    alone = {name: call(new()) for name, call in calls.items()}
    for first, second in itertools.permutations(calls, 2):
        state = new()
        calls[first](state)
        assert same(calls[second](state), alone[second]), f"{second} behind {first}"
    return alone


def assert_answers_differ(answers):
    for one, other in itertools.combinations(answers, 2):
        assert answers[one] != answers[other], (one, other)
