"""decode on CUDA arrays: split-KV in two kernels, bound once for all calls of one signature.

The first kernel attends a share of each sequence's keys in every block, the second joins the
shares. How many there are depends on capacities and not on lengths, which the kernels read: nothing
waits for the device, and a CUDA graph may be replayed with other lengths and pages.
"""

from __future__ import annotations

import numpy as np

from nbflash import arrays, config, simt, sm90_decode
from nbflash.decode_problem import check_decode, check_decode_mask
from nbflash.kernels.combine_simt import combine_config, combine_simt_spec
from nbflash.planning import _Cache
from nbflash.simt_decode import SimtPartial

_LIMIT = 256
_decoders = _Cache(_LIMIT)
_captured = []  # what CUDA graphs may run and write to, as long as the process lives


def lookup(q, cache, mask, scale) -> CudaDecoder:
    """The cached decoder of a call of native CUDA arrays, made and checked when the call is new."""
    signatures = [None if x is None else arrays.signature(x) for x in cache]
    call = (arrays.signature(q), *signatures, mask, scale, type(scale))
    found = _decoders.get(call)  # as for plans, what cannot be hashed is not valid
    if found is None:
        problem = check_decode(q, cache, scale)
        check_decode_mask(mask, problem)
        config.check_decode_device(problem)
        found = CudaDecoder(problem, mask, q, cache)
        _decoders.put(call, found)
    return found


class CudaDecoder:
    """`decode` of one problem and mask, for arrays of one signature.

    Parameters
    ----------
    problem : nbflash.decode_problem.DecodeProblem
    mask : masks.Mask or None
    q, cache
        Arrays of the signature; only their layout is read.
    partial : callable, optional
        Instead of the kernel that is chosen, as `SimtPartial` is made.
    """

    def __init__(self, problem, mask, q, cache, *, partial=None):
        p, self._lse = problem, (problem.lse_shape, problem.lse_dtype)
        self._device = device = simt.device_of(p.device_id)
        _, self._current = arrays.allocator(p.device, p.device_id)
        self._partial = None
        if not p.batch or not (p.capacity if mask is None else mask.shape[1]):
            return
        with self._current:
            self._partial = (partial or _chosen)(device, p, mask, q, cache)
            splits, rows = self._partial.splits, p.batch * p.nq * p.heads
            spec = combine_simt_spec(combine_config(p.dtype, p.head_dim, splits))
            token = p.heads * p.head_dim
            constants = (p.nq * token, token, p.head_dim), p.nq, p.heads, splits, rows
            self._combine = device.bind(spec, rows, constants, ())
        shapes = (splits, *q.shape), (splits, *p.lse_shape)  # part_o, part_lse
        self._scratch = device.scratch(shapes, p.lse_dtype)

    def __call__(self, q, cache, with_lse=True):
        """``(out, lse)``; lse is None without ``with_lse``."""
        empty = self._device.empty
        with self._current:
            out = empty(q.shape, q.dtype)
            lse = empty(*self._lse) if with_lse else None
            if self._partial is not None:
                self._run(q, cache, out, lse)
            else:
                out.fill(0)
                if with_lse:
                    lse.fill(-np.inf)
        return out, lse

    def _run(self, q, cache, out, lse):
        """Both kernels; what is between them is in the memory pool of the current stream.

        A CUDA graph that records them keeps that memory, and this decoder, for ever. An lse that
        nobody asked for is written over ``part_lse``.
        """
        memory, (part_o, part_lse) = self._scratch()
        if self._device.capturing():
            _captured.append((self, memory))
        self._partial(q, cache, part_o, part_lse)
        self._combine((part_o, part_lse, out, part_lse if lse is None else lse), ())


def _chosen(device, problem, mask, q, cache):
    """The first kernel of a problem: Hopper's where it can run it."""
    given = problem, mask, q, cache
    make = SimtPartial if sm90_decode.why_not(*given) else sm90_decode.Sm90Partial
    return make(device, *given)
