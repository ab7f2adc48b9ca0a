"""Metrics of regression per client, in the unit of the target or without one; NaN for clients without samples."""

import numpy as np

from fedloom.metrics.arithmetic import ratio
from fedloom.metrics.predictions import Predictions


@np.errstate(over="ignore", invalid="ignore")  # a model that diverged has an infinite error
def rmse(predictions: Predictions) -> np.ndarray:
    """Root of the mean squared error."""
    return np.sqrt(predictions.mean((predictions.y - predictions.p) ** 2))


def mae(predictions: Predictions) -> np.ndarray:
    """Mean absolute error."""
    return predictions.mean(np.abs(predictions.y - predictions.p))


@np.errstate(over="ignore", invalid="ignore")
def r2(predictions: Predictions) -> np.ndarray:
    """Coefficient of determination: 1 minus the squared error relative to that of the mean of the client's targets.

    NaN for clients with fewer than two samples. If all targets of a client are equal it is 1 without any error, else 0,
    as in scikit-learn.
    """
    y, p = predictions.y, predictions.p
    errors = predictions.reduce(np.add, (y - p) ** 2)
    means = np.repeat(predictions.mean(y), predictions.sizes)
    found = 1 - ratio(errors, predictions.reduce(np.add, (y - means) ** 2))
    # the sum above need not be 0 for equal targets, because their mean is rounded
    equal = predictions.reduce(np.maximum, y) == predictions.reduce(np.minimum, y)
    found[equal] = np.where(np.isnan(errors), np.nan, errors == 0)[equal]
    found[predictions.sizes < 2] = np.nan
    return found
