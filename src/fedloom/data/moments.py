"""Means and standard deviations of data that lie in several places: each sends three numbers per column.

They are merged as Chan, Golub and LeVeque do, because sums of squares lose the digits of columns whose mean is large
beside their spread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Moments(NamedTuple):
    """Of every column: how many values it has, their mean, and the sum of squares of their differences to it."""

    n: np.ndarray
    mean: np.ndarray
    squares: np.ndarray

    @staticmethod
    def of(x: np.ndarray) -> Moments:
        """Of the columns of a matrix; NaN is no value."""
        known = ~np.isnan(x)
        n = known.sum(0).astype(np.float64)
        mean = np.where(known, x, 0).sum(0) / np.maximum(n, 1)
        squares = (np.where(known, x - mean, 0) ** 2).sum(0)
        return Moments(n, mean, squares)

    def merged(self, other: Moments) -> Moments:
        """Of the values of both."""
        n = self.n + other.n
        difference, share = other.mean - self.mean, other.n / np.maximum(n, 1)
        return Moments(
            n,
            self.mean + difference * share,
            self.squares + other.squares + difference**2 * self.n * share,
        )

    @property
    def std(self) -> np.ndarray:
        """Standard deviations."""
        return np.sqrt(self.squares / np.maximum(self.n, 1))


def merge_moments(each: Iterable[Moments]) -> Moments:
    """Of the values of all places, in this order."""
    first, *others = each
    for other in others:
        first = first.merged(other)
    return first
