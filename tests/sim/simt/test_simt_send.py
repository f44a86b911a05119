"""When the forward sends V by ``cp.async``, that it changes no bit, and what fits no device."""

from dataclasses import replace

import numpy as np
import pytest
from simt_runs import bits

import nbflash
from nbflash.backends.simt import executor as simt
from nbflash.backends.simt.configs import SimtConfig, forward_config
from nbflash.backends.simt.forward import make_fwd_simt
from nbflash.cuda.device import Simulated
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.problem import check_forward
from nbflash.testing import make_qkv, mask_gallery, poisoned

KB = 1024
# Tiles exactly as wide as head_dim, of 8 keys, or 16 in the second.
CONFIGS = [
    SimtConfig("float32", 8, 2, 2, 4, 4, vectors=True, send_v=True),
    SimtConfig("float32", 16, 4, 2, 4, 4, vectors=True, send_v=True, p_over_k=True),
    SimtConfig("float32", 32, 2, 2, 4, 4, vectors=True, send_v=True, chunks=4, unroll=1),
]
configs = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"d{c.head_dim}")


def forward(config, mask, q, k, v):
    executor = simt.SimtExecutor(AttentionSpec(check_forward(q, k, v, None), mask), config=config)
    out, lse = poisoned(q.shape, q.dtype), poisoned((q.shape[0], q.shape[2], q.shape[1]), "f4")
    executor.forward(q, k, v, out, lse)
    return out, lse


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
    monkeypatch.setattr(Simulated, "smem_limit", limit)
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
