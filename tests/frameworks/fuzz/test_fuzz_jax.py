"""Any call of nbflash.jax under jit, grad and vmap against the plain definition."""

import jax
import jax.numpy as jnp
import numpy as np
from fuzzing import checked_calls, drawn_problems
from fuzzing.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from nbflash.jax import attention

DTYPES = [x for x in drawn_problems.DTYPES if x != np.float64]
SEEDS = (
    lambda words: words,
    lambda words: np.array([x >> s & 0xFFFFFFFF for x in words for s in (0, 32)], np.uint32),
    lambda words: jnp.asarray(SEEDS[1](words)),
)


def run(call, jit, mapped, form):
    """`checked_calls.run` with the gradients of JAX; those of a score's arrays it has not."""
    options = call.options | {"return_lse": True}
    if "seed" in options:
        options["seed"] = form(checked_calls.words_of(call))

    def forward(q, k, v):
        return attention(q, k, v, call.mask, **options)

    forward = jax.vmap(forward) if mapped else forward
    arrays = [jnp.asarray(x)[None] if mapped else jnp.asarray(x) for x in call.arrays]
    (out, lse), pullback = jax.vjp(jax.jit(forward) if jit else forward, *arrays)
    dlse = np.zeros(call.keep.shape[:3], np.float32) if call.dlse is None else call.dlse
    given = [jnp.asarray(x)[None] if mapped else jnp.asarray(x) for x in (call.dout, dlse)]
    found = [np.asarray(x) for x in (out, lse, *pullback(tuple(given)))]
    return [x[0] for x in found] if mapped else found, None


@examples(3)
@given(drawn_problems.calls(dtypes=DTYPES), st.booleans(), st.booleans(), st.sampled_from(SEEDS))
def test_attention(call, jit, mapped, form):
    checked_calls.check(call, lambda call: run(call, jit, mapped, form))
