"""Any call of attention and of its gradients on the CPU against the plain definition."""

import dataclasses

import merged_parts
import numpy as np
import poisoned_rows
from axes import LEVELS
from fuzzing import budgets, checked_calls, drawn_problems
from fuzzing.examples import examples
from hypothesis import given
from hypothesis import strategies as st

import masks
import nbflash
from nbflash.testing import poisoned


@examples(22)
@given(drawn_problems.calls(), st.booleans(), st.sampled_from(["auto", "auto", "reference"]))
def test_attention(call, deterministic, impl):
    how = {"deterministic": deterministic, "impl": impl}
    checked_calls.check(call, lambda call: checked_calls.run(call, **how))


@examples(15)
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
    options = dict(call.options)
    seed = options.pop("seed", None)
    plan = nbflash.plan(*call.arrays, call.mask, impl=impl, **options)
    again, lse = plan(*call.arrays, poisoned(call.q.shape, call.q.dtype), seed=seed)
    np.testing.assert_array_equal(again, want)
    _, pullback = plan.vjp(*call.arrays, seed=seed)
    given = call.dout, *call.arrays, again, lse
    gradients = plan.backward(*given, seed=seed, deterministic=True)
    for x, y in zip(pullback(call.dout, deterministic=True), gradients, strict=True):
        np.testing.assert_array_equal(x, y)
    left = wide[(slice(None),) * axis + (slice(call.q.shape[axis], None),)]
    assert np.isnan(left).all()


@examples(6)
@given(drawn_problems.calls(scored=False), st.data())
def test_parts_and_sinks(call, data):
    """Two parts of the keys merged, and a sink: the gradients go back through all of it."""
    rng, (batch, heads, nq, nk) = np.random.default_rng(0), call.keep.shape
    wide = np.float64 if call.q.dtype == np.float64 else np.float32
    sink, dlse = (drawn_problems.normal(rng, x, wide) for x in ((heads,), (batch, heads, nq)))
    scale = {"scale": data.draw(st.sampled_from([scale for scale, _ in LEVELS]))}
    call = dataclasses.replace(call, dlse=dlse, options=scale)
    share = data.draw(st.sampled_from([0.1, 0.5]))
    first = masks.from_dense(call.keep & (rng.random((nq, nk)) < share))
    both = first, masks.from_dense(call.keep) - first
    parts = [nbflash.attention(*call.arrays, x, return_lse=True, **scale) for x in both]
    merged = nbflash.merge(*parts[0], *parts[1])
    out, lse = nbflash.merge_sink(*merged, sink)
    dout, dlse, dsink = nbflash.merge_sink_backward(call.dout, *merged, sink, dlse=dlse)
    found = nbflash.merge_backward(dout, *parts[0], *parts[1], dlse=dlse)
    each = [
        nbflash.attention_backward(dout, *call.arrays, *part, mask, dlse=dlse, **scale)
        for part, mask, dout, dlse in zip(parts, both, found[::2], found[1::2], strict=True)
    ]
    gradients = [a + b for a, b in zip(*each, strict=True)]
    exact, rounded = checked_calls.exact_of(call, sink), checked_calls.rounded_of(call, sink)
    names = *poisoned_rows.NAMES, "sink"
    got = out, lse, *gradients, dsink
    for name, x, low in zip(names, got, checked_calls.low_with_sink(call, sink), strict=True):
        draws = *low, getattr(rounded, name)
        budgets.check(name, x, getattr(exact, name), draws, 2 * merged_parts.FACTOR)
