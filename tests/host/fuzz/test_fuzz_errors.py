"""Wrong arguments: an error names an argument of the call."""

import re
import warnings

import numpy as np
from fuzzing.examples import examples
from fuzzing.wrong_arguments import CALLS, wrong
from hypothesis import given
from hypothesis import strategies as st

ARGUMENTS = [(call, name) for call, (_, given) in enumerate(CALLS) for name in given]


def test_the_calls_are_valid():
    for function, arguments in CALLS:
        function(**arguments)


def error_of(function, arguments):
    """What a call says if it fails; any other failure than those for callers goes on."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            function(**arguments)
        except (TypeError, ValueError, ImportError, MemoryError) as error:
            return str(error)
    return None


@examples(150)
@given(st.sampled_from(ARGUMENTS), st.integers(0, len(wrong()) - 1))
def test_errors_name_what_is_wrong(argument, which):
    """Of two that do not fit each other either may be named; a sharding is of a mask."""
    (call, name), value = argument, wrong()[which]
    function, arguments = CALLS[call]
    said = error_of(function, arguments | {name: value})
    names = [*arguments, *["mask"] * ("sharding" in arguments), "CuPy"]
    what = f"{getattr(function, '__name__', function)}({name}={value!r}): {said}"
    assert said is None or any(re.search(rf"\b{x}\b", said) for x in names), what
