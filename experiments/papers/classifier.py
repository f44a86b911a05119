"""A small Transformer that classifies sequences, with any form of attention."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from experiments.papers.approximate import APPROXIMATE, attention_of
from experiments.papers.dataset import PAD
from experiments.papers.methods import METHODS, Problem


class SelfAttention(nn.Module):
    """Projections around one method of `METHODS`; padding is attended like any token."""

    def __init__(self, width, heads, n, method, device, seed):
        super().__init__()
        self.heads = heads
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        if method in APPROXIMATE:  # what it learns is learned with the rest
            self.attention = attention_of(method, n, width // heads, seed)
        else:
            problem = Problem(n, width // heads, batch=1, device=device, seed=seed)
            self.attention = METHODS[method].make(problem)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.inward(x).chunk(3, dim=-1)
        )
        return self.outward(self.attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and two linear maps, each on a normalised copy that is added."""

    def __init__(self, width, *attention):
        super().__init__()
        self.attention = SelfAttention(width, *attention)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Classifier(nn.Module):
    """Tokens (batch, parts, n) to logits (batch, classes).

    The mean over tokens that are no padding stands for a part; a pair is told by both means, their
    product and their difference.

    Parameters
    ----------
    vocabulary, classes, parts, n : int
        Of the task.
    method : str
        One of `METHODS`.
    layers, heads, width : int
    device : str
    seed : int
        Of the weights: the same for every method, but for what only one has.
    """

    def __init__(
        self, vocabulary, classes, parts, n, method, *, layers, heads, width, device="cpu", seed=0
    ):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(n, width)
            features = width * (4 if parts == 2 else 1)
            self.head = nn.Sequential(
                nn.Linear(features, width), nn.GELU(), nn.Linear(width, classes)
            )
            self.norm = nn.LayerNorm(width)
            how = heads, n, method, device, seed
            self.layers = nn.ModuleList(Layer(width, *how) for _ in range(layers))
        self.to(device)

    def start_from(self, path):
        """Take the weights of a checkpoint; the places of its image become those of ours."""
        device = self.places.weight.device
        state = torch.load(path, map_location=device, weights_only=True)["model"]
        state["places.weight"] = _grown(state["places.weight"], len(self.places.weight))
        self.load_state_dict(state)

    def forward(self, tokens):
        parts = tokens.shape[1]
        tokens = tokens.flatten(0, 1)
        x = self.tokens(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        real = (tokens != PAD)[..., None]
        mean = (self.norm(x) * real).sum(dim=1) / real.sum(dim=1).clamp_min(1)
        if parts == 2:
            a, b = mean.unflatten(0, (-1, 2)).unbind(dim=1)
            mean = torch.cat([a, b, a * b, a - b], dim=-1)
        return self.head(mean)


def _grown(places, n):
    """Position embeddings of a square image, interpolated to one with n pixels."""
    old, new = (math.isqrt(x) for x in (len(places), n))
    image = places.T.unflatten(1, (old, old))[None]
    grown = functional.interpolate(image, (new, new), mode="bilinear", align_corners=False)
    return grown[0].flatten(1).T


class Classification:
    """What a `Trainer` is given: batches of a data set, and the accuracy on another.

    Parameters
    ----------
    model : Classifier
    train, validation : Dataset
    batch : int
    dtype : str
        Of autocast; float32 is without.
    seed : int
        Of the order of the batches.
    """

    def __init__(self, model, train, validation, *, batch, dtype, seed):
        self._model, self._train, self._validation = model, train, validation
        self._batch, self._dtype, self._seed = batch, getattr(torch, dtype), seed
        self._device = next(model.parameters()).device.type

    def batch_at(self, step):
        """int64 tokens (batch, parts, n) and labels (batch,)."""
        rng = np.random.default_rng([self._seed, step])
        return _batch(self._train, rng.integers(len(self._train), size=self._batch))

    def loss_of(self, tokens, labels):
        return functional.cross_entropy(self._logits(tokens).float(), labels)

    def evaluate(self):
        return self.accuracy(self._validation)

    @torch.no_grad()
    def accuracy(self, data):
        """The share of examples whose class has the largest logit."""
        right, parts = 0, -(-len(data) // self._batch)
        for chosen in np.array_split(np.arange(len(data)), parts):
            tokens, labels = (torch.from_numpy(x).to(self._device) for x in _batch(data, chosen))
            right += (self._logits(tokens).argmax(dim=-1) == labels).sum().item()
        return right / len(data)

    def _logits(self, tokens):
        with torch.autocast(self._device, self._dtype, enabled=self._dtype != torch.float32):
            return self._model(tokens)


def _batch(data, chosen):
    return data.tokens[chosen].astype(np.int64), data.labels[chosen]
