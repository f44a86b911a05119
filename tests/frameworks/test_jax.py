"""nbflash.jax: the numbers of nbflash under jit, grad, remat, vmap and shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tensors import on_host

import masks
import nbflash
from nbflash.jax import attention
from nbflash.planning.plan import AttentionPlan
from nbflash.testing import make_qkv

MASK = masks.butterfly(33, block=8) & masks.causal(33)


def arrays(dtype="float32", batch=2):
    return [jnp.asarray(x).astype(dtype) for x in make_qkv(batch, 33, 33, 4, 2, 16)]


ON_CPU = jax.default_backend() == "cpu"


def as_array(x):
    """Of NumPy, or of CuPy where JAX computes on a GPU."""
    if x is None or ON_CPU:
        return x if x is None else np.asarray(x)
    import cupy

    return cupy.asarray(np.asarray(x))


def of_core(given, mask=None, *, dlse=None, **options):
    q, k, v, dout, dlse = (as_array(x) for x in (*given, dlse))
    out, lse = nbflash.attention(q, k, v, mask, return_lse=True, **options)
    given = dout, q, k, v, out, lse, mask
    results = out, lse, *nbflash.attention_backward(*given, dlse=dlse, **options)
    return tuple(map(on_host, results))


def of_jax(given, mask=None, *, dlse=None, **options):
    q, k, v, dout = given

    def run(q, k, v):
        return attention(q, k, v, mask, return_lse=True, **options)

    (out, lse), pullback = jax.vjp(jax.jit(run), q, k, v)
    return out, lse, *pullback((dout, jnp.zeros_like(lse) if dlse is None else dlse))


def assert_same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(np.asarray(a), b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_same_bits_as_numpy(dtype):
    given = arrays(dtype)
    got = of_jax(given, MASK)
    assert_same_bits(got, of_core(given, MASK))
    assert got[0].dtype == dtype


@pytest.mark.skipif(not ON_CPU, reason="the core gives CuPy's arrays of CUDA memory")
def test_the_core_gives_arrays_of_jax():
    """Without gradients; NumPy reads no bfloat16 of JAX's."""
    q, k, v, dout = given = arrays()
    out, lse = nbflash.attention(q, k, v, MASK, return_lse=True)
    got = out, lse, *nbflash.attention_backward(dout, q, k, v, out, lse, MASK)
    assert all(isinstance(x, jax.Array) for x in got)
    assert_same_bits(got, of_core(given, MASK))
    with pytest.raises(TypeError, match=r"no bfloat16 through DLPack: pass numpy.asarray\(q\)"):
        nbflash.attention(*arrays("bfloat16")[:3])


def test_float64():
    with jax.enable_x64(True):
        given = arrays("float64")
        assert_same_bits(of_jax(given, window=(5, 0)), of_core(given, window=(5, 0)))


def test_gradient_into_lse():
    given = arrays()
    dlse = np.random.default_rng(0).standard_normal((2, 4, 33), dtype=np.float32)
    assert_same_bits(of_jax(given, MASK, dlse=dlse), of_core(given, MASK, dlse=dlse))


def test_a_block_map_of_groups():
    """Lists of the K/V heads are those of the query heads of each."""
    given = arrays(batch=1)
    indices = np.array([[[[0], [1], [2]], [[2], [1], [0]]]], np.int32)
    made = nbflash.BlockMap(indices, None, shape=(33, 33), block=16)
    assert_same_bits(of_jax(given, made), of_core(given, made.to_mask(4)))


