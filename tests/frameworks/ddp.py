"""Two processes of DistributedDataParallel: the gradients of a layer, as one process has them."""

import sys

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


def main(rank, meeting):
    device = sys.argv[3] if len(sys.argv) > 3 else "cpu"
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=2,
    )
    place = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    model = Layer().to(place)
    x = torch.randn(4, 17, 32, dtype=torch.float64).to(place)
    alone = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    shared = DistributedDataParallel(model)
    shared(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    for parameter, want in zip(model.parameters(), alone, strict=True):
        torch.testing.assert_close(parameter.grad, want)
    dist.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
