"""Runs of the Hopper decode kernel in the simulator, its parts merged as float64."""

from dataclasses import replace

import numpy as np
from by_name import in_memory, simulate, strides, tensor_maps
from decode_runs import flat

from nbflash import testing
from nbflash.backends.sm90.decode.config import decode_config
from nbflash.backends.sm90.decode.kernel import decode_sm90_spec
from nbflash.backends.split_kv.part import TOKENS
from nbflash.backends.split_kv.splits import heads_together, scale_strides, walk
from nbflash.definitions.constants import LEAST_SCALE, LOG2_E
from nbflash.planning.kernels import decode_problem

WORDS = np.float32, np.uint32
WALKED = "plane_of", "row_ptr", "col_idx", "kinds", "lo", "hi", "bits"


def scales_of(scales):
    """Those of K and V as the kernel takes them, or what stands for none, and their strides."""
    pair = (None, None) if scales is None else scales
    words = [np.zeros(1, np.int32) if x is None else flat(x.view(np.int32)) for x in pair]
    return words, [scale_strides(x) for x in pair]


def parts(
    q,
    k,
    v,
    lengths,
    block_table=None,
    mask=None,
    *,
    scale=None,
    splits=2,
    scales=None,
    spec_of=decode_sm90_spec,
    results=None,
    **changed,
):
    """``(part_o, part_lse)`` of the kernel on poisoned memory, its configuration ``changed``.

    ``results``, (out, lse, counts), are what the last block of a row tile writes.
    """
    (batch, nq, heads, head_dim), heads_kv = q.shape, k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    page_size = None if block_table is None else k.shape[1]
    known = {"masked": mask is not None, "negate": scale < 0}
    stored = "" if scales is None else k.dtype.name
    cfg = replace(decode_config(q.dtype.name, head_dim, page_size, stored, **known), **changed)
    assert not cfg.why_not()
    capacity = k.shape[1] if block_table is None else block_table.shape[1] * page_size
    dtypes, more = (q.dtype.name, head_dim, stored or q.dtype.name), {"heads_kv": heads_kv}
    more |= {"batch": batch, "capacity": capacity}
    p = decode_problem(*dtypes, nq, heads // heads_kv, page_size, **more)
    pack = heads_together(p, mask)
    _, _, tables = walk(p, mask, TOKENS, cfg.tile_n, pack)
    part_o = testing.poisoned((splits, batch, nq, heads, head_dim), np.float32)
    part_lse = testing.poisoned((splits, batch, heads, nq), np.float32)
    out, lse, counts = results or (np.zeros(1, q.dtype), *(np.zeros(1, t) for t in WORDS))
    pages = np.zeros((1, 0), np.int32) if block_table is None else block_table
    (k_scale, v_scale), (k_scale_stride, v_scale_stride) = scales_of(scales)
    blocks = batch * (heads // pack) * -(-nq * pack // cfg.tile_m) * splits
    simulate(
        spec_of(cfg),
        blocks,
        **tensor_maps(k_map=(k, cfg.box), v_map=(v, cfg.box)),
        **{"q": in_memory(q).view(np.int32), "q_stride": strides(q), "lengths": lengths},
        **{"part_o": part_o.reshape(-1), "part_lse": part_lse.reshape(-1)},
        **{"out": flat(out), "lse": lse.reshape(-1), "counts": counts},
        joining=results is not None,
        **{"k_scale": k_scale, "k_scale_stride": k_scale_stride},
        **{"v_scale": v_scale, "v_scale_stride": v_scale_stride},
        **{"table": np.append(pages, np.int32(0)), "table_width": pages.shape[1]},
        **{"page_size": page_size or 0, "capacity": capacity, "batch": batch, "nq": nq},
        **{"heads": heads, "pack": pack, "group": heads // heads_kv, "splits": splits},
        scale=np.float32(max(abs(scale) * LOG2_E, LEAST_SCALE)),
        **dict(zip(WALKED, map(np.ravel, tables), strict=True)),
    )
    return part_o, part_lse


def joined(q, *arrays, counts, **options):
    """``(out, lse)`` as the last block of each row tile joins the parts."""
    batch, nq, heads, _ = q.shape
    out, lse = testing.poisoned(q.shape, q.dtype), testing.poisoned((batch, heads, nq), np.float32)
    parts(q, *arrays, results=(out, lse, counts), **options)
    return out, lse


def run(q, *arrays, **options):
    """``(out, lse)`` of the parts, merged."""
    part_o, part_lse = (x.astype(np.float64) for x in parts(q, *arrays, **options))
    best = np.nan_to_num(part_lse.max(axis=0), neginf=0.0)
    weights = np.exp(part_lse - best)
    total = weights.sum(axis=0)
    share = np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)
    out = (share.transpose(0, 1, 3, 2)[..., None] * part_o).sum(axis=0)
    with np.errstate(divide="ignore", over="ignore"):
        lse = best + np.log(total)
        return out.astype(q.dtype), lse.astype(np.float32)
