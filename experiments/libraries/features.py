"""What is measured beside plain attention: score functions, dropout and attention sinks.

Each is one `Feature` of a shape, an adapter that computes it, and what stands between the products
of the dense equations that it is checked by. Parameters are such that leaving a feature out would
be seen in the result: caps near the scores, sinks near the log-sum-exp.
"""

from dataclasses import dataclass

import numpy as np

import nbflash
from experiments.harness.equations import Between, unchanged
from experiments.harness.passes import FORWARD
from experiments.libraries.nbflash import Nbflash
from nbflash import reference, scores
from nbflash.definitions import philox

PLAIN = "plain"
CAP, REACH, DROPOUT = 5.0, 128, 0.1
STATE = 2**40 + 1, 7  # seed and offset


@dataclass(frozen=True, eq=False)
class Feature:
    """A score function, a probability of dropout or the logits of sinks, (heads,), or none."""

    score: scores.Score | None = None
    dropout: float = 0.0
    sink: np.ndarray | None = None

    def between(self, xp, planes, rows, nk):
        """What the dense equations need for some rows, those of a square mask, of some planes.

        Parameters
        ----------
        xp : module
            NumPy or CuPy.
        planes : list of (batch entry, head)
        rows : int array
        nk : int

        Returns
        -------
        Between
        """
        b, h = np.array(planes).T
        factors, sink = 1.0, None
        if self.dropout:
            places = b[:, None, None], h[:, None, None], rows[:, None], np.arange(nk)
            kept = philox.kept_at(*places, self.dropout, STATE)
            factors = xp.asarray(kept * philox.factor(self.dropout))
        if self.sink is not None:
            sink = xp.asarray(self.sink[h][:, None, None])
        scored = Placed(self.score, xp, planes, rows.tolist()).scored if self.score else unchanged
        return Between(scored, factors, sink)


@dataclass(frozen=True)
class Placed:
    """A score of which the planes and rows of S are some of those of the whole problem."""

    score: scores.Score
    xp: object
    planes: list
    rows: list

    def scored(self, s, keep):
        """S' and its slope by the reference, which runs the functions score by score."""
        host, keep = (x.get() if hasattr(x, "get") else x for x in (s, keep))
        keep = np.broadcast_to(keep, host.shape)[None]
        found = reference.scored(host[None], keep, self)
        return tuple(self.xp.asarray(x[0].astype(host.dtype)) for x in found)

    def stages(self, nq, nk):
        """As of `Score`, with functions that take the places in S."""
        stages = self.score.stages(nk, nk)
        return [(self._moved(fn), self._moved(grad), params) for fn, grad, params in stages]

    def _moved(self, function):
        planes, rows = self.planes, self.rows
        return lambda s, b, h, i, j, *params: function(s, *planes[h], rows[i], j, *params)


def _squashed(s, b, h, q_idx, kv_idx, cap):
    return cap * s / (cap + abs(s))


def _squashed_slope(s, b, h, q_idx, kv_idx, cap):
    t = cap / (cap + abs(s))
    return t * t


def _alibi(heads):
    """The slopes of the paper (arXiv 2108.12409)."""
    return scores.alibi(2.0 ** (-8 * (1 + np.arange(heads)) / heads))


def _normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


#: Name to what makes it of the sequence length and the heads.
FEATURES = {
    PLAIN: lambda n, heads: Feature(),
    "softcap": lambda n, heads: Feature(scores.softcap(CAP)),
    "alibi": lambda n, heads: Feature(_alibi(heads)),
    "relative": lambda n, heads: Feature(scores.relative(_normal(heads, 2 * REACH + 1))),
    "bias": lambda n, heads: Feature(scores.bias(_normal(1, 1, n, n))),
    "custom": lambda n, heads: Feature(scores.custom(_squashed, _squashed_slope, (CAP,))),
    "softcap+alibi": lambda n, heads: Feature(scores.compose(scores.softcap(CAP), _alibi(heads))),
    "dropout": lambda n, heads: Feature(dropout=DROPOUT),
    "sink": lambda n, heads: Feature(sink=_normal(heads) + np.float32(np.log(n))),
}


class Featured(Nbflash):
    """nbflash with one feature.

    Parameters
    ----------
    q, k, v : arrays
    xp : module
        Their library.
    name : str
        One of `FEATURES`.
    impl : str
    """

    def __init__(self, q, k, v, *, xp, name, impl="auto"):
        super().__init__(q, k, v, impl)
        self._name, self.feature = name, FEATURES[name](*q.shape[1:3])
        sink = self.feature.sink
        self._sink = None if sink is None else xp.asarray(sink)

    def label(self, case):
        return self._name

    def details(self, case, which):
        """The implementation, and the tiles of a forward pass or how many passes a backward has."""
        plan = self.plan(case)
        config = ""
        if which == FORWARD and plan.schedule is not None:
            config = f"{plan.schedule.tile_m}×{plan.schedule.tile_n}"
        if which != FORWARD and plan.two_passes is not None:
            config = "two passes" if plan.two_passes else "one pass"
        return {"impl": plan.impl, "config": config}

    def _make_plan(self, case):
        how = {"score": self.feature.score, "dropout": self.feature.dropout}
        return nbflash.plan(*self._inputs, case.mask, impl=self._impl, **how)

    def _run(self, plan, out=None):
        """``out`` and ``lse`` without the sink."""
        return plan(*self._inputs, out=out, seed=STATE)

    def _finished(self, out, lse):
        return out if self._sink is None else nbflash.merge_sink(out, lse, self._sink)[0]

    def _gradients(self, plan, dout, out, lse):
        dlse = None
        if self._sink is not None:
            dout, dlse, _ = nbflash.merge_sink_backward(dout, out, lse, self._sink)
        return plan.backward(dout, *self._inputs, out, lse, dlse=dlse, seed=STATE)
