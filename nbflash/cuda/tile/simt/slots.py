"""Products of rows that lie across a group of lanes, and what several such groups sum to.

A slot is a group of ``lanes`` neighbouring lanes. Each holds its columns of ``rows`` rows of Q and
O and of ``keys`` rows of K and V, as tuples row by row (cuda/tile/simt/paged_rows.py); scores are a
tuple of ``rows × keys``, the same in all lanes of the slot.
"""

import operator

from nbflash.cuda.tile.guarded_max import NEG_INF
from nbflash.cuda.tile.tracing import both, equal, fma, maximum, select, unrolled
from nbflash.cuda.tile.warp_reduce import across_lanes
from nbflash.definitions.constants import WARP


def make_products(cfg):
    """``scores(q, k)`` and ``add(acc, alpha, p, v)``, and the latter for V that may hold NaN."""
    rows, keys, columns = range(cfg.rows), range(cfg.keys), cfg.width // cfg.lanes

    def part(fragment, i):
        return fragment[i * columns : (i + 1) * columns]

    @unrolled
    def scores(q, k):
        found = []
        for r in rows:
            for u in keys:
                pairs = list(zip(part(q, r), part(k, u), strict=True))
                s = pairs[0][0] * pairs[0][1]
                for x, y in pairs[1:]:
                    s = fma(x, y, s)
                found.append(s)
        return across_lanes(found, cfg.lanes, operator.add)

    def make_add(skip_zeros):
        @unrolled
        def add(acc, alpha, p, v):
            new = []
            for r in rows:
                row = [x * alpha[r] for x in part(acc, r)]
                for u in keys:
                    weight = p[r * cfg.keys + u]
                    for c, x in enumerate(part(v, u)):
                        more = fma(weight, x, row[c])
                        row[c] = select(equal(weight, 0.0), row[c], more) if skip_zeros else more
                new += row
            return tuple(new)

        return add

    return scores, make_add(False), make_add(True)


def make_mask_keys(cfg):
    """``mask_keys(s, key, own, low, high, length)``: −∞ outside the keys that a token sees.

    Those are ``low`` to ``high`` of the first token, a key later for each token after it, and none
    from ``length`` on. The first token is at position ``own``: with score functions one before the
    first key sees nothing.
    """
    steps = [r // cfg.pack for r in range(cfg.rows)]

    @unrolled
    def mask_keys(s, key, own, low, high, length):
        def seen(step, c):
            inside = both(key + c >= low + step, key + c < high + step)
            inside = both(inside, key + c < length)
            return inside if cfg.score is None else both(inside, own + step >= 0)

        places = [(step, u * cfg.slots) for step in steps for u in range(cfg.keys)]
        return tuple(
            select(seen(step, c), x, NEG_INF) for x, (step, c) in zip(s, places, strict=True)
        )

    return mask_keys


def make_join(cfg):
    """``joint_max(fragment)`` and ``joint_sum(fragment)``: over the slots of a warp, in each."""

    def across_slots(values, combine):
        return across_lanes(values, WARP // cfg.lanes, combine, first=cfg.lanes)

    @unrolled
    def joint_max(m):
        return across_slots(m, maximum)

    @unrolled
    def joint_sum(values):
        return across_slots(values, operator.add)

    return joint_max, joint_sum
