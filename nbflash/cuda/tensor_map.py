"""Tensor maps: how TMA sees a (batch, seqlen, heads, head_dim) tensor.

Source: CUDA driver API, ``cuTensorMapEncodeTiled``.
"""

from functools import lru_cache

from nbflash.inputs import arrays

_PANEL = 64  # columns of a box: 128 bytes, the span of the swizzle
ALIGNMENT = 16  # bytes, of the address and of every stride


def geometry(shape, strides, rows):
    """Sizes, steps in bytes and box of a map, the innermost axis first, as the driver takes them.

    Parameters
    ----------
    shape : tuple
        (batch, seqlen, heads, head_dim) in elements of two bytes.
    strides : tuple
        (batch, sequence, head) in elements, multiples of 8.
    rows : int
        Tokens of a box; a box is ``rows`` × 64 columns of one head, swizzled by 128 bytes.
    """
    batch, n, heads, head_dim = shape
    sizes = head_dim, n, heads, batch
    # An axis of length one is never stepped along: any legal stride will do.
    steps = tuple(
        2 * s if size > 1 else ALIGNMENT
        for s, size in zip((strides[1], strides[2], strides[0]), sizes[1:], strict=True)
    )
    return sizes, steps, (_PANEL, rows, 1, 1)


def encode(address, shape, strides, rows, dtype, fetched=256):
    """The map's words (16 integers of eight bytes); the first is the address.

    Parameters
    ----------
    address : int
        Of the first element, a multiple of 16.
    shape, strides, rows
        As of `geometry`.
    dtype : {"float16", "bfloat16"}
    fetched : {128, 256}
        Bytes that the L2 cache fetches at once.

    Raises
    ------
    RuntimeError
        If the driver rejects the map.
    """
    from cuda.bindings import driver as cu

    sizes, steps, box = geometry(shape, strides, rows)
    kind = {
        "float16": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[dtype]
    status, tensor_map = cu.cuTensorMapEncodeTiled(
        kind,
        4,
        address,
        [cu.cuuint64_t(x) for x in sizes],
        [cu.cuuint64_t(x) for x in steps],
        [cu.cuuint32_t(x) for x in box],
        [cu.cuuint32_t(1)] * 4,
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        getattr(cu.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{fetched}B"),
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status) != 0:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {status!r} for {shape=}, {strides=}")
    words = [int(x) for x in tensor_map.opaque]
    if words[0] != address:
        raise RuntimeError("this driver's tensor maps do not begin with the address")
    return words


class Maps:
    """Tensor maps of arrays of one dtype, each layout encoded once; ``fetched`` as of `encode`.

    ``layout(shape, strides, rows)``: the words of a map without the first, the address. A map is
    the pair (address, layout).
    """

    def __init__(self, dtype, fetched=256):
        def layout(shape, strides, rows):
            return encode(1 << 20, shape, strides, rows, dtype, fetched)[1:]

        self.layout = lru_cache(maxsize=16)(layout)

    def __call__(self, x, rows):
        """The map of ``x`` for boxes of ``rows`` tokens."""
        return x.data.ptr, self.layout(x.shape, arrays.strides(x), rows)
