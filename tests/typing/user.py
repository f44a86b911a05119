"""A user's program, which `make lint` checks with ``mypy --strict``; it is not run."""

import numpy as np
from numpy.typing import NDArray

import masks
import nbflash
from nbflash import scores, selection

Floats = NDArray[np.float32]
mask: masks.Mask = (masks.butterfly(64, 8) | masks.local(64, 8)) & ~masks.causal(64).T
print(mask.shape[0] + 1, mask.dense().sum(), mask.stats(8).tile_density * 2, mask.draw().lower())


def attend(q: Floats, k: Floats, v: Floats) -> Floats:
    return nbflash.attention(q, k, v, mask, causal=True, score=scores.softcap(30.0))


def gradients(q: Floats, k: Floats, v: Floats, dout: Floats) -> tuple[Floats, Floats, Floats]:
    out, lse = nbflash.attention(q, k, v, mask, return_lse=True)
    return nbflash.attention_backward(dout, q, k, v, out, lse, mask, deterministic=True)


def step(q: Floats, k: Floats, v: Floats, bias: Floats) -> tuple[Floats, ...]:
    score = scores.compose(scores.bias(bias), scores.custom(lambda s, b, h, i, j: s))
    out, lse = nbflash.attention(
        q, k, v, window=(16, 0), score=score, dropout=0.1, seed=(1, 2), return_lse=True
    )
    (dbias,) = nbflash.score_backward(out, q, k, v, out, lse, score=score, dropout=0.1, seed=(1, 2))
    out, lse = nbflash.merge_sink(*nbflash.merge(out, lse, out, lse), np.zeros(4, np.float32))
    return out, dbias


def train(q: Floats, k: Floats, v: Floats) -> tuple[Floats, Floats]:
    nbflash.set_cache_limit(host=2**20)
    plan = nbflash.plan(q, k, v, mask, causal=True)
    out, pullback = plan.vjp(q, k, v)
    dq, dk, dv = pullback(out)
    again, lse = plan(q, k, v)
    nbflash.clear_cache()
    print(plan.impl, plan.mask.shape, nbflash.cache_info().plans, dq, dk, dv)
    return again, plan.backward(out, q, k, v, out, lse)[0]


def generate(q: Floats, k: Floats, v: Floats) -> Floats:
    cache = nbflash.KVCache(64, 16, heads_kv=4, head_dim=32, dtype=np.float32)
    ids: list[int] = cache.allocate(2)
    cache.append(ids, k, v)
    drafts = masks.tree([-1, 0, 0], prefix=8, nk=np.int64(12))
    chosen = selection.mean_pooled(q, k, topk=2, causal=True)
    print(nbflash.why_not("sm90", q, k, v, chosen), chosen.to_mask().stats().components)
    print(nbflash.why_not_decode("simt", q, k, v, cache.lengths(ids), mask=chosen))
    attended: Floats = nbflash.decode(q, k, v, cache.lengths(ids), mask=chosen)
    print(attended.shape)
    table = cache.block_table(ids)
    return nbflash.decode(q, cache.k, cache.v, cache.lengths(ids), block_table=table, mask=drafts)


def patterns(n: int) -> list[masks.Mask]:
    return [
        masks.causal(n),
        masks.window(n, left=4, right=0),
        masks.documents([n // 2, n - n // 2], causal=True),
        masks.padding(np.array([n, 3]), n),
        masks.bigbird(n, 8, n_random=2),
        masks.neighborhood((n // 8, 8), 3),
        masks.from_function(lambda q, kv: kv <= q, n),
        masks.from_dense(np.eye(n, dtype=bool)),
        masks.per_head([masks.causal(n), masks.dense(n)]),
        masks.load("mask.npz"),
    ]
