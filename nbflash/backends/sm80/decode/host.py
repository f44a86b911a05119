"""The first kernel of decode by mma, bound to a problem, a mask and a layout."""

from __future__ import annotations

from dataclasses import replace

from nbflash.backends.sm80.decode.config import KEYS, decode_config
from nbflash.backends.sm80.decode.kernel import decode_sm80_spec
from nbflash.backends.split_kv.shares import share_out
from nbflash.backends.split_kv.splits import scale_strides
from nbflash.cuda import score_params
from nbflash.definitions.constants import HALF_PRECISION, VECTOR_BYTES
from nbflash.inputs import arrays


def why_not(problem, q, cache) -> list[str]:
    """Reasons why this kernel cannot run a problem in its layout; empty when it can."""
    p = problem
    if p.dtype not in HALF_PRECISION:
        return [f"needs float16 or bfloat16, got {p.dtype}"]
    reasons = []
    columns = 8 if p.cache_dtype == p.dtype else 16
    if p.head_dim % columns or p.head_dim > 256:
        reasons.append(f"needs a head_dim of {columns}, {2 * columns}, ... 256, got {p.head_dim}")
    if p.page_size is not None and p.page_size % KEYS:
        reasons.append(f"needs pages of a multiple of {KEYS} keys, got {p.page_size}")
    least = min(map(arrays.alignment, (q, cache.k_cache, cache.v_cache)))
    if least < VECTOR_BYTES and p.device == arrays.CUDA:
        reasons.append(f"needs addresses and strides that are multiples of 16 bytes, got {least}")
    return reasons


def why_not_capability(problem, capability) -> list[str]:
    """Reasons in a device's compute capability, 8.0 or later."""
    if problem.cache_dtype != "float8_e4m3fn" or capability >= (8, 9):
        return []
    return ["needs compute capability 8.9 for float8, this device has {}.{}".format(*capability)]


class Sm80Partial:
    """As `nbflash.backends.sm90.decode.host.Sm90Partial` is, with mma and cp.async.

    Parameters
    ----------
    device, problem, mask, q, cache
        As of `SimtPartial`.
    config : DecodeSm80Config, optional
        Instead of the table's row.
    splits : int, optional
        Instead of what the rule gives.
    """

    def __init__(self, device, problem, mask, q, cache, *, config=None, splits=None):
        p, cfg = problem, config or self.config_for(device, problem, mask)
        score, params = score_params.prepare(p.score, p.in_positions, device.capability)
        cfg = replace(cfg, score=score)
        shares = share_out(device, p, mask, cfg, cache.block_table, splits)
        self.splits, self.counted = shares.splits, shares.counted
        shrink = 2 // cache.k_cache.itemsize  # two bytes are an element
        caches = (tuple(s // shrink for s in arrays.strides(x)) for x in cache[:2])
        scales = map(scale_strides, (cache.k_scale, cache.v_scale))
        constants = arrays.strides(q), *caches, *scales, *shares.sizes, *p.window_within(mask)
        spec, more = decode_sm80_spec(cfg), (device.params(params),)
        self._run = device.bind(spec, shares.blocks, constants, shares.tables, more)
        self._address = device.address

    @staticmethod
    def config_for(device, p, mask):
        """The geometry for a problem."""
        known = {"masked": mask is not None, "negate": p.scale < 0, "scored": p.score is not None}
        stored = p.cache_dtype if p.cache_dtype != p.dtype else ""
        return decode_config(p.dtype, p.head_dim, stored, smem_limit=device.smem_limit, **known)

    def __call__(self, q, cache, part_o, part_lse, out=0, lse=0, counts=None):
        """Write ``part_o`` and ``part_lse``, and with ``counts`` ``out`` and ``lse``."""
        address = self._address
        k, v, lengths, table, *scales = cache
        given = q, k, v, *scales, lengths, table, part_o, part_lse, out, lse
        counted = (0, False) if counts is None else (address(counts), True)
        self._run([*(0 if x is None else address(x) for x in given), *counted])
