"""The elementwise part of the kernels: exp2, row maxima, softmax weights and their gradients.

Fast-math flags are per function and deliberate: reassociation only where a sum is vectorised, never
the assumption that there are no NaN or infinities. `larger` alone may pass over a NaN, in a row's
maximum: the weights show it.
"""

import math

import numpy as np
from numba.extending import overload

from nbflash.backends.cpu.compiling import inlined
from nbflash.backends.cpu.intrinsics import larger, power_of_two


def _taylor(real, degree):
    """Coefficients of 2**f for |f| <= 1/2, highest power first."""
    return tuple(real(math.log(2) ** i / math.factorial(i)) for i in range(degree, -1, -1))


_EXP2 = {
    "float32": (np.float32, _taylor(np.float32, 7), 1.5 * 2.0**23, -127),
    "float64": (np.float64, _taylor(np.float64, 13), 1.5 * 2.0**52, -1023),
}


def exp2(x):
    """2**x for x <= 0, in x's own precision; exactly 0 below the normal range."""
    return np.exp2(x)


@overload(exp2, jit_options={"fastmath": {"contract"}})
def _exp2(x):
    real, coefficients, shifter, lowest = _EXP2[x.name]
    shifter, lowest = real(shifter), real(lowest)

    def polynomial(x):
        x = lowest if x < lowest else x
        t = x + shifter
        f = x - (t - shifter)
        p = coefficients[0]
        for c in coefficients[1:]:
            p = p * f + c
        return p * power_of_two(t)

    return polynomial


@inlined
def row_max(s, m):
    for j in range(s.size):
        m = larger(s[j], m)
    return m


@inlined(fastmath={"reassoc"})
def weights(s, m):
    """s <- P = 2**(s - m); returns the sum of P."""
    total = m * 0
    for j in range(s.size):
        p = exp2(s[j] - m)
        s[j] = p
        total += p
    return total


@inlined(fastmath={"contract"})
def weights_and_gradients(s, dp, lse, delta):
    """s <- P = 2**(s - lse), 0 where s is −∞;  dp <- dS = P ∘ (dP − δ), exactly 0 where P is."""
    zero = s.dtype.type(0)
    for j in range(s.size):
        p = exp2(s[j] - lse) if s[j] != -np.inf else zero
        s[j] = p
        dp[j] = p * (dp[j] - delta) if p != 0 else zero
