"""The first kernel of decode on Hopper, bound to a problem, a mask and a layout."""

from __future__ import annotations

from nbflash.backends.sm90.decode.config import decode_config
from nbflash.backends.sm90.decode.kernel import decode_sm90_spec
from nbflash.backends.split_kv.shares import share_out
from nbflash.backends.split_kv.splits import scale_strides
from nbflash.cuda import tensor_map
from nbflash.definitions.constants import HALF_PRECISION
from nbflash.inputs import arrays


def config_for(problem, mask):
    """The geometry for a problem; `why_not` tells whether there is such a kernel."""
    p = problem
    stored = p.cache_dtype if p.cache_dtype != p.dtype else ""
    known = {"masked": mask is not None, "negate": p.scale < 0}
    return decode_config(p.dtype, p.head_dim, p.page_size, stored, **known)


def why_not(problem, mask, q, cache) -> list[str]:
    """Reasons why this kernel cannot run a problem in its layout; empty when it can."""
    p, given = problem, {"window": problem.window, "score": problem.score}
    none = "decode with {}= does not run on sm90"
    reasons = [none.format(name) for name, x in given.items() if x is not None]
    if p.dtype not in HALF_PRECISION:
        return [*reasons, f"needs float16 or bfloat16, got {p.dtype}"]
    reasons += config_for(p, mask).why_not()
    paged = q, cache.k_cache, cache.v_cache
    least = min(map(arrays.alignment, paged))
    if least < tensor_map.ALIGNMENT and p.device == arrays.CUDA:
        reasons.append(f"needs addresses and strides that are multiples of 16 bytes, got {least}")
    if any(s < 0 for x in paged for s in x.strides):
        reasons.append("needs strides that are not negative: copy the array first")
    return reasons


class Sm90Partial:
    """As `nbflash.backends.simt.decode_host.SimtPartial` is, with tensor cores and TMA.

    Parameters
    ----------
    device, problem, mask, q, cache
        As of `SimtPartial`.
    config : DecodeSm90Config, optional
        Instead of the table's row.
    splits : int, optional
        Instead of what the rule gives.

    Attributes
    ----------
    counted : int
        Row tiles, if the last block of each joins its parts: it needs a count for each; else 0.
    """

    def __init__(self, device, problem, mask, q, cache, *, config=None, splits=None):
        p, cfg = problem, config or config_for(problem, mask)
        shares = share_out(device, p, mask, cfg, cache.block_table, splits)
        self.splits, self.counted = shares.splits, shares.counted
        scales = map(scale_strides, (cache.k_scale, cache.v_scale))
        constants = arrays.strides(q), *scales, *shares.sizes
        self._run = device.bind(decode_sm90_spec(cfg), shares.blocks, constants, shares.tables)
        # A map of a quantised cache fetches 128 bytes, as long as a row mostly is.
        maps = device.maps(p.dtype, 128 if cfg.quantised else 256)
        self._layouts = [_layout(maps, x, p, cfg) for x in (cache.k_cache, cache.v_cache)]
        self._address = device.address

    def __call__(self, q, cache, part_o, part_lse, out=0, lse=0, counts=None):
        """Write ``part_o`` and ``part_lse``, and with ``counts`` ``out`` and ``lse``."""
        address = self._address
        k, v, *others = [0 if x is None else address(x) for x in cache]
        k_layout, v_layout = self._layouts
        results = [address(x) for x in (q, part_o, part_lse, out, lse)]
        counted = (0, False) if counts is None else (address(counts), True)
        self._run([*results, *counted, *others], ((k, k_layout), (v, v_layout)))


def _layout(maps, x, p, cfg):
    """What a cache's tensor map has besides an address; two bytes are an element of it."""
    shrink = 2 // x.itemsize
    shape = *x.shape[:3], p.head_dim // shrink
    strides = [s // shrink for s in arrays.strides(x)]
    return maps.layout(shape, tuple(strides), cfg.box)
