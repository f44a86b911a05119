"""Any call of attention and of its gradients on the CPU against the plain definition."""

import numpy as np
from fuzzing import checked_calls, drawn_problems
from fuzzing.examples import examples
from hypothesis import given
from hypothesis import strategies as st

import nbflash
from nbflash.testing import poisoned


@examples(60)
@given(drawn_problems.calls(), st.booleans())
def test_attention(call, deterministic):
    checked_calls.check(call, deterministic=deterministic)


@examples(25)
@given(drawn_problems.calls(), st.integers(0, 3), st.sampled_from(["auto", "reference"]))
def test_given_output(call, axis, impl):
    """Written in any layout, and by a plan, as it is returned."""
    want = nbflash.attention(*call.arrays, call.mask, impl=impl, **call.options)
    shape = list(call.q.shape)
    shape[axis] = 2 * shape[axis] + 1
    wide = poisoned(shape, call.q.dtype)
    target = wide[(slice(None),) * axis + (slice(0, call.q.shape[axis]),)]
    found = nbflash.attention(*call.arrays, call.mask, impl=impl, out=target, **call.options)
    assert found is target
    np.testing.assert_array_equal(target, want)
    left = wide[(slice(None),) * axis + (slice(call.q.shape[axis], None),)]
    assert np.isnan(left).all()
