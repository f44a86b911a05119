"""nbflash.jax on the device: nbflash's bits, XLA's stream, no allocation of CuPy's, two GPUs."""

import importlib.util
import os

import cupy
import numpy as np
import pytest
from device_runs import gallery, make_qkv, run

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed", allow_module_level=True)

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nbflash.jax import attention


def kernels(**parameters):
    """Compiled when they are needed."""
    return []


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def case(request):
    """Arrays of both libraries, on the device."""
    arrays = make_qkv(2, 150, 150, 4, 2, 64, request.param)
    words = [cupy.asnumpy(x.view("uint8")) for x in arrays]
    return arrays, [jnp.asarray(x.view(jnp.dtype(request.param))) for x in words]


def test_same_bits_as_cupy(case):
    arrays, (q, k, v, dout) = case
    mask = gallery(150, 150)["butterfly-causal"]

    @jax.jit
    def both(q, k, v, dout):
        given = {"return_lse": True, "deterministic": True}
        (out, lse), pullback = jax.vjp(lambda *x: attention(*x, mask, **given), q, k, v)
        return out, lse, *pullback((dout, jnp.zeros_like(lse)))

    got = both(q, k, v, dout)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    got = both(q, k, v, dout)
    jax.block_until_ready(got)
    assert pool.total_bytes() == before
    want = run(arrays, mask, deterministic=True, impl="auto")
    for a, b in zip(got, want, strict=True):
        assert np.asarray(a).tobytes() == cupy.asnumpy(b.view("uint8")).tobytes()


def test_seed_stays_on_the_device(case):
    _, (q, k, v, _) = case
    drop = jax.jit(lambda key: attention(q, k, v, dropout=0.25, seed=key))
    first, second, again = (drop(jax.random.key(i)) for i in (1, 2, 1))
    assert (first == again).all()
    assert (first != second).any()


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
def test_shard_map_over_two_gpus(case):
    """Each GPU has a sequence; the keys that both have get the sum of their gradients."""
    _, (q, k, v, dout) = case
    mask = gallery(150, 150)["butterfly-causal"]

    def one(q, k, v):
        k = jnp.broadcast_to(k, (len(q), *k.shape[1:]))
        return attention(q, k, v, mask, deterministic=True)

    mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Auto,))
    two = jax.shard_map(one, mesh=mesh, in_specs=(P("b"), P(), P("b")), out_specs=P("b"))

    def gradients(attend):
        return jax.jit(jax.grad(lambda *x: (attend(*x) * dout).sum(), (0, 1, 2)))(q, k[:1], v)

    (dq, dk, dv), want = gradients(two), gradients(one)
    assert len(dq.devices()) == 2
    for a, b in ((dq, want[0]), (dv, want[2])):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    one_of_each = jnp.finfo(dk.dtype).eps * abs(want[1]).max()
    np.testing.assert_allclose(*(np.asarray(x, "f4") for x in (dk, want[1])), 0, one_of_each)
