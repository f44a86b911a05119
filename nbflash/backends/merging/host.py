"""The kernel that merges two parts, or adds them, bound to the layout of its arrays."""

from __future__ import annotations

import functools
import math

from nbflash.backends.merging.merge import HEADS, QUERIES, MergeConfig, merge_spec
from nbflash.cuda.device import cuda_device
from nbflash.inputs import arrays

LANES = 4  # elements of one access, at most: of half precision a warp then reads 256 bytes


def kernels_of_merging(dtype, head_dim):
    """What merges parts, or adds them, in contiguous arrays.

    Results of stages are merged in their dtype, or where there are several in float32; gradients
    that come from other ranks are float32, or of the inputs' dtype.
    """
    wide = "float32"
    merged = (dtype, dtype, True), (wide, dtype, True)
    added = [(total, part, False) for total in (dtype, wide) for part in (dtype, wide)]
    return [
        merge_spec(MergeConfig(total, part, head_dim, LANES, indexed, weighted))
        for indexed in (False, True)
        for total, part, weighted in (*merged, *added)
    ]


def merge(part_a, part_b, results, places=None):
    """Write the merge of two parts; each is ``(out, lse)`` of native arrays.

    Parameters
    ----------
    part_a : pair of arrays
    part_b : pair of arrays
        Of some rows of part a, or of all. Its ``out`` may be of another dtype.
    results : pair of arrays
        Like those of part a, or those themselves. Rows that part b lacks are not written.
    places : int32 array, optional
        Which rows of part a those of part b are; by default the first ones.
    """
    _run((*part_a, *part_b, *results), places, weighted=True)


def add(total, part, places=None):
    """Add a part to some rows of a total, in place; arguments as of `merge`, without ``lse``."""
    _run((total, total, part, part, total, total), places, weighted=False)


def _run(tensors, places, *, weighted):
    out_a, _, out_b, _, out, lse = tensors
    if not out_b.size or not out.size:
        return
    layout = tuple((x.dtype.name, arrays.strides(x)) for x in tensors)
    how = _lanes(out_a, out_b, out), places is not None, weighted
    run, device = _bound(arrays.device_of(out)[1], out_b.shape, layout, how)
    run(device.words((*tensors, lse if places is None else places)))  # which nobody reads


@functools.lru_cache(maxsize=256)
def _bound(device_id, shape, layout, how):
    """The kernel for arrays of these dtypes and strides, and its device."""
    device = cuda_device(device_id)
    (batch, n, heads, head_dim), (dtypes, strides) = shape, zip(*layout, strict=True)
    config = MergeConfig(dtypes[0], dtypes[2], head_dim, *how)
    blocks = batch * -(-n // QUERIES) * -(-heads // HEADS)
    return device.bind(merge_spec(config), blocks, (*strides, n, heads)), device


def _lanes(*outs):
    """Elements of one access: a power of two that divides rows, of aligned bytes, at most 16."""
    lanes = math.gcd(LANES, outs[0].shape[-1])
    while any(arrays.alignment_in_memory(x) < lanes * x.itemsize for x in outs):
        lanes //= 2
    return lanes
