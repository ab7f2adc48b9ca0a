"""Areas under the ROC curve and the precision-recall curve, for every client and every class or label."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from fedloom.metrics.arithmetic import ratio

BLOCK = 1 << 14  # probabilities that are sorted at a time; with 1 << 18, everything took twice as long


class Curves(NamedTuple):
    """Points of the curves of some clients: one for every threshold, which are the distinct probabilities, falling.

    A curve belongs to a client and a column (a class or a label); `curve` counts through both.
    """

    positives: np.ndarray  # (clients, columns): number of samples
    negatives: np.ndarray
    curve: np.ndarray  # (points,): client * columns + column
    tp: np.ndarray  # (points,): true positives, which are the positive samples at the threshold or above it
    fp: np.ndarray  # false positives
    tp_step: np.ndarray  # true positives at the threshold itself
    fp_step: np.ndarray

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums over the points of every curve, as (clients, columns)."""
        return np.bincount(self.curve, values, self.positives.size).reshape(self.positives.shape)


def area_under_roc(p: np.ndarray, positive: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Area under the ROC curve, as (clients, columns).

    NaN where a client has no positive or no negative samples, and for clients with a probability that is NaN.

    Args:
        p: probabilities (samples, columns).
        positive: whether samples are positive, of the same shape.
        starts: samples of client i are rows starts[i]:starts[i + 1].
    """

    def area(curves: Curves) -> np.ndarray:
        # trapezoids: of a positive and a negative sample with equal probabilities, half counts
        trapezoids = curves.fp_step * (curves.tp - 0.5 * curves.tp_step)
        return ratio(curves.sums(trapezoids), curves.positives * curves.negatives)

    return _of_curves(area, p, positive, starts)


def average_precision(p: np.ndarray, positive: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Average precision, as (clients, columns): the sum over thresholds of the precision times the rise in recall.

    NaN where a client has no positive samples, and for clients with a probability that is NaN. The arguments are those
    of `area_under_roc`.
    """

    def area(curves: Curves) -> np.ndarray:
        precision = curves.tp / (curves.tp + curves.fp)
        return ratio(curves.sums(curves.tp_step * precision), curves.positives)

    return _of_curves(area, p, positive, starts)


def _of_curves(
    area: Callable[[Curves], np.ndarray], p: np.ndarray, positive: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """The values of a function of curves, as (clients, columns)."""
    found = np.full((len(starts) - 1, p.shape[1]), np.nan)
    for clients, rows, filled in _blocks(starts, p.shape[1]):
        scores = p[rows]
        values = area(_curves(scores, positive[rows], filled))
        values[np.isnan(scores).any(axis=(1, 2))] = np.nan
        found[clients] = values
    return found


def _curves(p: np.ndarray, positive: np.ndarray, filled: np.ndarray) -> Curves:
    """The curves of samples (clients, places, columns), of which some places are not filled."""
    # A probability and whether the sample is positive, as one integer. Its order is that of falling probabilities,
    # because bits of floats that are not negative have the order of the floats; np.sort of integers is seven times as
    # fast as np.argsort of floats. Places that are not filled are 0, which comes last, as the others are negative.
    bits = p.astype(np.float64).view(np.int64)
    keys = np.where(filled[:, :, None], (~bits << 1) | positive, 0)  # shifted, 0.0 and -0.0 are equal
    ordered = np.ascontiguousarray(keys.transpose(0, 2, 1))  # (clients, columns, places)
    ordered.sort(axis=2)
    tp = np.cumsum(ordered & 1, axis=2)
    fp = np.cumsum(filled, axis=1)[:, None, :] - tp
    is_threshold = np.diff(ordered >> 1, axis=2, append=1) != 0  # the last of equal probabilities
    points = np.flatnonzero(is_threshold)
    curve = points // ordered.shape[2]
    is_first = np.diff(curve, prepend=-1) != 0
    tp_points, fp_points = tp.ravel()[points], fp.ravel()[points]
    tp_step = np.where(is_first, tp_points, np.diff(tp_points, prepend=0))
    fp_step = np.where(is_first, fp_points, np.diff(fp_points, prepend=0))
    return Curves(tp[:, :, -1], fp[:, :, -1], curve, tp_points, fp_points, tp_step, fp_step)


def _blocks(starts: np.ndarray, columns: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Clients of similar sizes, so that few places are empty when their samples are put side by side.

    Yields clients, the rows of their samples (clients, places), and which of these places are filled.
    """
    sizes = np.diff(starts)
    powers = np.frexp(sizes)[1]  # sizes from 2^(k - 1) to 2^k - 1 have k
    for power in np.unique(powers[sizes > 0]):
        alike = np.flatnonzero(powers == power)
        probabilities = len(alike) * sizes[alike].max() * columns
        for clients in np.array_split(alike, min(len(alike), -(-probabilities // BLOCK))):
            places = np.arange(sizes[clients].max())
            filled = places < sizes[clients, None]
            yield clients, starts[clients, None] + np.where(filled, places, 0), filled