OPTIONS = {
    "nothing": {},
    "mask by head": {"mask": masks.per_head([masks.local(33, block=n) for n in (4, 8, 12, 16)])},
    "causal": {"causal": True},
    "window": {"window": [5, 2]},
    "scale": {"scale": 0.7},
    "score": {"score": nbflash.scores.alibi([0.5, 0.25, 0.125, 0.0625])},
    "impl": {"impl": "reference" if ON_CPU else "simt"},
    "dropout": {"dropout": 0.25, "seed": 3},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_arguments(option):
    given, options = arrays(), OPTIONS[option]
    dlse = np.random.default_rng(0).standard_normal((2, 4, 33), dtype=np.float32)
    want = of_core(given, **options, dlse=dlse)
    assert_same_bits(of_jax(given, **options, dlse=dlse), want)
    assert np.array_equal(attention(*given[:3], **options), want[0])
    same = np.array_equal(want[0], of_core(given)[0])
    assert same == (option == "nothing" or (option == "impl" and not ON_CPU))


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_gradients_are_asked_for(deterministic, monkeypatch):
    seen, write = [], AttentionPlan.write_backward

    def noted(plan, *given):
        seen.append(given[-1])
        write(plan, *given)

    monkeypatch.setattr(AttentionPlan, "write_backward", noted)
    jax.block_until_ready(of_jax(arrays(), deterministic=deterministic))
    assert seen == [deterministic]


def test_takes_arrays_of_numpy():
    """Those of float64 are of float32 to JAX."""
    given = [np.asarray(x) for x in arrays()[:3]]
    for first in (given[0], given[0].astype("float64"), jnp.asarray(given[0])):
        out = attention(first, *given[1:], MASK)
        assert isinstance(out, jax.Array)
        assert np.array_equal(out, on_host(nbflash.attention(*map(as_array, given), MASK)))


SEEDS = 5, np.uint32(5), (2**64 - 1, 2**40), np.array([1, 2]), np.array([1, 2], np.uint64)


@pytest.mark.parametrize("seed", SEEDS, ids=["one", "uint32", "two", "int64", "uint64"])
def test_dropout(seed):
    given, options = arrays(), {"dropout": 0.25, "seed": seed}
    assert_same_bits(of_jax(given, **options), of_core(given, **options))


def test_seed_of_a_key_is_traced():
    q, k, v, _ = arrays()
    run = jax.jit(lambda key: attention(q, k, v, dropout=0.5, seed=key))
    first, second, again = (run(jax.random.key(i)) for i in (1, 2**40 + 2, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)
    assert run._cache_size() == 1
    words = np.array([1, 0, 0, 0], np.uint32)
    for seed in (jax.random.PRNGKey(1), words, jnp.array(words)):
        assert np.array_equal(first, attention(q, k, v, dropout=0.5, seed=seed))
    given = [as_array(x) for x in (q, k, v)]
    assert np.array_equal(first, on_host(nbflash.attention(*given, dropout=0.5, seed=1)))
    words = jnp.array([3, 4, 5, 6], jnp.uint32)
    of_words = nbflash.attention(*given, dropout=0.5, seed=(3 + (4 << 32), 5 + (6 << 32)))
    assert np.array_equal(attention(q, k, v, dropout=0.5, seed=words), on_host(of_words))


def test_vmap_over_seeds():
    """Of the same inputs, forward and backward."""
    q, k, v, dout = given = arrays()
    keys = jax.vmap(jax.random.key)(jnp.arange(3))

    def gradients(key):
        call = lambda *x: attention(*x, dropout=0.5, seed=key, return_lse=True)
        (out, lse), pullback = jax.vjp(call, q, k, v)
        return out, lse, *pullback((dout, lse))

    got = jax.vmap(gradients)(keys)
    for i in range(3):
        options = {"dropout": 0.5, "seed": i}
        want = of_core(given, dlse=np.asarray(got[1][i]), **options)
        assert_same_bits([x[i] for x in got], want)


def test_rematerialised():
    q, k, v, _ = arrays()
    loss = lambda q: jnp.sin(attention(q, k, v, MASK)).sum()
    assert np.array_equal(jax.grad(jax.checkpoint(loss))(q), jax.grad(loss)(q))


VMAPPED = {
    "folded": {"mask": MASK},
    "dropout": {"dropout": 0.25, "seed": 3},
    "mask of two": {"mask": masks.per_batch([MASK, masks.causal(33)])},
    "mask by head": OPTIONS["mask by head"],
    "score of two": {"score": nbflash.scores.bias(np.arange(66.0).reshape(2, 1, 1, 33) / 9)},
}


@pytest.mark.parametrize("options", VMAPPED.values(), ids=VMAPPED)
def test_vmap(options):
    """Of the queries alone and of all; results and gradients, those of an LSE, too."""
    q, k, v, dout = arrays()
    queries, keys = (jnp.stack([x, 2 * x, 3 * x]) for x in (q, k))

    def gradients(q, k):
        call = lambda *x: attention(*x, return_lse=True, **options)
        (out, lse), pullback = jax.vjp(call, q, k, v)
        return out, lse, *pullback((dout, lse))

    for axes in ((0, None), (0, 0)):
        got = jax.vmap(gradients, in_axes=axes)(queries, keys if axes[1] == 0 else k)
        for i, each in enumerate(queries):
            given = each, keys[i] if axes[1] == 0 else k, v, dout
            want = of_core(given, dlse=np.asarray(got[1][i]), **options)
            assert_same_bits([x[i] for x in got], want)


def test_vmap_of_vmap():
    q, k, v, _ = arrays()
    queries = jnp.stack([q, 2 * q, 3 * q, 4 * q]).reshape(2, 2, *q.shape)
    out = jax.vmap(jax.vmap(lambda q: attention(q, k, v, MASK)))(queries)
    assert np.array_equal(out[1, 0], attention(3 * q, k, v, MASK))


@pytest.mark.parametrize("options", [VMAPPED["folded"], VMAPPED["dropout"]])
def test_vmap_of_nothing(options):
    q, k, v, _ = arrays()
    of = lambda q, k: attention(q, k, v[:1], return_lse=True, **options)
    gradients = jax.grad(lambda q, k: of(q, k)[0].sum(), (0, 1))
    for run in (of, gradients):
        found = jax.vmap(run, in_axes=(0, None))(q[:0, None], k[:1])
        for x, one in zip(found, run(q[:1], k[:1]), strict=True):
            assert x.shape == (0, *one.shape)
            assert x.dtype == one.dtype


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)], ids=["queries", "keys"])
def test_vmap_without(lengths):
    """Gradients too; an axis of nothing has no number of its own."""
    q, k = (jnp.ones((3, 2, n, 2, 8)) for n in lengths)
    of = lambda q, k: attention(q, k, k, return_lse=True)
    out, lse = jax.vmap(of)(q, k)
    assert np.array_equal(out[1], of(q[1], k[1])[0])
    assert np.array_equal(lse[1], of(q[1], k[1])[1])
    gradients = jax.grad(lambda q, k: jax.vmap(of)(q, k)[0].sum(), (0, 1))(q, k)
    for x, given in zip(gradients, (q, k), strict=True):
        assert np.array_equal(x, jnp.zeros_like(given))


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_two_devices():
    """Of a batch shared out; keys that all devices have get the sum of their gradients."""
    q, k, v, dout = arrays()
    mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Auto,))

    def loss(attend):
        return lambda q, k, v: (attend(q, k, v) * dout).sum()

    def one(q, k, v):
        return attention(q, jnp.broadcast_to(k, (len(q), *k.shape[1:])), v, MASK)

    specs = P("b"), P(), P("b")
    two = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P("b"))
    got, want = (jax.jit(jax.grad(loss(f), (0, 1, 2)))(q, k[:1], v) for f in (two, one))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=4 * np.spacing(abs(b).max()))


