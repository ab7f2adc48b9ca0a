"""Two methods on the same clients and seeds: by how much one is better, how sure that is, and for whom."""

from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95


class Paired(NamedTuple):
    """A difference between two methods."""

    difference: float  # mean over clients and seeds
    low: float  # confidence interval
    high: float
    better: float  # share of clients in percent, with values averaged over seeds, for whom the first is better

    @property
    def tie(self) -> bool:
        """True if the interval contains 0, or if there is none because there are too few clients."""
        return not (self.low > 0 or self.high < 0)


def paired(a: np.ndarray, b: np.ndarray, higher_is_better: bool = True) -> Paired:
    """Compare two methods by their values (seeds, clients), NaN where one is undefined.

    Clients and seeds are both drawn at random, so the variance of the mean difference is that of a two-way layout
    with random effects and one value per cell, (MS_clients + MS_seeds - MS_rest) / (seeds clients), with
    Satterthwaite's degrees of freedom. With one seed, it is the variance over clients.
    """
    d = (a - b) * (1 if higher_is_better else -1)
    d = d[:, ~np.isnan(d).any(axis=0)]  # clients for whom all values are defined
    clients = d.shape[1]
    if not clients:
        return Paired(np.nan, np.nan, np.nan, np.nan)
    mean, better = float(d.mean()), 100 * float((d.mean(0) > 0).mean())
    if clients < 2:
        return Paired(mean, np.nan, np.nan, better)
    variance, freedom = _variance_of_mean(d)
    half = stdtrit(freedom, (1 + CONFIDENCE) / 2) * np.sqrt(variance) if variance > 0 else 0.0
    return Paired(mean, mean - half, mean + half, better)


def _variance_of_mean(d: np.ndarray) -> tuple[float, float]:
    """The variance of the mean, and its degrees of freedom."""
    seeds, clients = d.shape
    by_client, by_seed = d.mean(0), d.mean(1)
    of_clients = seeds * by_client.var(ddof=1)
    if seeds < 2:
        return of_clients / clients, clients - 1
    of_seeds = clients * by_seed.var(ddof=1)
    rest = d - by_client - by_seed[:, None] + d.mean()
    of_rest = (rest**2).sum() / ((seeds - 1) * (clients - 1))
    total = max(of_clients + of_seeds - of_rest, of_rest)
    parts = of_clients**2 / (clients - 1) + of_seeds**2 / (seeds - 1) + of_rest**2 / ((seeds - 1) * (clients - 1))
    return total / (seeds * clients), max(1.0, total**2 / parts) if parts else 1.0


def ranks(values: list[np.ndarray], higher_is_better: bool = True) -> list[tuple[int, Paired]]:
    """The rank of each method, and its comparison with the best one, given values (seeds, clients) of methods from the
    best mean to the worst. A method has the rank of the first one from which its difference may be chance."""
    found: list[tuple[int, Paired]] = []
    first = 0
    for place, mine in enumerate(values):
        if place and not paired(values[first], mine, higher_is_better).tie:
            first = place
        found.append((first + 1, paired(mine, values[0], higher_is_better)))
    return found
