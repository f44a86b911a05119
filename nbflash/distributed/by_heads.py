"""Attention over ranks head by head: all keys of some heads arrive, while heads before compute.

A stage of `nbflash.distributed.stages` has the keys of some ranks and all heads; here a *slice* has
all keys, own ones among them, and some heads of K and V. Results need no merge, and only the first
slice is waited for, where keys travel as long as they are computed. With a slice n there are on
their way

    keys of slice n + 1        dK and dV of slice n − 1, back to where their keys came from

in one exchange, which begins before the kernels of slice n.
"""

from __future__ import annotations

from nbflash.distributed.parcels import contiguous, pairs
from nbflash.merging import add_into


class HeadWalk:
    """The slices of one call on one rank, which all ranks walk alike."""

    def __init__(self, call):
        self._call, self._plan, self._xp = call, call.plan, call.xp
        (self._stage,) = self._plan.stages
        self._back, self._sums = None, {}

    def forward(self):
        """``(out, lse)`` of the rank's queries."""
        call, xp = self._call, self._xp
        out, lses = xp.empty(call.q.shape, call.q.dtype), []
        for _, heads, k, v in self._arriving():
            q = queries_of(call.q, heads)
            plan = self._plan.attention(0, q, k, v)
            lses.append(plan.run_forward(q, k, v, out[:, :, heads])[1])
        return out, lses[0] if len(lses) == 1 else xp.concatenate(lses, axis=1)

    def backward(self, results, deterministic, dtype):
        """``(dq, dk, dv)`` of the rank's queries and keys; dK and dV travel in ``dtype``.

        ``results``: dout, out, lse, and dlse or None.
        """
        call, xp = self._call, self._xp
        whole = [xp.empty(x.shape, x.dtype) for x in (call.q, call.k, call.v)]
        for n, heads, k, v in self._arriving():
            q = queries_of(call.q, heads)
            dout, out = (x[:, :, heads] for x in results[:2])
            lse, dlse = (x if x is None else x[:, heads] for x in results[2:])
            plan = self._plan.attention(0, q, k, v)
            dq, *of_keys = plan.run_backward(dout, q, k, v, out, lse, dlse, None, deterministic)
            whole[0][:, :, heads] = dq
            self._give_back(n, of_keys, dtype)
        self._start(len(self._plan.slices))[0].wait()
        for n, (own, parts) in self._sums.items():
            for target, index in self._stage.sends.index.items():
                for total, part in zip(own, parts[target], strict=True):
                    add_into(total, part, index.of(total))
            for x, total in zip(whole[1:], own, strict=True):
                x[:, :, self._plan.slices[n]] = total.astype(x.dtype, copy=False)
        return tuple(whole)

    def _arriving(self):
        """Each slice: its number, its heads of Q, and its K and V, in the order of the sequence."""
        slices, group = self._plan.slices, self._plan.group
        exchange, arrived = self._start(0)
        for n, heads in enumerate(slices):
            exchange.wait()
            batch = self._plan.problem.batch
            k, v = (self._stage.receives.ordered(x, batch) for x in arrived)
            started = n + 1 < len(slices) or self._back
            if started:
                exchange, arrived = self._start(n + 1)
                exchange.begun()
            yield n, slice(group * heads.start, group * heads.stop), k, v
        if started:
            exchange.wait()

    def _cast(self, n):
        """GroupCast of a slice: ``(sends, receives, memory of K and of V)``."""
        call, stage, heads = self._call, self._stage, self._plan.slices[n]
        own = [x[:, :, heads] for x in (call.k, call.v)]
        count = heads.stop - heads.start
        wholes, receives = call.rooms(stage.receives, count, call.k.dtype, in_place=True)
        if places := receives.pop(call.comm.rank, None):
            for place, x in zip(places, own, strict=True):
                place[...] = x
            own = places
        return pairs(stage.sends.cut(x) for x in own), receives, wholes

    def _give_back(self, n, of_keys, dtype):
        """GroupReduce of a slice, to be sent with the next exchange: dK and dV of all its keys."""
        stage, rank = self._stage, self._call.comm.rank
        sends = pairs([stage.receives.cut(x.astype(dtype, copy=False)) for x in of_keys])
        own = sends.pop(rank, None)
        if own is None:
            own = [x[:, :0] for x in of_keys]
        own = [self._call.summed(x, len(stage.sends.ranks)) for x in own]
        count = of_keys[0].shape[2]
        _, receives = self._call.rooms(stage.sends, count, dtype, in_place=False)
        self._sums[n] = own, receives
        self._back = sends, receives

    def _start(self, n):
        """The exchange of slice ``n``, if there is one, and of what goes back; its K and V."""
        nothing = {}, {}
        *cast, wholes = self._cast(n) if n < len(self._plan.slices) else (*nothing, None)
        back, self._back = self._back or nothing, None
        sends, receives = (
            {rank: one.get(rank, ()) + two.get(rank, ()) for rank in {**one, **two}}
            for one, two in zip(cast, back, strict=True)
        )
        return self._call.comm.exchange(sends, receives), wholes


def queries_of(q, heads):
    """Some heads of Q. One alone is copied: its address may be aligned unlike that of the next."""
    q = q[:, :, heads]
    return contiguous(q) if q.shape[2] == 1 else q
