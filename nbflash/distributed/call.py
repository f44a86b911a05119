"""One call on one rank: its checked arguments, its stages, and what travels between them."""

from __future__ import annotations

import contextlib

from nbflash.cuda.graphs import recorded
from nbflash.distributed.by_heads import HeadWalk
from nbflash.distributed.parcels import pairs, taken
from nbflash.distributed.rank_plan import rank_plan
from nbflash.distributed.sharding import check_sharding, integer
from nbflash.inputs.arrays import CUDA, device_of, in_rows, library, native
from nbflash.inputs.dropout import check_seed
from nbflash.inputs.problem import check_backward
from nbflash.merging import add_into, merge_into


@contextlib.contextmanager
def device_of_call(x, *owners):
    """On the device of an array. A CUDA graph that records the call keeps its memory, and owners.

    ``owners``: objects that a replay needs.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(library(x)[1])
        if device_of(x)[0] == CUDA:
            for owner in owners:
                stack.enter_context(recorded(owner))
        yield


class Call:
    """The arguments of a rank, and its walk over the stages of its plan.

    ``options`` : nbflash.distributed.rank_plan.RankOptions
    """

    def __init__(self, q, k, v, sharding, comm, options, seed):
        check_sharding(sharding)
        if sharding.ranks != comm.size:
            raise ValueError(f"sharding is for {sharding.ranks} ranks, comm has {comm.size}")
        self.q, self.k, self.v = native(q=q, k=k, v=v)
        if options.stages is not None:
            options = options._replace(stages=integer("stages", options.stages))
        self.plan = rank_plan(self.q, self.k, self.v, sharding, comm.rank, options)
        self.comm, self.problem, self.stages = comm, self.plan.problem, self.plan.stages
        self.seed = check_seed(seed, self.problem) if self.plan.dropout else None
        self.xp = library(self.q)[0]
        self._wide = self.plan.wide

    def _here(self):
        return device_of_call(self.q, self.plan, self.comm)

    def note(self, **more):
        """What must be equal on all ranks."""
        return self.plan.note(self.seed, **more)

    def take_results(self, dout, out, lse, dlse):
        """What `attention` returned, and gradients of it."""
        named = {"q": self.q, "dout": dout, "out": out, "lse": lse}
        named |= {} if dlse is None else {"dlse": dlse}
        _, dout, *arrays = native(**named)
        self._results = in_rows(dout), *arrays, *(() if dlse is not None else (None,))
        check_backward(*self._results, self.problem, self.q)

    def forward(self):
        """``(out, lse)`` of the rank's queries."""
        results = None
        with self._here():
            if self.plan.slices:
                return HeadWalk(self).forward()
            for stage, k, v, number in self._arriving():
                if number and not stage.keys:
                    continue
                (q,) = self._rows(stage, self.q)
                plan = self.plan.attention(number, q, k, v)
                part = plan.run_forward(q, k, v, None, self.seed)
                if results is not None:
                    merge_into(results, part, stage.rows.of(part[0]))
                else:
                    results = self.summed(part[0], self.plan.merges), part[1]
            return results[0].astype(self.q.dtype, copy=False), results[1]

    def backward(self, deterministic, wide):
        """``(dq, dk, dv)`` of the rank's queries and keys."""
        dtype = self._wide if wide else self.q.dtype
        returning, total = [], None
        with self._here():
            if self.plan.slices:
                return HeadWalk(self).backward(self._results, deterministic, dtype)
            for stage, k, v, number in self._arriving():
                of_keys = k, v
                if stage.keys or not number:
                    rows = self._rows(stage, *self._results, self.q)
                    dout, out, lse, dlse, q = rows
                    plan = self.plan.attention(number, q, k, v)
                    given = dout, q, k, v, out, lse, dlse, self.seed, deterministic
                    dq, *of_keys = plan.run_backward(*given)
                    if total is None:
                        total = [self.summed(dq, self.plan.merges)]
                        total += [self.summed(x, self.plan.returns) for x in of_keys]
                    else:
                        add_into(total[0], dq, stage.rows.of(dq))
                if number:
                    returning.append(self._return(stage, of_keys, dtype))
                    returning[-1][1].begun()
            for stage, exchange, arrived in returning:
                exchange.wait()
                for target, index in stage.sends.index.items():
                    for sum_, part in zip(total[1:], arrived[target], strict=True):
                        add_into(sum_, part, index.of(sum_))
            return tuple(x.astype(self.q.dtype, copy=False) for x in total)

    def summed(self, x, times):
        """What others are merged into so many times: one alone rounds once in any dtype."""
        return x if times <= 1 else x.astype(self._wide, copy=False)

    def score_shapes(self):
        """Of the score's arrays that have gradients."""
        return self.plan.attention(0, self.q, self.k, self.v).score_shapes

    def score_backward(self):
        """The gradients of the score's arrays, of all ranks together."""
        total = None
        with self._here():
            for stage, k, v, number in self._arriving():
                if number and not stage.keys:
                    continue
                *results, q = self._rows(stage, *self._results, self.q)
                dout, out, lse, dlse = results
                plan = self.plan.attention(number, q, k, v)
                sums = plan.run_score_backward(dout, q, k, v, out, lse, dlse, self.seed)
                total = [a + b for a, b in zip(total, sums, strict=True)] if total else sums
            return tuple(self._over_ranks(x) for x in total)

    def _over_ranks(self, x):
        """The sum of an array of all ranks, taken in their order."""
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        parts = {rank: self.xp.empty_like(x) for rank in others}
        self.comm.exchange(dict.fromkeys(others, x), parts).wait()
        parts[self.comm.rank] = x
        return sum(parts[rank] for rank in range(1, self.comm.size)) + parts[0]

    def _rows(self, stage, *arrays):
        """Arrays at the queries of a stage: of those of the output's shape, or of the lse's."""
        return [x if x is None else taken(x, stage.rows, 1 + (x.ndim == 3)) for x in arrays]

    def _arriving(self):
        """Each stage with its keys and values, those of the next on their way, and its number."""
        own, *others = self.stages
        coming = [self._cast(stage) for stage in others]
        for exchange, _ in coming[:1]:
            exchange.begun()
        yield own, self.k, self.v, 0
        for number, stage in enumerate(others, 1):
            exchange, arrived = coming[number - 1]
            coming[number - 1] = None
            exchange.wait()
            k, v = (stage.receives.ordered(x, self.problem.batch) for x in arrived)
            yield stage, k, v, number

    def _cast(self, stage):
        """GroupCast: start to send own keys and values, and to receive those of a stage."""
        sends = pairs(stage.sends.cut(x) for x in (self.k, self.v))
        heads = self.problem.heads_kv
        whole, parts = self.rooms(stage.receives, heads, self.q.dtype, in_place=True)
        return self.comm.exchange(sends, parts), whole

    def _return(self, stage, of_keys, dtype):
        """GroupReduce: start to send dK and dV of a stage to the owners, and to receive own."""
        sends = pairs(stage.receives.cut(x.astype(dtype, copy=False)) for x in of_keys)
        _, parts = self.rooms(stage.sends, self.problem.heads_kv, dtype, in_place=False)
        return stage, self.comm.exchange(sends, parts), parts

    def rooms(self, parcels, heads, dtype, *, in_place):
        """Memory for two arrays of messages, and by rank its parts of both."""
        given = self.xp, self.problem.batch, (heads, self.problem.head_dim), dtype
        rooms = [parcels.room(*given, in_place=in_place) for _ in range(2)]
        return [whole for whole, _ in rooms], pairs(parts for _, parts in rooms)
