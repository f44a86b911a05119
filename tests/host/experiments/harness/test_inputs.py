"""Inputs: the shipped sample, a user's files, random draws."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import masks
from experiments.harness import inputs
from experiments.harness.errors import BadInput
from experiments.harness.inputs import load_qkv, random_inputs
from experiments.harness.oracle import poison
from nbflash.testing import make_qkv

DATA = Path(inputs.__file__).parents[1] / "data"


F32 = np.dtype(np.float32)


BF16 = np.dtype(ml_dtypes.bfloat16)


SHAPE = (2, 128, 2, 16)


def test_the_shipped_sample_is_one_layer_on_real_text():
    path = DATA / "sample.npz"
    assert path.stat().st_size <= 2 * 2**20
    with np.load(path, allow_pickle=False) as file:
        meta = json.loads(str(file["meta"]))
        assert {file[name].dtype.name for name in "qkv"} == {"float16"}
    assert meta["model_licence"] == "Apache-2.0"
    assert "public domain" in meta["text"]
    q, k, v, dout = load_qkv(path, F32, seed=0)
    assert q.shape == k.shape == v.shape == dout.shape == (1, 512, 12, 32)
    assert q.dtype == k.dtype == v.dtype == F32
    # Attention of a trained model is anything but even: neighbouring blocks hold 18 % of the pairs.
    mask = masks.local(512, 32, 1)
    kept = masks.coverage(q, k, mask)[0]
    assert mask.stats(32).token_density == 46 / 256
    assert kept.mean() > 0.5
    assert kept.max() > 0.7
    assert kept.min() < 0.25


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("form", ["npz", "npz upper case", "npy"])
def test_a_users_arrays_arrive_unchanged(tmp_path, form, batched):
    q, k, v, _ = make_qkv(1, 12, 12, 4, 4, 8, np.float32, seed=1)
    stored = (q, k, v) if batched else (q[0], k[0], v[0])
    path = tmp_path / f"x.{form[:3]}"
    if form == "npy":
        np.save(path, np.stack(stored))
    else:
        names = "QKV" if "upper" in form else "qkv"
        np.savez(path, other=np.arange(3), **dict(zip(names, stored, strict=True)))
    *loaded, dout = load_qkv(path, F32, seed=0)
    for got, expected in zip(loaded, (q, k, v), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.flags.c_contiguous
    assert dout.shape == q.shape
    assert np.abs(dout).mean() > 0.5


def test_safetensors_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"")
    with pytest.raises(BadInput, match="needs the package safetensors"):
        load_qkv(path, F32, seed=0)


def test_poison_and_inputs():
    q, k, v, dout = random_inputs(np, SHAPE, BF16, seed=0)
    assert q.dtype == BF16
    assert 0.9 < np.std([x.astype(np.float32) for x in (q, k, v, dout)]) < 1.1
    held = []
    empty_like = lambda x: held.append(np.empty_like(x)) or held[-1]
    poison(SimpleNamespace(empty_like=empty_like), q, k.astype(np.float32))
    assert all(np.isnan(x).all() for x in held)
