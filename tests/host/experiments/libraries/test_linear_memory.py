"""Appendix B.1, B.2 and Rabe and Staats' algorithm: results, gradients, accesses and memory."""

import numpy as np
import pytest

from experiments.libraries import memory_efficient, rabe_staats
from experiments.libraries.hbm import HBM
from nbflash import reference
from nbflash.testing import assert_within_reference, low_precision, low_precision_backward

# One row; chunks of 4 keys and 3 queries, both with a rest; n a square.
SHAPES = [(1, 4), (14, 3), (36, 8)]
CHUNK = {"query_chunk": 5}
ALGORITHMS = {
    "memory_efficient": (memory_efficient, ("O", "L"), {}),
    "rabe_staats": (rabe_staats, (), CHUNK),
}


def _public(*arrays):
    return [x[None, :, None] for x in arrays]


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "causal-gap"])
@pytest.mark.parametrize(("n", "head_dim"), SHAPES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_agrees_with_the_reference_and_the_closed_form(name, n, head_dim, masked):
    module, saved, how = ALGORITHMS[name]
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((n, head_dim)) for _ in range(4))
    keep = np.tril(np.ones((n, n), bool), -1) if masked else None  # row 0 attends nothing
    hbm = HBM(Q=q, K=k, V=v)
    getattr(module, f"{name}_forward")(hbm, keep=keep, **how)
    out64, _ = reference.attention(*_public(q, k, v), keep)
    low, _ = low_precision(*_public(q, k, v), keep)
    assert_within_reference(hbm["O"][None, :, None], out64, low, "O")
    assert hbm.accesses == getattr(module, f"{name}_forward_accesses")(n, head_dim, **how)

    hbm = HBM(Q=q, K=k, V=v, dO=do, **{x: hbm[x] for x in saved})
    getattr(module, f"{name}_backward")(hbm, keep=keep, **how)
    args = (*_public(do, q, k, v), keep)
    grads64, lows = reference.attention_backward(*args), low_precision_backward(*args)
    for x, grad64, low in zip(("dQ", "dK", "dV"), grads64, lows, strict=True):
        assert_within_reference(hbm[x][None, :, None], grad64, low, x, 3.0)
    assert hbm.accesses == getattr(module, f"{name}_backward_accesses")(n, head_dim, **how)


def test_accesses_by_hand():
    # n=4, d=2. B.1: each of 4 rows reads Q twice, K twice and V once, and L; O and L are written.
    assert memory_efficient.memory_efficient_forward_accesses(4, 2) == (2 * 8 + 4 + 3 * 32, 12)
    # All queries are a chunk, two chunks of two keys: of both together Q twice, K, S, P and V are
    # read, S, P and the summaries written; then the summaries are read and O is written.
    summaries = 2 * 4 * (2 + 2)
    found = rabe_staats.rabe_staats_forward_accesses(4, 2)
    assert found == (2 * 8 + 8 + 8 + 32 + summaries, 32 + summaries + 8)


def test_growth():
    """B.1 and B.2 are quadratic however large the SRAM is: 3 and 6 times N² d."""
    for n in (1024, 8192):
        theta = memory_efficient.theta_memory_efficient(n, 64)
        forward = memory_efficient.memory_efficient_forward_accesses(n, 64).total
        backward = memory_efficient.memory_efficient_backward_accesses(n, 64).total
        assert 3 <= forward / theta <= 3.01
        assert 6 <= backward / theta <= 6.06
        chunked = rabe_staats.rabe_staats_forward_accesses(n, 64).total
        assert 2 <= chunked / rabe_staats.theta_rabe_staats(n, 64) <= 4
