"""Approximate attention, written from the papers: what figure 3 and table 3 compare with.

Every class is made for a length and a head dimension, and called with q, k and v of shape (batch,
heads, n, head_dim), ``keep``, bool (batch, n), False for keys that are padding, and the probability
of ``dropout``. Dropout acts on the probabilities where there are any, on the output where there are
none. Chunks and clusters want a length that is a multiple of them.
"""

import torch
from torch import nn
from torch.nn import functional

#: The compressed length of the paper's experiments: an eighth, at most 256.
COMPRESSION, MOST = 8, 256


def compressed(n):
    """How many keys, features or landmarks stand for n tokens."""
    return max(1, min(n // COMPRESSION, MOST))


def attend(q, k, v, hidden=None, dropout=0.0):
    """softmax(Q Kᵀ / √d) V; where ``hidden``, broadcastable to the scores, a key is left out."""
    return _weighted(_scores(q, k, hidden), v, dropout)


def _scores(q, k, hidden):
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return s if hidden is None else s.masked_fill(hidden, torch.finfo(s.dtype).min)


def _weighted(s, v, dropout):
    return functional.dropout(s.softmax(dim=-1), dropout) @ v


def _silenced(x, keep):
    """Rows of padding are zero."""
    return x if keep is None else x * keep[:, None, :, None]


class Linformer(nn.Module):
    """Wang et al., arXiv 2006.04768: E and F project the n keys and values to ``length``."""

    def __init__(self, n, head_dim, length=None):
        super().__init__()
        shape = length or compressed(n), n
        self.project_k = nn.Parameter(torch.randn(shape) * n**-0.5)
        self.project_v = nn.Parameter(torch.randn(shape) * n**-0.5)

    def forward(self, q, k, v, keep=None, dropout=0.0):
        k = self.project_k.to(k.dtype) @ _silenced(k, keep)
        v = self.project_v.to(v.dtype) @ _silenced(v, keep)
        return attend(q, k, v, dropout=dropout)


def kernel_attention(q, k, v, keep=None, dropout=0.0):
    """φ(Q) (φ(K)ᵀ V), normalised, of q and k that are features; sums in float32."""
    with torch.autocast(q.device.type, enabled=False):
        k, v, dtype = _silenced(k, keep).float(), v.float(), v.dtype
        q = q.float()
        out = q @ (k.transpose(-1, -2) @ v)
        out = out / (q @ k.sum(dim=-2)[..., None]).clamp_min(torch.finfo(torch.float32).tiny)
    return functional.dropout(out.to(dtype), dropout)


class LinearAttention(nn.Module):
    """Katharopoulos et al., arXiv 2006.16236: φ(x) = elu(x) + 1."""

    def __init__(self, n, head_dim):
        super().__init__()

    def forward(self, q, k, v, keep=None, dropout=0.0):
        q, k = (functional.elu(x) + 1 for x in (q, k))
        return kernel_attention(q, k, v, keep, dropout)


class Performer(nn.Module):
    """Choromanski et al., arXiv 2009.14794: FAVOR+, positive orthogonal random features."""

    def __init__(self, n, head_dim, features=None):
        super().__init__()
        self.register_buffer("directions", orthogonal(features or compressed(n), head_dim))

    def features(self, x, is_query):
        """exp(wᵀ x − ‖x‖² / 2) / √m in float32, where φ(q) · φ(k) is exp(q · k / √d) on average.

        A factor common to all keys, or to all features of a query, leaves attention as it is: the
        largest exponent is taken off.
        """
        x = x.float() * x.shape[-1] ** -0.25
        exponent = x @ self.directions.float().T - x.square().sum(dim=-1, keepdim=True) / 2
        over = (-1,) if is_query else (-2, -1)
        largest = exponent.amax(dim=over, keepdim=True).detach()
        return (exponent - largest).exp() * len(self.directions) ** -0.5

    def forward(self, q, k, v, keep=None, dropout=0.0):
        q, k = self.features(q, True), self.features(k, False)
        return kernel_attention(q, k, v, keep, dropout).to(v.dtype)


def orthogonal(rows, columns):
    """Directions that are orthogonal in groups of ``columns``, with the norms of normal vectors."""
    q, r = torch.linalg.qr(torch.randn(-(-rows // columns), columns, columns))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # uniform, whatever signs LAPACK takes
    norms = torch.randn(rows, columns).norm(dim=1, keepdim=True)
    return q.transpose(-1, -2).flatten(0, 1)[:rows] * norms


class Nystromformer(nn.Module):
    """Xiong et al., arXiv 2102.03902: landmarks are means of segments, the inverse is iterated."""

    def __init__(self, n, head_dim, landmarks=None, iterations=6):
        super().__init__()
        self.landmarks, self.iterations = landmarks or compressed(n), iterations

    def forward(self, q, k, v, keep=None, dropout=0.0):
        scale = q.shape[-1] ** -0.5
        weight = q.new_ones(q.shape[0], q.shape[2]) if keep is None else keep.to(q)
        weight = weight.unflatten(1, (self.landmarks, -1))[:, None, ..., None]
        total = weight.sum(dim=3)
        q_mean, k_mean = (
            (x.unflatten(2, (self.landmarks, -1)) * weight).sum(dim=3) / total.clamp_min(1)
            for x in (q, k)
        )
        empty = total.transpose(-1, -2) == 0  # a segment that is padding is no landmark
        outer = _probabilities(q @ k_mean.transpose(-1, -2) * scale, empty)
        inner = _probabilities(q_mean @ k_mean.transpose(-1, -2) * scale, empty)
        hidden = None if keep is None else ~keep[:, None, None]
        out = attend(q_mean, k, v, hidden)
        p = functional.dropout(outer @ pseudo_inverse(inner, self.iterations).to(q.dtype), dropout)
        return p @ out


def _probabilities(s, hidden):
    return s.masked_fill(hidden, torch.finfo(s.dtype).min).softmax(dim=-1)


def pseudo_inverse(a, iterations):
    """Moore and Penrose's inverse by the third-order iteration of section 3 there, in float32."""
    with torch.autocast(a.device.type, enabled=False):
        a = a.float()
        z = a.transpose(-1, -2)
        z = z / (a.abs().sum(dim=-1).amax() * a.abs().sum(dim=-2).amax())
        one = torch.eye(a.shape[-1], device=a.device)
        for _ in range(iterations):
            az = a @ z
            z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z


def combined(outs, lses):
    """Outputs over several rounds, weighted by how much attention each round found.

    Parameters
    ----------
    outs : Tensor (rounds, ..., n, head_dim)
    lses : Tensor (rounds, ..., n)
    """
    return (lses.softmax(dim=0)[..., None].to(outs.dtype) * outs).sum(dim=0)


def _taken(x, order):
    """Rows of x (batch, heads, n, d) in the order (batch, heads, n)."""
    return x.gather(2, order[..., None].expand_as(x))


class Smyrf(nn.Module):
    """Daras et al., arXiv 2010.05315: clusters of equal size by asymmetric hashing.

    Queries and keys get two coordinates each so that all have one norm there and q · k decides
    their distance; both are sorted by a random projection, and the i-th cluster of queries attends
    the i-th of keys.
    """

    def __init__(self, n, head_dim, cluster=None, rounds=2):
        super().__init__()
        self.cluster = cluster or min(n, max(32, 2 * compressed(n)))
        self.register_buffer("directions", torch.randn(rounds, head_dim + 2))

    def forward(self, q, k, v, keep=None, dropout=0.0):
        with torch.no_grad():
            hashes = self._hashes(q, k, keep)
        rounds = [
            self._round(q, k, v, keep, dropout, *(x[..., i].argsort(dim=-1) for x in hashes))
            for i in range(len(self.directions))
        ]
        return combined(*(torch.stack(x) for x in zip(*rounds, strict=True)))

    def _hashes(self, q, k, keep):
        q2, k2 = (x.float().square().sum(dim=-1, keepdim=True) for x in (q, _silenced(k, keep)))
        most = q2.amax(dim=-2, keepdim=True) + k2.amax(dim=-2, keepdim=True)
        zero = torch.zeros_like(q2)
        q = torch.cat([q.float(), zero, (most - q2).clamp_min(0).sqrt()], dim=-1)
        k = torch.cat([k.float(), (most - k2).clamp_min(0).sqrt(), zero], dim=-1)
        q, k = (x @ self.directions.float().T for x in (q, k))
        if keep is not None:
            k = k.masked_fill(~keep[:, None, :, None], torch.inf)
        return q, k

    def _round(self, q, k, v, keep, dropout, q_order, k_order):
        chunk = lambda x, order: _taken(x, order).unflatten(2, (-1, self.cluster))
        hidden = None
        if keep is not None:
            flags = (~keep)[:, None].expand(k_order.shape).gather(2, k_order)
            hidden = flags.unflatten(2, (-1, self.cluster))[..., None, :]
        s = _scores(chunk(q, q_order), chunk(k, k_order), hidden)
        out, lse = _weighted(s, chunk(v, k_order), dropout), s.logsumexp(dim=-1)
        back = q_order.argsort(dim=-1)
        return _taken(out.flatten(2, 3), back), lse.flatten(2, 3).gather(2, back)


class Reformer(nn.Module):
    """Kitaev et al., arXiv 2001.04451: LSH attention; queries are keys, so k is not used.

    Tokens are sorted by the bucket of a random rotation; a chunk attends itself and the one before.
    A token attends itself only where there is nothing else.
    """

    def __init__(self, n, head_dim, chunk=None, rounds=2):
        super().__init__()
        self.chunk = chunk or min(n, max(32, compressed(n)))
        buckets = max(1, n // self.chunk // 2)
        self.register_buffer("rotations", torch.randn(rounds, head_dim, buckets))

    def forward(self, q, k, v, keep=None, dropout=0.0):
        k = functional.normalize(q, dim=-1)
        rounds = [self._round(q, k, v, keep, dropout, x) for x in self.rotations]
        return combined(*(torch.stack(x) for x in zip(*rounds, strict=True)))

    def _round(self, q, k, v, keep, dropout, rotation):
        with torch.no_grad():
            rotated = q.float() @ rotation.float()
            bucket = torch.cat([rotated, -rotated], dim=-1).argmax(dim=-1)
            if keep is not None:
                bucket = bucket.masked_fill(~keep[:, None], 2 * rotation.shape[-1])
            order = bucket.argsort(dim=-1, stable=True)
        chunk = lambda x: _taken(x, order).unflatten(2, (-1, self.chunk))
        places = order.unflatten(2, (-1, self.chunk))
        hidden = self._with_previous(places)[..., None, :] == places[..., None]
        s_self = torch.finfo(q.dtype).min / 2  # more than what is hidden by padding
        padding = None
        if keep is not None:
            flags = (~keep)[:, None].expand(order.shape).gather(2, order)
            padding = self._with_previous(flags.unflatten(2, (-1, self.chunk)))[..., None, :]
        s = chunk(q) @ self._with_previous(chunk(k)).transpose(-1, -2) * q.shape[-1] ** -0.5
        s = s.masked_fill(hidden, s_self)
        if padding is not None:
            s = s.masked_fill(padding, torch.finfo(q.dtype).min)
        p = functional.dropout(s.softmax(dim=-1), dropout)
        out = p @ self._with_previous(chunk(v))
        back = order.argsort(dim=-1)
        lse = s.logsumexp(dim=-1).flatten(2, 3).gather(2, back)
        return _taken(out.flatten(2, 3), back), lse

    def _with_previous(self, x):
        """Each chunk behind the one before it, (batch, heads, chunks, 2 chunk, ...); one alone."""
        if x.shape[2] == 1:
            return x
        return torch.cat([x.roll(1, dims=2), x], dim=3)


#: By the paper's names, in the order of its tables.
APPROXIMATE = {
    "reformer": Reformer,
    "smyrf": Smyrf,
    "performer": Performer,
    "linear": LinearAttention,
    "linformer": Linformer,
    "nystromformer": Nystromformer,
}


def attention_of(name, n, head_dim, seed=0):
    """A module of `APPROXIMATE` whose random directions and projections are drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return APPROXIMATE[name](n, head_dim)
