"""attention and attention_backward of a sequence that is dealt to ranks.

Forward: each rank attends with its own queries, stage by stage, to the keys that its rows need, and
merges the results by their log-sum-exp. Backward: with the whole output and log-sum-exp, every
stage gives its share of dQ, which is added up, and dK and dV of its keys, which go back to where
they came from. Only keys that the mask asks for travel; heads of K and V are not repeated.
"""

from __future__ import annotations

import numpy as np

from nbflash import __version__
from nbflash.distributed.communicator import check_together
from nbflash.distributed.placed_score import placed
from nbflash.distributed.sharding import positive
from nbflash.distributed.stages import stages_of
from nbflash.inputs.arrays import as_given, library, native
from nbflash.inputs.attention_spec import AttentionSpec
from nbflash.inputs.dropout import check_dropout, check_seed
from nbflash.inputs.problem import check_backward, check_flag, check_forward, check_mask
from nbflash.merging import merge
from nbflash.planning.plan import plan_of
from nbflash.scores import Score, check_score


def attention(
    q,
    k,
    v,
    sharding,
    comm,
    *,
    scale=None,
    score=None,
    dropout=0.0,
    seed=None,
    return_lse=False,
    stages=None,
    impl="auto",
):
    """`nbflash.attention` of a sequence of which each rank has a part. All ranks call it together.

    Parameters
    ----------
    q : array (batch, own queries, heads, head_dim)
        The tokens ``sharding.positions(comm.rank)`` of the whole sequence.
    k, v : array (batch, own keys, heads_kv, head_dim)
        The tokens ``sharding.positions(comm.rank, "keys")``.
    sharding : Sharding
        Of the mask of the whole sequence, made alike on all ranks.
    comm : Communicator
    scale, score, dropout, seed, return_lse, impl
        As in `nbflash.attention`, the same on all ranks. A score is that of the whole sequence, and
        dropout drops what it does on one process, bit for bit; it needs a ``tile`` of the sharding
        that is a multiple of 32, and runs on the CPU as yet.
    stages : int, optional
        In how many groups the other ranks' keys arrive, while those before are attended; default 4
        at most.

    Returns
    -------
    out : array like q
    lse : array (batch, heads, own queries), only with ``return_lse=True``
        That of the own queries over all keys. `nbflash.merge_sink` may follow, as on one process.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what would be right; on the ranks whose own arguments are
        right, RuntimeError with that message. ValueError if arguments, masks or versions of nbflash
        differ between ranks. Nothing is sent before.
    TimeoutError
        If a rank does not answer within the communicator's timeout.

    Notes
    -----
    Within a rounding of the result on one process: the results of stages are rounded once before
    they are merged. Bitwise reproducible.
    """
    options = scale, score, dropout, seed, stages, impl

    def check():
        check_flag("return_lse", return_lse)
        call = Call(q, k, v, sharding, comm, *options)
        return call, call.facts(call="attention")

    results = check_together(comm, check).forward()
    return as_given(q, results if return_lse else results[0])


def attention_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    sharding,
    comm,
    *,
    dlse=None,
    scale=None,
    score=None,
    dropout=0.0,
    seed=None,
    deterministic=False,
    reduce="wide",
    stages=None,
    impl="auto",
):
    """Gradients of `attention` with respect to the rank's own q, k and v.

    Parameters
    ----------
    dout : array like q
        Gradient of the rank's own output.
    q, k, v, sharding, comm, scale, score, dropout, seed, stages, impl
        As given to `attention`.
    out, lse : array
        What ``attention(..., return_lse=True)`` returned for them.
    dlse : array like lse, optional
        Gradient of the log-sum-exp.
    deterministic : bool
        As in `nbflash.attention_backward`.
    reduce : {"wide", "input"}
        What dK and dV travel in: float32 (float64 for float64 inputs), or the dtype of q, half as
        much in half precision and rounded once more. Sums are wide.

    Returns
    -------
    dq : array like q
    dk, dv : array like k
        Summed over the queries of all ranks.

    Raises
    ------
    TypeError, ValueError, RuntimeError, TimeoutError
        As `attention`.
    """
    options = scale, score, dropout, seed, stages, impl

    def check():
        if reduce not in ("wide", "input"):
            raise ValueError(f"reduce must be 'wide' or 'input', got {reduce!r}")
        check_flag("deterministic", deterministic)
        call = Call(q, k, v, sharding, comm, *options)
        call.take_results(dout, out, lse, dlse)
        return call, call.facts(call="attention_backward", reduce=reduce)

    call = check_together(comm, check)
    return as_given(q, call.backward(deterministic, reduce == "wide"))


