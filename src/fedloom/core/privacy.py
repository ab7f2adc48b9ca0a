"""Differential privacy of what clients upload: its settings, and what they guarantee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DELTA = 1e-5


@dataclass(frozen=True)
class UploadPrivacy:
    """Every update is clipped to a norm, and Gaussian noise is added, before it leaves the client. So what the server
    learns hardly depends on whether a client has its data or none: (epsilon, delta)-differential privacy of all of a
    client's data at once, against the server and everybody else."""

    clip: float  # Euclidean norm of an update
    noise: float = 1.0  # standard deviation of the noise in every coordinate, in units of `clip`
    delta: float = DELTA  # probability with which the guarantee may fail

    def epsilon(self, uploads: int) -> float:
        """The epsilon of a client that has uploaded so many times."""
        return total_epsilon([self.noise] * uploads, self.delta)

    def largest(self, numbers: int) -> float:
        """A norm that an honest update of so many numbers has in one of a billion cases at most."""
        return self.clip * (1 + self.noise * (math.sqrt(numbers) + 6.5))


def total_epsilon(noises: Sequence[float], delta: float = DELTA) -> float:
    """The epsilon of several uploads with this noise each: together they tell as much as one with the noise
    1 / sqrt(sum of 1 / noise^2)."""
    told = math.fsum(1 / noise**2 for noise in noises)
    return gaussian_epsilon(1 / math.sqrt(told), delta) if told else 0.0


def gaussian_epsilon(noise: float, delta: float) -> float:
    """The smallest epsilon for which the Gaussian mechanism is (epsilon, delta)-differentially private, exactly (Balle
    and Wang, 2018, theorem 8).

    Args:
        noise: standard deviation, in units of the largest change that one client makes.
        delta: the probability that is allowed.
    """

    from scipy.optimize import brentq  # imported here, because it takes time that `--help` should not
    from scipy.stats import norm

    def excess(epsilon: float) -> float:
        a, b = 0.5 / noise - epsilon * noise, -0.5 / noise - epsilon * noise
        return float(norm.cdf(a) - math.exp(epsilon + norm.logcdf(b))) - delta

    if excess(0.0) <= 0:
        return 0.0
    # the classic bound holds for epsilon above 1, too, if the part that is quadratic in 1 / noise is added
    high = 0.5 / noise**2 + math.sqrt(2 * math.log(1 / delta)) / noise + 1.0
    return float(brentq(excess, 0.0, high, xtol=1e-12, rtol=1e-12))
