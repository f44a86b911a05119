"""The forward kernel where V travels by ``cp.async``, and shared memory that is too small.

NumPy arrays promise no alignment, so the public API never takes this path in the simulator.
"""

from dataclasses import replace

import numpy as np
import pytest
from simt_runs import bits, expected

import nbflash
from nbflash import sim, simt
from nbflash.kernels.fwd_simt import make_fwd_simt
from nbflash.kernels.simt_config import SimtConfig, forward_config
from nbflash.problem import check_forward
from nbflash.testing import assert_within_reference, make_qkv, mask_gallery, poisoned

KB = 1024
# Tiles exactly as wide as head_dim, of 8 keys, or 16 in the second.
CONFIGS = [
    SimtConfig("float32", 8, 2, 2, 4, 4, vectors=True, send_v=True),
    SimtConfig("float32", 16, 4, 2, 4, 4, vectors=True, send_v=True, p_over_k=True),
    SimtConfig("float32", 32, 2, 2, 4, 4, vectors=True, send_v=True, chunks=4, unroll=1),
]
configs = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"d{c.head_dim}")


def forward(config, mask, q, k, v, *, seed=0, race=False):
    executor = simt.SimtExecutor(check_forward(q, k, v, None), mask, config=config)
    out, lse = poisoned(q.shape, q.dtype), poisoned((q.shape[0], q.shape[2], q.shape[1]), "f4")
    with sim.options(seed=seed, race=race):
        executor.forward(q, k, v, out, lse)
    return out, lse


def check(config, mask, q, k, v, dout, **options):
    got = forward(config, mask, q, k, v, **options)
    ref, low = expected(mask, q, k, v, dout)
    for name, *values in zip(("out", "lse"), got, ref, low, strict=False):
        assert_within_reference(*values, name=name)
    return got


@configs
@pytest.mark.parametrize("name", mask_gallery(9, 21))
def test_masks(name, config):
    mask = mask_gallery(9, 21)[name]
    heads = mask.heads or 2
    check(config, mask, *make_qkv(mask.batch or 1, 9, 21, heads, 1, config.head_dim, seed=5))


@configs
@pytest.mark.parametrize("nk", [1, 3, 7, 8, 9, 16, 17, 33])
def test_lengths_around_the_tiles(nk, config):
    """Nothing beyond the last key is read: it would lie outside the array."""
    check(config, mask_gallery(5, nk)["dense"], *make_qkv(1, 5, nk, 1, 1, config.head_dim))


@configs
@pytest.mark.parametrize("seed", range(4))
def test_no_race_under_any_schedule(seed, config):
    mask, inputs = mask_gallery(9, 33)["dense"], make_qkv(1, 9, 33, 1, 1, config.head_dim)
    first = check(config, mask, *inputs)
    assert bits(check(config, mask, *inputs, seed=seed, race=True)) == bits(first)


@configs
def test_hidden_values_that_are_not_finite(config):
    mask, (q, k, v, dout) = mask_gallery(12, 21)["padding"], make_qkv(2, 12, 21, 1, 1, 32)
    q, k, v, dout = (np.ascontiguousarray(x[..., : config.head_dim]) for x in (q, k, v, dout))
    unseen = ~np.broadcast_to(mask.dense(), (2, 1, 12, 21)).any(axis=(1, 2))
    assert unseen.any()
    zero = [np.where(unseen[..., None, None], np.float32(0), x) for x in (k, v)]
    nan = [
        np.where(unseen[..., None, None], np.float32(x), y) for x, y in ((np.nan, k), (np.inf, v))
    ]
    assert bits(forward(config, mask, q, *nan)) == bits(forward(config, mask, q, *zero))
    check(config, mask, q, *zero, dout)


@configs
def test_the_same_bits_as_without_sending(config):
    filled = replace(config, send_v=False)
    mask, (q, k, v, _) = mask_gallery(9, 33)["causal"], make_qkv(1, 9, 33, 2, 1, config.head_dim)
    assert bits(forward(config, mask, q, k, v)) == bits(forward(filled, mask, q, k, v))


@pytest.mark.parametrize("limit", [227 * KB, 163 * KB, 99 * KB], ids=lambda n: f"{n // KB}KB")
def test_when_the_table_sends(limit):
    """Whole vectors of float32 that fill the tile's width, on a device with ``cp.async``."""
    sending = 0
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for head_dim in range(4, 257, 4):
            for vectors in (True, False):
                limits = {"vectors": vectors, "smem_limit": limit}
                plain = forward_config(dtype, head_dim, **limits)
                config = forward_config(dtype, head_dim, cp_async=True, **limits)
                if plain is None:
                    assert config is None
                    continue
                whole = head_dim == config.width
                assert config.send_v == (whole and vectors and dtype == "float32"), config
                assert not plain.send_v
                if config.send_v:
                    sending += 1
                    assert callable(make_fwd_simt(config))
    assert sending >= 4


def too_small(limit, monkeypatch):
    monkeypatch.setattr(simt._Simulator, "smem_limit", limit)
    return f"float64 and head_dim 5 within the {limit} bytes of shared memory"


def test_a_forward_that_does_not_fit_says_so(monkeypatch):
    reason = too_small(2 * KB, monkeypatch)
    q, k, v, _ = make_qkv(1, 3, 3, 1, 1, 5, np.float64)
    with pytest.raises(ValueError, match=f"no forward kernel for {reason}"):
        nbflash.attention(q, k, v, impl="simt")


def test_a_backward_that_does_not_fit_says_so(monkeypatch):
    q, k, v, dout = make_qkv(1, 3, 3, 1, 1, 5, np.float64)
    reason = too_small(16 * KB, monkeypatch)
    out, lse = nbflash.attention(q, k, v, impl="simt", return_lse=True)
    with pytest.raises(ValueError, match=f"no backward kernel for {reason}"):
        nbflash.attention_backward(dout, q, k, v, out, lse, impl="simt")
