"""decode on NumPy arrays: what is bound once for all calls of one signature, and where keys are."""

import numpy as np

from nbflash.backends.cpu.decode import Keys, addressable, cells_of, decode, is_addressable
from nbflash.backends.cpu.score import prepare
from nbflash.definitions.quantised import LIMITS, dequantise
from nbflash.inputs.decode_problem import check_contents


class CpuDecoder:
    """`decode` of one problem and mask, for arrays of one signature.

    Parameters
    ----------
    problem : nbflash.inputs.decode_problem.DecodeProblem
    mask : masks.Mask or None
    """

    def __init__(self, problem, mask):
        self._problem, self._mask = problem, mask
        self._real = np.dtype(problem.lse_dtype).type
        self._cells = cells_of(mask, problem.window_within(mask), problem.batch, problem.heads)
        # Of positions: the last query is at the last key.
        self._score = prepare(problem.score, 1, 1, self._real)

    def __call__(self, q, cache, with_lse=True):
        """``(out, lse)``; lse is there without ``with_lse``, too."""
        p = self._problem
        check_contents(p, cache, self._mask)
        out, lse = np.empty(q.shape, q.dtype), np.empty(p.lse_shape, p.lse_dtype)
        held, keys = self._keys(cache)
        decode(q, keys, p.heads_kv, out, lse, self._cells, p.scale, self._score)
        del held  # not before: the kernel knows addresses
        return out, lse

    def _keys(self, cache):
        """Arrays that have to be kept, and the `Keys` of all sequences."""
        caches = (cache.k_cache, cache.k_scale), (cache.v_cache, cache.v_scale)
        if self._problem.page_size is None and all(
            is_addressable(x, self._real) for x, _ in caches
        ):
            return caches, Keys.of_caches(cache.k_cache, cache.v_cache, cache.lengths)
        held = [
            [addressable(self._tokens(cache, *x, b), self._real) for x in caches]
            for b in range(self._problem.batch)
        ]
        return held, Keys.of_sequences(held)

    def _tokens(self, cache, stored, scale, b):
        """The keys (or values) of one sequence: (length, heads_kv, head_dim)."""
        x = _rows(stored, cache, b)
        if self._problem.cache_dtype not in LIMITS:
            return x
        scale = scale if scale.ndim == 1 else _rows(scale, cache, b)
        return dequantise(x, scale, np.dtype(self._real))


def _rows(stored, cache, b):
    """What is stored of the tokens of one sequence: a view, or a copy gathered from its pages."""
    length = cache.lengths[b]
    if cache.block_table is None:
        return stored[b, :length]
    page_size = stored.shape[1]
    pages = cache.block_table[b, : -(-length // page_size)]
    return stored[pages].reshape(-1, *stored.shape[2:])[:length]