class Call:
    """The checked arguments of a rank, and its walk over the stages."""

    def __init__(self, q, k, v, sharding, comm, scale, score, dropout, seed, stages, impl):
        if sharding.ranks != comm.size:
            raise ValueError(f"sharding is for {sharding.ranks} ranks, comm has {comm.size}")
        stages = stages if stages is None else positive("stages", stages)
        self.q, self.k, self.v = native(q=q, k=k, v=v)
        self.problem = check_forward(self.q, self.k, self.v, scale)
        self.sharding, self.comm, self.impl = sharding, comm, impl
        self.score, self.dropout = score, check_dropout(dropout)
        self.seed = check_seed(seed, self.problem) if self.dropout else None
        self.stages, self._count = stages_of(sharding, comm.rank, stages), stages
        check_mask(self.stages[0].mask, self.problem)
        self._plan(self.stages[0], self.q, self.k, self.v)
        self._xp, self._device = library(self.q)
        self._wide = np.dtype(self.problem.lse_dtype)

    def facts(self, **more):
        """What must be equal on all ranks."""
        p = self.problem
        return more | {
            "nbflash": __version__,
            "sharding": self.sharding.digest,
            "batch, heads, heads_kv, head_dim": [p.batch, p.heads, p.heads_kv, p.head_dim],
            "dtype": p.dtype,
            "scale": p.scale,
            "score": str(self.score),
            "dropout": self.dropout,
            "seed": self.seed if isinstance(self.seed, tuple) else None,
            "stages": self._count,
        }

    def take_results(self, dout, out, lse, dlse):
        """What `attention` returned, and gradients of it."""
        named = {"q": self.q, "dout": dout, "out": out, "lse": lse}
        named |= {} if dlse is None else {"dlse": dlse}
        _, *arrays = native(**named)
        self._results = arrays if dlse is not None else (*arrays, None)
        check_backward(*self._results, self.problem, self.q)

    def forward(self):
        """``(out, lse)`` of the rank's queries."""
        with self._device:
            for stage, k, v, number in self._arriving():
                if number and not stage.keys:
                    continue
                (q,) = self._rows(stage, self.q)
                part = self._plan(stage, q, k, v).run_forward(q, k, v, None, self.seed)
                if not number:
                    out, lse = part
                    continue
                out = out.astype(self._wide, copy=False)
                before = self._rows(stage, out, lse)
                merged = merge(*before, part[0].astype(self._wide, copy=False), part[1])
                out[:, stage.rows.of(out)] = merged[0]
                lse[:, :, stage.rows.of(lse)] = merged[1]
            return out.astype(self.q.dtype, copy=False), lse

    def backward(self, deterministic, wide):
        """``(dq, dk, dv)`` of the rank's queries and keys."""
        dtype = self._wide if wide else self.q.dtype
        returning = []
        with self._device:
            for stage, k, v, number in self._arriving():
                of_keys = k, v
                if stage.keys or not number:
                    rows = self._rows(stage, *self._results, self.q)
                    dout, out, lse, dlse, q = rows
                    plan = self._plan(stage, q, k, v)
                    given = dout, q, k, v, out, lse, dlse, self.seed, deterministic
                    dq, *of_keys = plan.run_backward(*given)
                    if not number:
                        total = [x.astype(self._wide) for x in (dq, *of_keys)]
                    else:
                        total[0][:, stage.rows.of(dq)] += dq
                if number:
                    returning.append(self._return(stage, of_keys, dtype))
            for stage, exchange, arrived in returning:
                exchange.wait()
                for target, index in stage.sends.items():
                    for sum_, part in zip(total[1:], arrived[target], strict=True):
                        sum_[:, index.of(sum_)] += part
            return tuple(x.astype(self.q.dtype, copy=False) for x in total)

    def _rows(self, stage, *arrays):
        """Arrays at the queries of a stage: of those of the output's shape, or of the lse's."""
        return [x if x is None else taken(x, stage.rows.of(x), 1 + (x.ndim == 3)) for x in arrays]

    def _arriving(self):
        """Each stage with its keys and values, those of the next on their way, and its number."""
        own, *others = self.stages
        coming = self._cast(others[0]) if others else None
        yield own, self.k, self.v, 0
        for number, stage in enumerate(others, 1):
            exchange, arrived = coming
            coming = self._cast(others[number]) if number < len(others) else None
            exchange.wait()
            yield stage, *self._in_order(stage, arrived), number

    def _cast(self, stage):
        """GroupCast: start to send own keys and values, and to receive those of a stage."""
        sends = {t: self._packed((self.k, self.v), i, self.q.dtype) for t, i in stage.sends.items()}
        arrived = {s: self._buffer(index, self.q.dtype) for s, index in stage.receives.items()}
        return self.comm.exchange(sends, arrived), arrived

    def _return(self, stage, of_keys, dtype):
        """GroupReduce: start to send dK and dV of a stage to the owners, and to receive own."""
        sends = {s: self._packed(of_keys, i, dtype) for s, i in stage.receives.items()}
        arrived = {t: self._buffer(index, dtype) for t, index in stage.sends.items()}
        return stage, self.comm.exchange(sends, arrived), arrived

    def _packed(self, pair, index, dtype):
        """Two arrays at some tokens: (2, batch, tokens, heads_kv, head_dim), contiguous."""
        packed = self._buffer(index, dtype)
        for target, x in zip(packed, pair, strict=True):
            if x.dtype == dtype:  # as integers: CuPy gathers these of any size
                target, x = _words(target), _words(x)
            target[...] = x[:, index.of(x)]
        return packed

    def _in_order(self, stage, arrived):
        """Keys and values of a stage in the order of the sequence."""
        if len(arrived) == 1:
            return next(iter(arrived.values()))
        p = self.problem
        both = self._xp.empty((2, p.batch, stage.keys, p.heads_kv, p.head_dim), self.q.dtype)
        words = _words(both)
        for source, index in stage.receives.items():
            words[:, :, index.of(words)] = _words(arrived[source])
        return both

    def _buffer(self, index, dtype):
        p = self.problem
        return self._xp.empty((2, p.batch, index.size, p.heads_kv, p.head_dim), dtype)

    def _plan(self, stage, q, k, v):
        problem = check_forward(q, k, v, self.problem.scale)
        score = self.score
        if isinstance(score, Score):
            score = placed(score, stage.positions, self.sharding.mask.shape)
        check_score(score, problem)
        positions = stage.positions if self.dropout else None
        spec = AttentionSpec(problem, stage.mask, score, self.dropout, positions)
        return plan_of(spec, self.impl)


def taken(x, index, axis):
    """Some tokens: a view where they follow each other, else a C-contiguous copy."""
    at = (*(slice(None),) * axis, index)
    if isinstance(index, slice):
        return x[at]
    return library(x)[0].ascontiguousarray(_words(x)[at]).view(x.dtype)


def _words(x):
    """The same memory as unsigned integers."""
    return x.view(f"u{x.dtype.itemsize}")
