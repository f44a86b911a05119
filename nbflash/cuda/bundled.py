"""Cubins that come with nbflash: of common configurations, for every architecture with kernels.

`nbflash.planning.bundle` writes the folder, for wheels; a checkout has none. A pack has the cubins
of one architecture, dtype and head_dim, compressed together. The index has the place of each cubin
by its key (`nbflash.cuda.kernel_key`, without the compiler's versions), and the digests of the
sources that keys are made of, so that sources need not be parsed again.
"""

import functools
import hashlib
import json
import lzma
from pathlib import Path

FOLDER = Path(__file__).parent / "cubins"
INDEX = "index.json"


@functools.cache
def index():
    """``{"kernels": {key: [pack, start, size, digest]}, "sources": {name: [digest, modules]}}``."""
    try:
        return json.loads((FOLDER / INDEX).read_bytes())
    except FileNotFoundError:
        return {"kernels": {}, "sources": {}}


def find(key):
    """The cubin of a key, or None.

    Raises
    ------
    RuntimeError
        If the pack is damaged.
    """
    place = index()["kernels"].get(key)
    if place is None:
        return None
    pack, start, size, digest = place
    cubin = _unpacked(pack)[start : start + size]
    if hashlib.sha256(cubin).hexdigest() != digest:
        raise RuntimeError(f"{FOLDER / pack} is damaged: install nbflash again")
    return cubin


@functools.lru_cache(maxsize=2)
def _unpacked(pack):
    return lzma.decompress((FOLDER / pack).read_bytes())


def remove():
    """Remove all files that `write` wrote."""
    for file in FOLDER.glob("*"):
        file.unlink()
    index.cache_clear()


def write(packs, sources):
    """Make the folder hold these cubins and no others.

    Parameters
    ----------
    packs : dict
        Name of a pack to a dict of keys to cubins.
    sources : dict
        As in `index`.
    """
    remove()
    FOLDER.mkdir(exist_ok=True)
    kernels = {}
    for name, cubins in packs.items():
        data = b""
        for key, cubin in cubins.items():
            kernels[key] = f"{name}.xz", len(data), len(cubin), hashlib.sha256(cubin).hexdigest()
            data += cubin
        (FOLDER / f"{name}.xz").write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    (FOLDER / INDEX).write_text(json.dumps({"kernels": kernels, "sources": sources}))
