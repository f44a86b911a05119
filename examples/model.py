"""A small transformer in PyTorch whose attention is nbflash's: what both examples train."""

import torch
from torch import nn

from nbflash.torch import Attention


class Block(nn.Module):
    """Attention under a mask, then two linear layers, each on normalised inputs and added."""

    def __init__(self, dim, heads, mask, dropout):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attention = Attention(mask, dropout=dropout)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        """(batch, tokens, dim) in and out."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.feed(self.norms[1](x))


class Transformer(nn.Module):
    """Tokens in, ``outputs`` numbers out, for every token or, ``pooled``, for all of them."""

    def __init__(self, mask, *, outputs, pooled=False, dim=64, heads=2, layers=2, dropout=0.0):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, dim), nn.Embedding(mask.shape[0], dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, mask, dropout) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, outputs))
        self.pooled = pooled

    def forward(self, tokens):
        """Logits of bytes (batch, tokens)."""
        x = self.blocks(self.tokens(tokens) + self.places.weight[: tokens.shape[1]])
        return self.head(x.mean(dim=1) if self.pooled else x)


def train(model, batches, *, steps, rate=3e-3):
    """Cross entropy of ``steps`` batches (tokens, targets), one line for every tenth of them."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    device = next(model.parameters()).device
    for step in range(steps):
        tokens, targets = (x.to(device) for x in next(batches))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
