"""Train one layer of attention over the processes of torchrun, on CPUs or on GPUs.

    torchrun --nproc-per-node 4 examples/distributed_torch.py
    torchrun --nproc-per-node 2 examples/distributed_torch.py --device cuda

Each rank has its own tokens of one long sequence of packed documents, and learns to tell whether
the first token of a document is set: what only attention carries. Rotary embeddings and the loss
know the places of the tokens.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import masks
from nbflash.distributed import Sharding
from nbflash.torch.distributed import TorchCommunicator, attention


class Layer(nn.Module):
    def __init__(self, heads=2, head_dim=16):
        super().__init__()
        self.heads, width = heads, heads * head_dim
        self.token, self.qkv = nn.Embedding(4, width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, 1)

    def forward(self, tokens, places, sharding, comm):
        x = self.token(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        out = attention(rotated(q, places), rotated(k, places), v, sharding, comm)
        return self.out(out.flatten(2)).squeeze(-1)


def rotated(x, places):
    """Rotary embeddings by the places of the tokens in the whole sequence."""
    half = x.shape[-1] // 2
    angle = places[:, None] * 100.0 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def main(tokens, steps, device):
    """Train on the ranks that the environment names; the last loss."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    comm = TorchCommunicator(timeout=60)
    device = torch.device(device, comm.rank % torch.cuda.device_count() if device == "cuda" else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)

    length = tokens // 16
    sharding = Sharding.of(masks.documents([length] * 16, causal=True), comm.size, tile=32)
    places = torch.from_numpy(sharding.positions(comm.rank)).to(device)
    torch.manual_seed(0)  # the same model and the same sequences on every rank
    model = Layer().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        whole = torch.randint(2, (4, 16, length))
        wanted = whole[:, :, :1].expand_as(whole).flatten(1).to(device)[:, places]
        whole[:, :, 0] += 2  # a document's first token can be told from the others
        own = whole.flatten(1).to(device)[:, places]
        logits = model(own, places, sharding, comm)
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits, wanted.float(), reduction="sum"
        ) / (4 * tokens)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # each rank has the share of its own tokens
        optimizer.step()
        dist.all_reduce(loss)
        if comm.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    main(**vars(parser.parse_args()))
