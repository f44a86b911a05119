"""Attention over the processes of torch.distributed: context parallelism for any mask.

::

    from nbflash.distributed import Sharding
    from nbflash.torch.distributed import TorchCommunicator, attention

    comm = TorchCommunicator()
    sharding = Sharding.of(mask, comm.size)
    out = attention(q, k, v, sharding, comm)  # of the rank's own tokens, with out.backward()
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from nbflash import distributed
from nbflash.distributed.communicator import Exchange, messages, summary
from nbflash.inputs.problem import check_flag
from nbflash.torch.attention import check_layout, check_tensors
from nbflash.torch.memory import on_device_of, with_rows

__all__ = ["TorchCommunicator", "attention"]


class TorchCommunicator:
    """Messages between the processes of a group, by its backend: NCCL, or gloo on the CPU.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        Default: all processes. Two groups of the same processes are made, one of its backend and
        one of gloo to compare calls in host memory, so all processes of the group must call this.
        The members of a subgroup must have made equally many groups before: torch names a new one
        by their number.
    timeout : float
        Seconds after which a rank that does not answer counts as dead. With NCCL its watchdog acts
        on messages, and `TimeoutError` is raised where ranks are compared.
    """

    def __init__(self, group=None, timeout=300.0):
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank, self.size = dist.get_rank(group), len(self._ranks)
        self._backend, self.timeout = dist.get_backend(group), timeout
        limit = datetime.timedelta(seconds=timeout)
        # Only the members of a subgroup make its groups: other processes need not call this.
        is_part = self.size < dist.get_world_size()
        options = {"timeout": limit, "use_local_synchronization": is_part}
        with _timely(self):
            self._group = dist.new_group(self._ranks, backend=self._backend, **options)
            self._host = dist.new_group(self._ranks, backend="gloo", **options)
        self._number = 0

    def agree(self, note):
        own = torch.from_numpy(summary(note).copy())
        heads, notes = [torch.empty_like(own) for _ in range(self.size)], [note] * self.size
        with _timely(self):
            dist.all_gather(heads, own, group=self._host)
            if not all(torch.equal(own, head) for head in heads):
                dist.all_gather_object(notes, note, group=self._host)
        return notes

    def exchange(self, sends, receives):
        self._number += 1
        tag = self._number if self._backend == "gloo" else 0  # NCCL keeps the order
        asked = [(dist.irecv, peer, x) for peer, x in messages(receives)]
        asked += [(dist.isend, peer, x) for peer, x in messages(sends)]
        operations = [
            dist.P2POp(call, _bytes_of(x), self._ranks[peer], self._group, tag)
            for call, peer, x in asked
        ]
        with _timely(self):
            works = dist.batch_isend_irecv(operations) if operations else []
        return _Works(self, works, (sends, receives))


class _Works(Exchange):
    def __init__(self, comm, works, held):
        self._comm, self._works, self._held = comm, works, held

    def wait(self):
        with _timely(self._comm):
            for work in self._works:
                work.wait()
        self._works, self._held = [], None


class _timely:
    """What torch raises when a rank does not answer becomes `TimeoutError`."""

    def __init__(self, comm):
        self._comm = comm

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, RuntimeError):
            raise TimeoutError(
                f"rank {self._comm.rank} got no answer of another rank within "
                f"{self._comm.timeout} s: {error}"
            ) from error


def _bytes_of(x):
    """The memory of a contiguous NumPy or CuPy array as a tensor, whatever its dtype."""
    return torch.from_dlpack(x.reshape(-1).view("uint8"))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sharding, comm, options, backward):
        ctx.set_materialize_grads(False)
        with on_device_of(q):
            given = (x.detach() for x in (q, k, v))
            out, lse = distributed.attention(*given, sharding, comm, return_lse=True, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = sharding, comm, options, backward
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        saved = [x.detach() for x in ctx.saved_tensors]
        sharding, comm, options, backward = ctx.call
        dout, dlse = (None if x is None else x.detach() for x in (dout, dlse))
        dout = torch.zeros_like(saved[0]) if dout is None else with_rows(dout)
        with on_device_of(dout):
            gradients = distributed.attention_backward(
                dout, *saved, sharding, comm, dlse=dlse, **options, **backward
            )
        return *gradients, None, None, None, None


@torch.compiler.disable(reason="ranks compare calls and exchange keys on the host")
def attention(
    q,
    k,
    v,
    sharding,
    comm,
    *,
    return_lse=False,
    deterministic=None,
    reduce="wide",
    layout="bshd",
    **options,
):
    """`nbflash.distributed.attention` of tensors, with gradients. All ranks call it together.

    It breaks a graph of torch.compile, and runs between its parts.

    Parameters
    ----------
    q, k, v : Tensor
        The rank's own tokens, as in `nbflash.distributed.attention`.
    sharding : nbflash.distributed.Sharding
    comm : TorchCommunicator
    return_lse, deterministic, layout
        As in `nbflash.torch.attention`.
    reduce : {"wide", "input"}
        As in `nbflash.distributed.attention_backward`.
    **options
        scale, score, dropout, seed, stages, split and impl of `nbflash.distributed.attention`. A
        score is one of `nbflash.scores`, whose arrays get no gradients here.

    Returns
    -------
    out : Tensor like q
    lse : Tensor (batch, heads, own queries), only with ``return_lse=True``

    Raises
    ------
    TypeError, ValueError, RuntimeError, TimeoutError
        As `nbflash.distributed.attention`.
    """
    check_flag("return_lse", return_lse)
    check_layout(layout)
    q, k, v = check_tensors(q, k, v)
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    check_flag("deterministic", deterministic)
    given = (with_rows(x) for x in (q, k, v))
    backward = {"deterministic": deterministic, "reduce": reduce}
    out, lse = _Attention.apply(*given, sharding, comm, options, backward)
    out = out.transpose(1, 2) if layout == "bhsd" else out
    return (out, lse) if return_lse else out
