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
    pixels : bool
        Tokens are the pixels of a square image, row after row: embeddings begin with what that
        means, and are learned from there. Places are sinusoids of row and column, of which near
        ones are alike, and brightness moves a token along one direction.
    seed : int
        Of the weights: the same for every method, but for what only one has.
    """

    def __init__(
        self,
        vocabulary,
        classes,
        parts,
        n,
        method,
        *,
        layers,
        heads,
        width,
        pixels=False,
        device="cpu",
        seed=0,
    ):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(n, width)
            if pixels:
                self._begin_as_an_image()
            features = width * (4 if parts == 2 else 1)
            self.head = nn.Sequential(
                nn.Linear(features, width), nn.GELU(), nn.Linear(width, classes)
            )
            self.norm = nn.LayerNorm(width)
            how = heads, n, method, device, seed
            self.layers = nn.ModuleList(Layer(width, *how) for _ in range(layers))
        self.to(device)

    @torch.no_grad()
    def _begin_as_an_image(self):
        n, width = self.places.weight.shape
        self.places.weight.copy_(sinusoids(math.isqrt(n), width))
        tokens = self.tokens.weight
        brightness = torch.linspace(-1.5, 1.5, len(tokens))[:, None]
        tokens.copy_(brightness * tokens[0] + 0.1 * tokens)

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


def sinusoids(size, width):
    """Places of size × size pixels (size², width), each with a mean square of 1.

    ``width`` is a multiple of 4. A quarter of the columns each: sines and cosines of the row, then
    of the column, with periods from 4 pixels up to eight images.
    """
    if width % 4:
        raise ValueError(f"width must be a multiple of 4, got {width}")
    frequencies = math.pi / 2 * (2 * size) ** -torch.linspace(0, 1, width // 4)
    angles = torch.arange(size)[:, None] * frequencies
    along = 2**0.5 * torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.cat([along.repeat_interleave(size, dim=0), along.repeat(size, 1)], dim=1)


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
    symmetries : bool
        Tokens are the pixels of a square image: each image of a batch is turned by one of the
        eight symmetries at random.
    """

    def __init__(self, model, train, validation, *, batch, dtype, seed, symmetries=False):
        self._model, self._train, self._validation = model, train, validation
        self._batch, self._dtype, self._seed = batch, getattr(torch, dtype), seed
        self._symmetries = symmetries
        self._device = next(model.parameters()).device.type

    def batch_at(self, step):
        """int64 tokens (batch, parts, n) and labels (batch,)."""
        rng = np.random.default_rng([self._seed, step])
        tokens, labels = _batch(self._train, rng.integers(len(self._train), size=self._batch))
        return (turned(tokens, rng) if self._symmetries else tokens), labels

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


def turned(tokens, rng):
    """Each image of tokens (batch, 1, size²) by one of the symmetries of a square."""
    size = math.isqrt(tokens.shape[-1])
    images = tokens.reshape(-1, size, size)
    down, right, diagonal = rng.integers(2, size=(3, len(images), 1, 1), dtype=bool)
    images = np.where(down, images[:, ::-1], images)
    images = np.where(right, images[:, :, ::-1], images)
    return np.where(diagonal, images.swapaxes(1, 2), images).reshape(tokens.shape)


def _batch(data, chosen):
    return data.tokens[chosen].astype(np.int64), data.labels[chosen]
