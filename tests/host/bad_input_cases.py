"""Mistakes in the arguments of `attention`, each with the error that names it."""

import numpy as np
import scipy.sparse

import masks
from nbflash.testing import poisoned

BATCH, NQ, NK, HEADS, HEADS_KV, D = 2, 6, 9, 4, 2, 8
Q_SHAPE, KV_SHAPE, LSE_SHAPE = (BATCH, NQ, HEADS, D), (BATCH, NK, HEADS_KV, D), (BATCH, HEADS, NQ)


class OnDevice:
    """An array of another library, by its DLPack device alone; exporting it fails."""

    def __init__(self, device_type):
        self.device_type = device_type

    def __dlpack_device__(self):
        return self.device_type, 0

    def __dlpack__(self, **kwargs):
        raise BufferError("requires grad")


class CudaInterface:
    """An array of another library in CUDA memory."""

    @property
    def __cuda_array_interface__(self):
        return {"version": 3, "shape": KV_SHAPE, "typestr": "<f4", "data": (0, False)}


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def misaligned(shape, dtype=np.float32):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.full(size + 1, 0, np.uint8)[1:].view(dtype).reshape(shape)


def odd_strides(shape):
    """float32 values in records of 33 bytes: the strides are not multiples of 4."""
    record = np.dtype([("x", np.float32, shape[-1:]), ("gap", np.uint8)])
    return np.zeros(shape[:-1], record)["x"]


def read_only(shape):
    x = poisoned(shape)
    x.setflags(write=False)
    return x


