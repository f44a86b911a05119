"""nbflash by its public plan."""

import numpy as np

import nbflash
from experiments.harness.passes import NBFLASH
from experiments.libraries.base import Library


class Nbflash(Library):
    """nbflash.

    Parameters
    ----------
    q, k, v : arrays
    impl : str
    **options
        Of `AttentionPlan.backward`.
    """

    def __init__(self, q, k, v, impl="auto", **options):
        self._inputs, self._impl, self._options = (q, k, v), impl, options
        self._plans = {}

    @staticmethod
    def version():
        return nbflash.__version__

    def label(self, case):
        """Which implementation runs is part of the name."""
        return f"{NBFLASH} {self.plan(case).impl}"

    def plan(self, case):
        """The plan of a case, kept here: dense biases of long sequences fill the cache of plans."""
        if case not in self._plans:
            self._plans[case] = self._make_plan(case)
        return self._plans[case]

    def results(self, case):
        """Output and LSE, the output in an array that held NaN."""
        out = self._inputs[0].copy()
        out.view(np.uint8)[...] = 0xFF
        out, lse = self._run(self.plan(case), out=out)
        return {"out": self._finished(out, lse), "lse": lse}

    def forward(self, case):
        plan = self.plan(case)
        return lambda: self._finished(*self._run(plan))

    def backward(self, case, dout):
        plan = self.plan(case)
        results = self._run(plan)
        return lambda: self._gradients(plan, dout, *results)

    def both(self, case, dout):
        plan = self.plan(case)

        def call():
            results = self._run(plan)
            self._finished(*results)
            return self._gradients(plan, dout, *results)

        return call

    def _make_plan(self, case):
        return nbflash.plan(*self._inputs, case.mask, impl=self._impl)

    def _run(self, plan, out=None):
        return plan(*self._inputs, out=out)

    def _finished(self, out, lse):
        """The output, of what a plan returns."""
        return out

    def _gradients(self, plan, dout, out, lse):
        return plan.backward(dout, *self._inputs, out, lse, **self._options)
