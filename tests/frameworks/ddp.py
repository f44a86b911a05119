"""Two processes of DistributedDataParallel: the gradients of a layer, as one process has them."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import masks
from nbflash.torch import Attention


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96, dtype=torch.float64)
        self.attention = Attention(masks.causal(17), sinks=2)

    def forward(self, x):
        return self.attention(*self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2))


def meet():
    """Find the other process by a file: which one this is, and where it computes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int, choices=[0, 1])
    parser.add_argument("meeting")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    rank, meeting, device = given.rank, given.meeting, given.device
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(0)
    if device != "cuda":
        return rank, torch.device(device)
    torch.cuda.set_device(rank)
    return rank, torch.device(device, rank)


def leave():
    """Say that all was right, and end without a destructor.

    That of DDP's reducer joins a thread of gloo's and holds the interpreter's lock, for which that
    thread may wait.
    """
    dist.destroy_process_group()
    print("equal", flush=True)
    os._exit(0)


def main():
    rank, place = meet()
    model = Layer().to(place)
    x = torch.randn(4, 17, 32, dtype=torch.float64).to(place)
    alone = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    shared = DistributedDataParallel(model)
    shared(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    for parameter, want in zip(model.parameters(), alone, strict=True):
        torch.testing.assert_close(parameter.grad, want)
    leave()


if __name__ == "__main__":
    main()
