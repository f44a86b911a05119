"""Files of masks: what `masks.load` refuses."""

import io
import json

import numpy as np
import pytest

import masks


def test_load_refuses_other_files(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, a=np.ones(3))
    with pytest.raises(ValueError, match="not a mask file"):
        masks.load(path)
    path.write_bytes(b"text")
    with pytest.raises(ValueError, match="not a mask file"):
        masks.load(path)


def test_load_refuses_damaged_files():
    """Whatever a changed byte does to the archive, zlib, a header of NumPy, or the description."""
    whole, rng = io.BytesIO(), np.random.default_rng(0)
    masks.save(whole, masks.butterfly(64, block=8) & masks.causal(64))
    read = refused = 0
    for at in rng.integers(len(whole.getvalue()), size=60):
        data = bytearray(whole.getvalue())
        data[at] ^= 1 << rng.integers(8)
        try:
            read += isinstance(masks.load(io.BytesIO(data)), masks.Mask)
        except ValueError as error:
            refused += "not a mask file" in str(error)
    assert refused > 30
    assert read + refused == 60
    with pytest.raises(FileNotFoundError):
        masks.load("there is no such file")


@pytest.mark.parametrize("node", [5, [1], {"class": "BlockSparse", "fields": [1, 1, [0, 0]]}])
def test_load_refuses_what_is_no_mask(node):
    tree, file = json.dumps({"format": 1, "mask": node}).encode(), io.BytesIO()
    np.savez(file, tree=np.frombuffer(tree, np.uint8))
    file.seek(0)
    with pytest.raises(ValueError, match="not a mask file"):
        masks.load(file)


def test_load_refuses_another_format(tmp_path):
    tree = json.dumps({"format": 99, "mask": {}}).encode()
    np.savez(tmp_path / "m.npz", tree=np.frombuffer(tree, np.uint8))
    with pytest.raises(ValueError, match="format 99, this version reads 1"):
        masks.load(tmp_path / "m.npz")


def test_load_never_unpickles(tmp_path):
    np.savez(tmp_path / "m.npz", tree=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        masks.load(tmp_path / "m.npz")
