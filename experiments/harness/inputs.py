"""Q, K and V to run on: standard normal, or a user's own from a file."""

import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np

from experiments.harness.errors import BadInput
from nbflash.testing import make_qkv

LAYOUT = "(batch, seqlen, heads, head_dim)"


def random_qkv(problem, dtype, seed):
    """Standard normal q, k, v and dout for a problem of a sweep."""
    n, heads = problem["seqlen"], problem["heads"]
    return make_qkv(problem["batch"], n, n, heads, heads, problem["head_dim"], dtype, seed)


def random_inputs(xp, shape, dtype, seed, heads_kv=None):
    """The same of one shape, drawn by the array library; bfloat16 are float32 draws cut off.

    k and v have ``heads_kv`` heads where it is given.
    """
    rng = xp.random.default_rng(seed)
    batch, n, heads, head_dim = shape
    shared, found = (batch, n, heads_kv or heads, head_dim), []
    for size in (shape, shared, shared, shape):
        x = rng.standard_normal(size, dtype=np.float32)
        if dtype.name == "bfloat16":
            x, bits = xp.empty(size, dtype), x.view(np.uint32) >> 16
            x.view(np.uint16)[...] = bits
        found.append(x.astype(dtype, copy=False))
    return found


def load_qkv(path, dtype, seed):
    """A user's q, k and v with a standard normal dout.

    Parameters
    ----------
    path : path-like
        ``.npz`` or ``.safetensors`` with arrays ``q``, ``k`` and ``v``, or an ``.npy`` whose first
        axis holds the three. Layout (batch, seqlen, heads, head_dim), or without the batch.
    dtype : numpy.dtype
        Cast to this.

    Returns
    -------
    q, k, v, dout : arrays (batch, seqlen, heads, head_dim)
        k and v may have fewer heads.
    """
    path = Path(path)
    readers = {".npz": _read_npz, ".npy": _read_npy, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise BadInput(f"--input {path}: expected one of {', '.join(readers)}")
    if not path.is_file():
        raise BadInput(f"--input {path}: no such file")
    try:
        arrays = readers[path.suffix](path)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise BadInput(f"--input {path}: cannot be read as {path.suffix}: {error}") from None
    qkv = {name: _checked(path, name, arrays[name], dtype) for name in "qkv"}
    _check_shapes(path, **qkv)
    dout = np.random.default_rng(seed).standard_normal(qkv["q"].shape).astype(dtype)
    return *qkv.values(), dout


def _read_npz(path):
    file = np.load(path, allow_pickle=False)
    if isinstance(file, np.ndarray):
        raise BadInput(f"--input {path}: holds a single array, as .npy does")
    with file:
        return _by_name(path, file)


def _read_npy(path):
    array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise BadInput(f"--input {path}: holds named arrays, as .npz does")
    if array.ndim not in (4, 5) or len(array) != 3:
        raise BadInput(
            f"--input {path}: shape {array.shape}, expected (3, seqlen, heads, "
            f"head_dim) or (3, batch, seqlen, heads, head_dim)"
        )
    return dict(zip("qkv", array, strict=True))


def _read_safetensors(path):
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise BadInput(f"--input {path}: needs the package safetensors") from None
    with suppress(ImportError):
        import ml_dtypes  # noqa: F401  makes NumPy know bfloat16
    try:
        with safe_open(path, framework="numpy") as file:
            return _by_name(path, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, TypeError) as error:
        raise BadInput(f"--input {path}: {error}") from None


def _by_name(path, arrays):
    found = {name.lower(): name for name in arrays}
    missing = [name for name in "qkv" if name not in found]
    if missing:
        raise BadInput(f"--input {path}: no array {missing[0]!r}, it holds {sorted(arrays)}")
    return {name: arrays[found[name]] for name in "qkv"}


def _checked(path, name, array, dtype):
    if not isinstance(array, np.ndarray):
        raise BadInput(f"--input {path}: {name} is not an array")
    if array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or 0 in array.shape:
        raise BadInput(f"--input {path}: {name} has shape {array.shape}, expected {LAYOUT}")
    floating = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    if not floating or not np.isfinite(array.astype(np.float64)).all():
        raise BadInput(f"--input {path}: {name} must hold finite floating-point numbers")
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(array.astype(dtype))
    if not np.isfinite(cast.astype(np.float64)).all():
        raise BadInput(f"--input {path}: {name} overflows {dtype}")
    return cast


def _check_shapes(path, q, k, v):
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise BadInput(f"--input {path}: {q.shape=}, {k.shape=}, {v.shape=} do not fit {LAYOUT}")
    if q.shape[2] % k.shape[2]:
        raise BadInput(f"--input {path}: {q.shape[2]} query heads over {k.shape[2]} of k and v")
    if q.shape[1] != k.shape[1]:
        raise BadInput(f"--input {path}: the masks are square, {q.shape[1]=} and {k.shape[1]=}")
