"""Arithmetic that several metrics share."""

import numpy as np


def ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, and NaN where b is 0."""
    return np.divide(a, b, out=np.full(a.shape, np.nan), where=b != 0)


def mean_of_defined(values: np.ndarray) -> np.ndarray:
    """For every row, the mean of the values that are not NaN; NaN if there are none."""
    return ratio(np.nansum(values, axis=1), (~np.isnan(values)).sum(axis=1))


def clipped(p: np.ndarray) -> np.ndarray:
    """Probabilities that are at least the machine epsilon away from 0 and 1, as in scikit-learn's log loss."""
    epsilon = np.finfo(p.dtype).eps
    return np.clip(p, epsilon, 1 - epsilon)