def test_compiled_once():
    q, k, v, _ = arrays()
    run = jax.jit(lambda q: attention(q, k, v, causal=True))
    for i in range(3):
        run(i * q)
    assert run._cache_size() == 1


X = jnp.zeros((1, 4, 2, 8))
CONSTANT = nbflash.scores.custom(lambda s, batch, head, q_idx, kv_idx: s)
REFUSED = {
    "dtype": (lambda: attention(X, X.astype("int32"), X), TypeError, "k must have dtype"),
    "axes": (lambda: attention(X, X[0], X), ValueError, "k must have 4 axes"),
    "mask": (lambda: attention(X, X, X, masks.causal(5)), ValueError, "mask must have shape"),
    "impl": (lambda: attention(X, X, X, impl="gpu"), ValueError, "impl must be one of auto"),
    "score without a gradient": (
        lambda: jax.grad(lambda q: attention(q, X, X, score=CONSTANT).sum())(X),
        ValueError,
        "has no gradient: pass grad=",
    ),
    "flag": (lambda: attention(X, X, X, return_lse=1), TypeError, "return_lse must be True"),
    "dropout": (lambda: attention(X, X, X, dropout=2.0), ValueError, "dropout must be at least"),
    "no seed": (lambda: attention(X, X, X, dropout=0.5), ValueError, "seed must be given"),
    "seed": (
        lambda: attention(X, X, X, dropout=0.5, seed=jnp.zeros(3)),
        TypeError,
        "seed must be a key or a uint32 array",
    ),
    "words of a seed": (
        lambda: attention(X, X, X, dropout=0.5, seed=jnp.zeros(2, jnp.int32)),
        TypeError,
        "seed must be a key or a uint32 array",
    ),
    "score": (lambda: attention(X, X, X, score=3), TypeError, "score must be made by"),
    "arrays of a score": (
        lambda: attention(X, X, X, score=nbflash.scores.alibi([0.5] * 3)),
        ValueError,
        "score: alibi has heads=3, got inputs with heads=2",
    ),
    "deterministic": (
        lambda: attention(X, X, X, deterministic=1),
        TypeError,
        "deterministic must be True",
    ),
    "causal": (lambda: attention(X, X, X, causal=1), TypeError, "causal must be True"),
    "window": (lambda: attention(X, X, X, window=3), TypeError, "window must be"),
    "scale": (lambda: attention(X, X, X, scale="1"), TypeError, "scale must be"),
    "axes of q": (
        lambda: attention(
            X[0, 0], X, X, nbflash.BlockMap(np.zeros((1, 1, 1, 1), int), shape=(4, 4), block=4)
        ),
        ValueError,
        "q must have 4 axes",
    ),
    "three words": (
        lambda: attention(X, X, X, dropout=0.5, seed=jnp.zeros(3, jnp.uint32)),
        TypeError,
        r"seed must be a key or a uint32 array \(4,\), got uint32\(3,\)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_second_derivatives_are_refused():
    q, k, v, _ = arrays()
    inner = jax.grad(lambda q: attention(q, k, v).sum())
    with pytest.raises(ValueError, match="do not support JVP"):
        jax.grad(lambda q: inner(q).sum())(q)
