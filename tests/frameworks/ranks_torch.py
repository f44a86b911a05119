"""Three processes of torch.distributed: attention of a sequence dealt to them, or to two."""

import sys
import time

import torch
import torch.distributed as dist

import masks
from nbflash.distributed import Sharding, gather
from nbflash.torch import attention
from nbflash.torch import distributed as over_ranks

N = 150


def leaves(dtype, places=slice(None)):
    torch.manual_seed(0)
    shapes = [(1, N, 4, 16), (1, N, 2, 16), (1, N, 2, 16)]
    return [torch.randn(s).to(dtype)[:, places].clone().requires_grad_() for s in shapes]


def check(comm, dtype, layout, **options):
    """Outputs, and gradients of a loss that needs both of them, as one process has them."""
    sharding = Sharding.of(masks.documents([50, 0, 100], causal=True), comm.size, 32)
    places = torch.from_numpy(sharding.positions(comm.rank))
    whole, own = leaves(dtype), leaves(dtype, places)
    alone = attention(*whole, sharding.mask, return_lse=True)
    given = [x.transpose(1, 2) for x in own] if layout == "bhsd" else own
    out, lse = over_ranks.attention(
        *given, sharding, comm, return_lse=True, layout=layout, **options
    )
    out = out.transpose(1, 2) if layout == "bhsd" else out
    (alone[0].square().sum() + alone[1].sin().sum()).backward()
    (out.square().sum() + lse.sin().sum()).backward()
    wide = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out, alone[0][:, places], **wide)
    for one, part in zip(whole, own, strict=True):
        torch.testing.assert_close(part.grad, one.grad[:, places], **wide)
    joined = gather(out.detach(), sharding, comm)
    torch.testing.assert_close(joined, alone[0].detach(), **wide)


def refused(comm):
    """Masks that differ, on every rank; then a rank that comes too late."""
    lengths = [50, 100] if comm.rank else [51, 99]
    sharding = Sharding.of(masks.documents(lengths), comm.size, 32)
    own = leaves(torch.float32, torch.from_numpy(sharding.positions(comm.rank)))
    try:
        over_ranks.attention(*own, sharding, comm)
    except ValueError as error:
        assert "sharding differs between ranks" in str(error)  # noqa: PT017 - on all ranks
    else:
        raise AssertionError("nobody has noticed")
    if comm.rank == 1:
        time.sleep(8)
        return
    try:
        over_ranks.attention(*own, sharding, comm)
    except TimeoutError as error:
        assert "got no answer of another rank within 2.0 s" in str(error)  # noqa: PT017
    else:
        raise AssertionError("nobody has waited")


def main(rank, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=3)
    comm = over_ranks.TorchCommunicator()
    check(comm, torch.float64, "bshd", deterministic=True)
    check(comm, torch.float32, "bhsd", reduce="input", stages=1)
    check(comm, torch.bfloat16, "bshd")
    check(comm, torch.float32, "bshd", split="heads", stages=2)
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]  # each a sequence of its own
    part = over_ranks.TorchCommunicator(groups[rank == 1])
    assert (part.rank, part.size) == (rank // 2, 1 if rank == 1 else 2)
    check(part, torch.float64, "bshd")
    refused(over_ranks.TorchCommunicator(timeout=2.0))
    print("equal", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