# id: (changed arguments, error, pattern of the message)
ARRAYS = {
    "q-list": ({"q": [1.0]}, TypeError, "q must be a NumPy or CuPy array, .* got list"),
    "q-none": ({"q": None}, TypeError, "q must be a NumPy or CuPy array, .* got NoneType"),
    "k-string": ({"k": "keys"}, TypeError, "k must be a NumPy or CuPy array, .* got str"),
    "v-float": ({"v": 3.0}, TypeError, "v must be a NumPy or CuPy array, .* got float"),
    "v-numpy-scalar": ({"v": np.float32(3)}, TypeError, "v must be .* got numpy.float32"),
    "k-sparse": (
        {"k": scipy.sparse.csr_array((3, 3))},
        TypeError,
        "k must be a NumPy or CuPy array, .* got scipy.sparse",
    ),
    "q-masked-array": (
        {"q": np.ma.zeros(Q_SHAPE, np.float32)},
        TypeError,
        "q must not be a masked array; pass the mask as mask=",
    ),
    "k-on-cuda": (
        {"k": CudaInterface()},
        TypeError,
        "k is a .*CudaInterface in CUDA memory but q is a numpy.ndarray in host memory",
    ),
    "v-on-cuda-by-dlpack": (
        {"v": OnDevice(2)},
        TypeError,
        "v is a .*OnDevice in CUDA memory but q",
    ),
    "q-on-cuda": ({"q": OnDevice(2)}, TypeError, "k is a numpy.ndarray in host memory but q is a"),
    "k-on-rocm": ({"k": OnDevice(10)}, TypeError, "k must live in host or CUDA memory, .* type 10"),
    "v-cannot-be-shared": (
        {"v": OnDevice(1)},
        TypeError,
        r"v \(.*OnDevice\) cannot be shared: req",
    ),
}
DTYPE = "must have dtype float16, bfloat16, float32, float64 in native byte order, got"
DTYPES = {
    "q-int32": ({"q": zeros(*Q_SHAPE, dtype=np.int32)}, TypeError, f"q {DTYPE} int32"),
    "q-bool": ({"q": zeros(*Q_SHAPE, dtype=bool)}, TypeError, f"q {DTYPE} bool"),
    "q-complex": ({"q": zeros(*Q_SHAPE, dtype=np.complex64)}, TypeError, f"q {DTYPE} complex64"),
    "k-int8": ({"k": zeros(*KV_SHAPE, dtype=np.int8)}, TypeError, f"k {DTYPE} int8"),
    "k-object": ({"k": zeros(*KV_SHAPE, dtype=object)}, TypeError, f"k {DTYPE} object"),
    "v-string": ({"v": zeros(*KV_SHAPE, dtype="U3")}, TypeError, f"v {DTYPE} <U3"),
    "v-uint16-bits": ({"v": zeros(*KV_SHAPE, dtype=np.uint16)}, TypeError, f"v {DTYPE} uint16"),
    "v-time": ({"v": zeros(*KV_SHAPE, dtype="m8[s]")}, TypeError, f"v {DTYPE} timedelta64"),
    "q-other-byte-order": (
        {"q": np.zeros(Q_SHAPE, np.dtype(np.float32).newbyteorder())},
        TypeError,
        f"q {DTYPE} [<>]f4",
    ),
    "k-mixed": (
        {"k": zeros(*KV_SHAPE, dtype=np.float16)},
        TypeError,
        "k must have the dtype of q, float32, got float16",
    ),
    "v-mixed": (
        {"v": zeros(*KV_SHAPE, dtype=np.float64)},
        TypeError,
        "v must have the dtype of q, float32, got float64",
    ),
}
SHAPES = {
    "q-3-axes": ({"q": zeros(NQ, HEADS, D)}, ValueError, r"q must have 4 axes .*got shape \(6, 4"),
    "q-0-axes": ({"q": zeros()}, ValueError, r"q must have 4 axes .*got shape \(\)"),
    "k-2-axes": (
        {"k": zeros(NK, D)},
        ValueError,
        r"k must have 4 axes \(batch, seqlen_k.*\(9, 8\)",
    ),
    "v-5-axes": ({"v": zeros(1, *KV_SHAPE)}, ValueError, r"v must have 4 axes .*\(1, 2, 9, 2, 8\)"),
    "k-batch": ({"k": zeros(3, NK, HEADS_KV, D)}, ValueError, "k must have batch=2 like q, got 3"),
    "k-head-dim": (
        {"k": zeros(BATCH, NK, HEADS_KV, 16)},
        ValueError,
        "k must have head_dim=8 like q, got 16",
    ),
    "v-seqlen": (
        {"v": zeros(BATCH, NK + 1, HEADS_KV, D)},
        ValueError,
        r"v must have the shape of k, \(2, 9, 2, 8\), got \(2, 10, 2, 8\)",
    ),
    "v-heads": (
        {"v": zeros(BATCH, NK, HEADS, D)},
        ValueError,
        r"v must have the shape of k, \(2, 9, 2, 8\), got \(2, 9, 4, 8\)",
    ),
    "v-batch": ({"v": zeros(1, NK, HEADS_KV, D)}, ValueError, "v must have the shape of k"),
    "v-head-dim": ({"v": zeros(BATCH, NK, HEADS_KV, 4)}, ValueError, "v must have the shape of k"),
    "heads-ratio": (
        {"k": zeros(BATCH, NK, 3, D), "v": zeros(BATCH, NK, 3, D)},
        ValueError,
        "k and v must have a number of heads that divides the 4 heads of q, got 3",
    ),
    "more-kv-heads-than-heads": (
        {"k": zeros(BATCH, NK, 8, D), "v": zeros(BATCH, NK, 8, D)},
        ValueError,
        "divides the 4 heads of q, got 8",
    ),
    "no-kv-heads": (
        {"k": zeros(BATCH, NK, 0, D), "v": zeros(BATCH, NK, 0, D)},
        ValueError,
        "divides the 4 heads of q, got 0",
    ),
    "no-heads": (
        {"q": zeros(BATCH, NQ, 0, D)},
        ValueError,
        r"q must have at least one head, got shape \(2, 6, 0, 8\)",
    ),
    "head-dim-0": (
        {"q": zeros(BATCH, NQ, HEADS, 0)},
        ValueError,
        "q must have head_dim 1 to 256, got 0",
    ),
    "head-dim-257": (
        {"q": zeros(BATCH, NQ, HEADS, 257)},
        ValueError,
        "q must have head_dim 1 to 256, got 257",
    ),
    "seqlen-beyond-int32": (
        {"q": np.broadcast_to(np.float32(0), (BATCH, 2**31, HEADS, D))},
        ValueError,
        "q must have seqlen at most 2147483647, got 2147483648",
    ),
}
CONTIGUOUS = r"must have a contiguous last axis \(stride 4 bytes\), got strides"
LAYOUT = {
    "q-every-other-feature": (
        {"q": zeros(BATCH, NQ, HEADS, 2 * D)[..., ::2]},
        ValueError,
        f"q {CONTIGUOUS} .* 8",
    ),
    "k-reversed-features": (
        {"k": zeros(*KV_SHAPE)[..., ::-1]},
        ValueError,
        f"k {CONTIGUOUS} .* -4",
    ),
    "v-fortran-order": ({"v": np.asfortranarray(zeros(*KV_SHAPE))}, ValueError, f"v {CONTIGUOUS}"),
    "v-broadcast-feature": (
        {"v": np.broadcast_to(zeros(BATCH, NK, HEADS_KV, 1), KV_SHAPE)},
        ValueError,
        f"v {CONTIGUOUS} .* 0",
    ),
    "q-misaligned": (
        {"q": misaligned(Q_SHAPE)},
        ValueError,
        "q must be aligned to its item size of 4 bytes, got a base address that is [123] bytes off",
    ),
    "k-odd-strides": (
        {"k": odd_strides(KV_SHAPE)},
        ValueError,
        "k must be aligned: strides must be multiples of 4 bytes, got .* 33",
    ),
}
SCALES = {
    "scale-nan": (
        {"scale": float("nan")},
        ValueError,
        r"scale must be finite in float32, at most 1.7e\+38 in magnitude, got nan",
    ),
    "scale-inf": (
        {"scale": np.inf},
        ValueError,
        r"scale must be finite in float32, at most 1.7e\+38 in magnitude, got inf",
    ),
    "scale-minus-inf": ({"scale": -np.inf}, ValueError, "scale must be finite .* got -inf"),
    "scale-beyond-float32": ({"scale": 1e39}, ValueError, r"scale must be finite .* got 1e\+39"),
    "scale-beyond-float64": ({"scale": 10**400}, ValueError, "scale must be finite .* got 1000"),
    "scale-numpy-nan": (
        {"scale": np.float32("nan")},
        ValueError,
        "scale must be finite .* got .*nan",
    ),
    "scale-half-inf": (
        {"scale": np.float16("inf")},
        ValueError,
        r"scale must be finite .* got .*inf",
    ),
    "scale-string": ({"scale": "0.5"}, TypeError, "scale must be a real number or None, got '0.5'"),
    "scale-bool": ({"scale": True}, TypeError, "scale must be a real number or None, got True"),
    "scale-complex": ({"scale": 1j}, TypeError, "scale must be a real number or None, got 1j"),
    "scale-array": ({"scale": np.ones(1)}, TypeError, r"scale must be a real number .* array\(\[1"),
}
WINDOW = r"window must be \(left, right\), non-negative integers or None, got"
FLAGS = {
    "causal-int": ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
    "causal-none": ({"causal": None}, TypeError, "causal must be True or False, got None"),
    "causal-string": ({"causal": "no"}, TypeError, "causal must be True or False, got 'no'"),
    "causal-array": ({"causal": np.ones(1)}, TypeError, "causal must be True or False, got array"),
    "window-int": ({"window": 5}, TypeError, f"{WINDOW} 5"),
    "window-one-side": ({"window": (5,)}, TypeError, rf"{WINDOW} \(5,\)"),
    "window-three-sides": ({"window": (1, 2, 3)}, TypeError, rf"{WINDOW} \(1, 2, 3\)"),
    "window-string": ({"window": "12"}, TypeError, f"{WINDOW} '12'"),
    "window-set": ({"window": {1, 2}}, TypeError, f"{WINDOW} {{1, 2}}"),
    "window-float": ({"window": (1.0, 2)}, TypeError, rf"{WINDOW} \(1.0, 2\)"),
    "window-bool": ({"window": (True, 2)}, TypeError, rf"{WINDOW} \(True, 2\)"),
    "window-negative-left": ({"window": (-1, 2)}, ValueError, rf"{WINDOW} \(-1, 2\)"),
    "window-negative-right": ({"window": (None, -2)}, ValueError, rf"{WINDOW} \(None, -2\)"),
    "return-lse-int": ({"return_lse": 1}, TypeError, "return_lse must be True or False, got 1"),
}
MASKS = {
    "mask-dense-array": (
        {"mask": np.ones((NQ, NK), bool)},
        TypeError,
        r"mask must be a masks.Mask or None, got ndarray; use masks.from_dense\(mask\)",
    ),
    "mask-scipy": (
        {"mask": scipy.sparse.csr_array(np.ones((NQ, NK)))},
        TypeError,
        r"got csr_array; use masks.from_scipy\(mask, block\)",
    ),
    "mask-function": (
        {"mask": lambda q, kv: q >= kv},
        TypeError,
        r"got function; use masks.from_function\(fn, nq, nk\)",
    ),
    "mask-list": ({"mask": [[True]]}, TypeError, "mask must be a masks.Mask or None, got list"),
    "mask-string": ({"mask": "causal"}, TypeError, "mask must be a masks.Mask or None, got str"),
    "mask-bool": ({"mask": True}, TypeError, "mask must be a masks.Mask or None, got bool"),
    "mask-size": (
        {"mask": masks.causal(NQ, NK + 1)},
        ValueError,
        r"mask must have shape \(seqlen_q, seqlen_k\) = \(6, 9\), got \(6, 10\)",
    ),
    "mask-transposed": (
        {"mask": masks.causal(NQ, NK).T},
        ValueError,
        r"mask must have shape .* \(6, 9\), got \(9, 6\)",
    ),
    "mask-batch": (
        {"mask": masks.per_batch([masks.dense(NQ, NK), masks.causal(NQ, NK), masks.dense(NQ, NK)])},
        ValueError,
        "mask has batch=3, but q has batch=2",
    ),
    "mask-heads-of-kv": (
        {"mask": masks.per_head([masks.dense(NQ, NK), masks.causal(NQ, NK)])},
        ValueError,
        "mask has heads=2, but q has heads=4",
    ),
}
IMPLS = {
    "impl-unknown": ({"impl": "cuda"}, ValueError, "impl must be one of auto, sm90, .* got 'cuda'"),
    "impl-upper-case": ({"impl": "CPU"}, ValueError, "impl must be one of auto, .* got 'CPU'"),
    "impl-none": ({"impl": None}, TypeError, "impl must be a string, got None"),
    "impl-number": ({"impl": 90}, TypeError, "impl must be a string, got 90"),
    "impl-list": ({"impl": ["cpu"]}, TypeError, r"impl must be a string, got \['cpu'\]"),
    "impl-simt-on-numpy": (
        {"impl": "simt"},
        ValueError,
        r"impl='simt' cannot run (.|\n)*simt runs on CUDA arrays, got NumPy arrays",
    ),
    "impl-sm90": (
        {"impl": "sm90"},
        ValueError,
        "impl='sm90' cannot run (.|\n)*(not installed|no usable|9.0|CUDA arrays)",
    ),
    "impl-sm80": ({"impl": "sm80"}, ValueError, "impl='sm80' cannot run (.|\n)*needs float16"),
}
OUTS = {
    "out-list": ({"out": []}, TypeError, "out must be a NumPy or CuPy array, .* got list"),
    "out-on-cuda": ({"out": CudaInterface()}, TypeError, "out is a .* in CUDA memory but q is"),
    "out-axes": (
        {"out": poisoned((NQ, HEADS, D))},
        ValueError,
        r"out must have 4 axes .*\(6, 4, 8\)",
    ),
    "out-heads-first": (
        {"out": poisoned((BATCH, HEADS, NQ, D))},
        ValueError,
        r"out must have shape .* = \(2, 6, 4, 8\), got \(2, 4, 6, 8\)",
    ),
    "out-like-k": (
        {"out": poisoned(KV_SHAPE)},
        ValueError,
        r"out must have shape .* \(2, 9, 2, 8\)",
    ),
    "out-dtype": (
        {"out": poisoned(Q_SHAPE, np.float64)},
        TypeError,
        "out must have dtype float32, got float64",
    ),
    "out-read-only": (
        {"out": read_only(Q_SHAPE)},
        ValueError,
        "out must be writeable, got a read-",
    ),
    "out-fortran-order": (
        {"out": np.asfortranarray(poisoned(Q_SHAPE))},
        ValueError,
        f"out {CONTIGUOUS}",
    ),
    "out-misaligned": ({"out": misaligned(Q_SHAPE)}, ValueError, "out must be aligned to its item"),
    "out-overlaps-itself": (
        {"out": np.lib.stride_tricks.as_strided(poisoned(Q_SHAPE), Q_SHAPE, (0, 128, 32, 4))},
        ValueError,
        r"out must not overlap itself, got strides \(0, 128, 32, 4\)",
    ),
    "out-rows-overlap": (
        {"out": np.lib.stride_tricks.as_strided(poisoned(Q_SHAPE), Q_SHAPE, (768, 96, 32, 4))},
        ValueError,
        r"out must not overlap itself, got strides \(768, 96, 32, 4\)",
    ),
}
CASES = {**ARRAYS, **DTYPES, **SHAPES, **LAYOUT, **SCALES, **FLAGS, **MASKS, **IMPLS, **OUTS}
