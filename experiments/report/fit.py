"""Runtime against density: the least-squares line and the bound that it is held to."""

from dataclasses import dataclass

import numpy as np

SLOPE_LIMIT = 1.25
DENSITY_FROM = 0.03


@dataclass(frozen=True)
class Fit:
    """``t = fixed + slope * s`` for density ``s``, in the unit of the times."""

    fixed: float
    slope: float
    r_squared: float
    dense: float

    @property
    def relative_slope(self):
        """Cost of a live tile relative to a tile of the dense run: 1 is ideal."""
        return self.slope / self.dense


def fit_line(density, time, dense):
    """Least squares over at least two different densities.

    Parameters
    ----------
    density, time : sequences of float
    dense : float
        Time of the dense run of the same implementation.

    Returns
    -------
    Fit
    """
    s, t = np.asarray(density, np.float64), np.asarray(time, np.float64)
    design = np.stack([np.ones_like(s), s], axis=1)
    (fixed, slope), *_ = np.linalg.lstsq(design, t)
    residual = np.square(t - design @ (fixed, slope)).sum()
    spread = np.square(t - t.mean()).sum()
    r_squared = 1.0 - residual / spread if spread else 1.0
    return Fit(float(fixed), float(slope), float(r_squared), float(dense))


def fixed_cost(density, time, dense):
    """Smallest ``c`` with ``t <= 1.25 * s * dense + c`` at every density from 3 %, at least 0."""
    s, t = np.asarray(density, np.float64), np.asarray(time, np.float64)
    excess = (t - SLOPE_LIMIT * s * dense)[s >= DENSITY_FROM]
    return float(np.max(excess, initial=0.0))
