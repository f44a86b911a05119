"""The first kernel of decode without tensor cores, bound to a problem, a mask and a layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nbflash.backends.simt import executor as simt
from nbflash.backends.simt.decode import decode_simt_spec
from nbflash.backends.simt.decode_configs import decode_config
from nbflash.backends.split_kv.splits import heads_together, scale_strides, splits_for, walk
from nbflash.cuda import score_params
from nbflash.definitions.constants import score_factor
from nbflash.inputs import arrays


class SimtPartial:
    """A callable that attends a share of the keys in every block; another kernel joins them.

    Parameters
    ----------
    device
        Of `nbflash.cuda.device.cuda_device`.
    problem, mask, q, cache
        As of `CudaDecoder`.
    config : DecodeSimtConfig, optional
        Instead of the chosen one.
    splits : int, optional
        Instead of what the rule gives.
    """

    counted = 0  # row tiles: see `nbflash.backends.sm90.decode.host.Sm90Partial`

    def __init__(self, device, problem, mask, q, cache, *, config=None, splits=None):
        p = problem
        cfg = config or self.config_for(p, mask, q, cache)
        score, params = score_params.prepare(p.score, p.in_positions, device.capability)
        self._config = cfg = replace(cfg, score=score)
        n_row, tiles, tables = walk(p, mask, cfg.queries, cfg.tile_n, cfg.pack)
        items = p.batch * (p.heads // cfg.pack) * n_row
        slots = device.multiprocessors * cfg.min_blocks
        self.splits = splits or splits_for(items, tiles, slots)
        # Of a contiguous cache sequence b is page b; and only a quantised cache has scales.
        pages, one = np.arange(p.batch, dtype=np.int32), np.zeros(1, np.float32)
        self._pages, self._one = device.resident((pages, one))
        k, v, _, table, k_scale, v_scale = cache
        paged = *map(arrays.strides, (k, v)), *map(scale_strides, (k_scale, v_scale))
        of_table = 1 if table is None else table.strides[0] // table.itemsize
        strides = arrays.strides(q), paged, of_table
        sizes = p.batch, p.nq, p.heads, p.heads // p.heads_kv, self.splits, n_row
        page_size = p.capacity if p.page_size is None else p.page_size
        scale = score_factor(p.scale, score is not None)
        keys = p.most_keys(mask), scale, *p.window_within(mask)
        constants = *strides, *sizes, page_size, *keys
        self._words = device.words
        spec, more = decode_simt_spec(cfg), (device.params(params),)
        self._run = device.bind(spec, items * self.splits, constants, tables, more)

    @staticmethod
    def config_for(p, mask, q, cache):
        """The geometry for a problem, by what its heads share and how its arrays are aligned."""
        vectors = all(
            simt.vectors_allowed(x.dtype.name, p.head_dim, arrays.alignment(x))
            for x in (q, cache.k_cache, cache.v_cache)
        )
        how = {"group": heads_together(p, mask), "masked": mask is not None, "vectors": vectors}
        return decode_config(p.dtype, p.cache_dtype, p.head_dim, nq=p.nq, **how)

    def __call__(self, q, cache, part_o, part_lse):
        """Write ``part_o`` and ``part_lse``."""
        k, v, lengths, table, k_scale, v_scale = cache
        table = self._pages if table is None else table
        if k_scale is None:
            k_scale = v_scale = self._one
        tensors = q, k, v, k_scale, v_scale, lengths, table, part_o, part_lse
        self._run(self._words(tensors))
