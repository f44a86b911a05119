"""decode, bound once for all calls of one signature; on CUDA arrays by split-KV.

A kernel attends one split of a sequence's keys in every block. Of each row tile the block that is
done last joins the splits, or, where those are many, a second kernel does. How many there are
depends on capacities and not on lengths, which the kernels read: nothing waits for the device, and
a CUDA graph may be replayed with other lengths and pages.
"""

from __future__ import annotations

import numpy as np

from nbflash.backends.registry import BACKENDS
from nbflash.inputs import arrays
from nbflash.inputs.decode_problem import DecodeProblem, check_decode, check_decode_mask
from nbflash.inputs.tensors import CudaTensor
from nbflash.planning import cache as remembered
from nbflash.planning import dispatch
from nbflash.scores import check_score

_SETS = 32  # of counts: a call beyond them sets its own to 0, which takes a microsecond or two
_PER_THREAD = 2  # the number of every thread's own default stream
_captured = []  # what CUDA graphs may run and write to, as long as the process lives


def lookup(q, cache, mask, scale, impl, window=None, score=None):
    """The cached decoder of a call of native arrays, made and checked when the call is new.

    Called with ``q, cache, with_lse`` it returns ``(out, lse)``; lse may be None without.
    """
    call = key_of(q, cache, mask, scale, impl, window, score)
    found = remembered.plans.get(call)  # as for plans, what cannot be hashed is not valid
    if found is None:
        problem = checked(q, cache, mask, scale, window, score)
        backend = BACKENDS[dispatch.choose_decode(impl, problem, mask, q, cache)]
        if backend.memory == arrays.CPU:
            found = backend.decoder(problem, mask)
        else:
            found = CudaDecoder(problem, mask, q, cache, backend.decode_partial)
        remembered.plans.put(call, found)
    return found


def key_of(q, cache, mask, scale, impl, window, score) -> tuple:
    """What calls of one plan have in common."""
    signatures = [None if x is None else arrays.signature(x) for x in (q, *cache)]
    return ("decode", *signatures, mask, scale, type(scale), impl, window, score)


def checked(q, cache, mask, scale=None, window=None, score=None) -> DecodeProblem:
    """The problem of a call of native arrays; reads none of them.

    Raises
    ------
    TypeError, ValueError
        As `nbflash.decode` does.
    """
    problem = check_decode(q, cache, scale, window, score)
    check_score(score, problem.in_positions)
    check_decode_mask(mask, problem)
    return problem


class _Counts:
    """A count for each row tile, once for all calls that cannot run at the same time.

    They are 0 after every call. A stream has its own set, and so has every call that a CUDA graph
    records, as long as there are any: none comes back, and later streams and calls have none. The
    stream of every thread's own, all with one number, never has.
    """

    def __init__(self, device, tiles):
        (self._sets,) = device.resident([np.zeros((_SETS, tiles), np.uint32)])
        self._free, self._of_stream = iter(device.rows(self._sets)), {}

    def find(self, stream, capturing):
        """An address; None where there are none, or none any more."""
        found = None if capturing else self._of_stream.get(stream)
        if found is None and stream != _PER_THREAD:
            found = next(self._free, None)
            if found is not None and not capturing:
                self._of_stream[stream] = found
        return found


class CudaDecoder:
    """`decode` of one problem and mask, for arrays of one signature.

    Parameters
    ----------
    problem : nbflash.inputs.decode_problem.DecodeProblem
    mask : masks.Mask or None
    q, cache
        Arrays of the signature; only their layout is read.
    make_partial : callable
        Makes the first kernel: `nbflash.backends.base.Backend.decode_partial`.
    """

    def __init__(self, problem, mask, q, cache, make_partial):
        from nbflash.cuda.device import cuda_device  # kernels: not before it is known that they run

        p, self._lse = problem, (problem.lse_shape, problem.lse_dtype)
        self._device = device = cuda_device(p.device_id, isinstance(q, CudaTensor))
        _, self._current = arrays.allocator(p.device, p.device_id)
        self._partial = self._counts = None
        if not p.batch or not (p.capacity if mask is None else mask.shape[1]):
            return
        with self._current:
            self._partial = make_partial(device, p, mask, q, cache)
            splits, tiles = self._partial.splits, self._partial.counted
            if tiles:
                self._counts = _Counts(device, tiles)
            else:
                self._combine = bind_combine(device, p, splits)
        # part_o, part_lse, an lse that nobody asks for, and counts, words of four bytes too
        shapes = (splits, *q.shape), (splits, *p.lse_shape), p.lse_shape, (tiles,)
        self._scratch, self._count_bytes = device.scratch(shapes, p.lse_dtype), 4 * tiles

    def __call__(self, q, cache, with_lse=True):
        """``(out, lse)``; lse is None without ``with_lse``."""
        empty = self._device.empty
        with self._current:
            out = empty(q.shape, q.dtype)
            lse = empty(*self._lse) if with_lse else None
            self.write(q, cache, out, lse)
        return out, lse

    def write(self, q, cache, out, lse=None):
        """Launch into new arrays of the caller's, on the device that is current."""
        if self._partial is not None:
            self._run(q, cache, out, lse)
            return
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)

    def _run(self, q, cache, out, lse):
        """Parts are in the memory pool of the current stream.

        A CUDA graph that records this keeps that memory, and this decoder, for ever.
        """
        memory, (part_o, part_lse, no_lse, own) = self._scratch()
        stream, capturing = self._device.stream()
        if capturing:
            _captured.append((self, memory))
        if self._counts is None:
            self._partial(q, cache, part_o, part_lse)
            lse = no_lse if lse is None else lse
            self._combine(self._device.words((part_o, part_lse, out, lse)))
            return
        counts = self._counts.find(stream, capturing)
        if counts is None:
            counts = own
            self._device.clear(own, self._count_bytes, stream)
        lse = no_lse if lse is None else lse
        self._partial(q, cache, part_o, part_lse, out, lse, counts)


def bind_combine(device, p, splits):
    """The kernel that joins the parts where the first one does not."""
    from nbflash.backends.split_kv.combine import combine_config, combine_simt_spec

    spec = combine_simt_spec(combine_config(p.dtype, p.head_dim, splits))
    rows, token = p.batch * p.nq * p.heads, p.heads * p.head_dim
    constants = (p.nq * token, token, p.head_dim), p.nq, p.heads, splits, rows
    return device.bind(spec, rows, constants)
