"""The kernel that merges two parts, bound to the layout of its arrays."""

from __future__ import annotations

import functools
import math

from nbflash.backends.split_kv.merge import HEADS, QUERIES, MergeConfig, merge_spec
from nbflash.cuda.device import cuda_device
from nbflash.inputs import arrays

_LANES = 4  # elements of one access, at most: of half precision a warp then reads 256 bytes


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
    out_a, (out_b, _), (out, _) = part_a[0], part_b, results
    if not out_b.size or not out.size:
        return
    device_id = arrays.device_of(out)[1]
    tensors = *part_a, *part_b, *results
    key = tuple((x.dtype.name, arrays.strides(x)) for x in tensors)
    shape, lanes = out_b.shape, _lanes(out_a, out_b, out)
    run, device = _bound(device_id, shape, key, lanes, places is not None)
    # Without places the words of an LSE stand there, which nobody reads.
    run(device.words((*tensors, results[1] if places is None else places)))


@functools.lru_cache(maxsize=256)
def _bound(device_id, shape, key, lanes, indexed):
    """The kernel for arrays of these dtypes and strides, and its device."""
    device = cuda_device(device_id)
    (batch, n, heads, head_dim), (dtypes, strides) = shape, zip(*key, strict=True)
    config = MergeConfig(dtypes[0], dtypes[2], head_dim, lanes, indexed)
    blocks = batch * -(-n // QUERIES) * -(-heads // HEADS)
    return device.bind(merge_spec(config), blocks, (*strides, n, heads)), device


def _lanes(*outs):
    """Elements of one access: a power of two that divides rows, of aligned bytes, at most 16."""
    lanes = math.gcd(_LANES, outs[0].shape[-1])
    while any(arrays.alignment_in_memory(x) < lanes * x.itemsize for x in outs):
        lanes //= 2
    return lanes
