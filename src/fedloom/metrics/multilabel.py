"""Metrics of multi-label classification per client, in percent except the log loss; NaN where one is undefined.

A label is predicted if its probability is at least 0.5.
"""

import numpy as np

from fedloom.metrics.arithmetic import clipped, mean_of_defined, ratio
from fedloom.metrics.predictions import Predictions
from fedloom.metrics.ranking import area_under_roc, average_precision

THRESHOLD = 0.5


def accuracy(predictions: Predictions) -> np.ndarray:
    """Share of the labels of all samples, present or not, that are predicted correctly."""
    return 100 * predictions.mean(_correct(predictions)).mean(axis=1)


def exact_match(predictions: Predictions) -> np.ndarray:
    """Share of the samples whose labels are all predicted correctly."""
    return 100 * predictions.mean(np.all(_correct(predictions), axis=1))


def macro_f1(predictions: Predictions) -> np.ndarray:
    """Mean of the F1 scores of the labels that a client has or that are predicted for it."""
    y, predicted = predictions.y != 0, predictions.p >= THRESHOLD
    correct, true, found = (predictions.reduce(np.add, label) for label in (y & predicted, y, predicted))
    return 100 * mean_of_defined(ratio(2 * correct, true + found))


def recalls(predictions: Predictions) -> np.ndarray:
    """Share of the samples with a label for which it is predicted, as (clients, labels); NaN for labels that a client
    does not have."""
    y, predicted = predictions.y != 0, predictions.p >= THRESHOLD
    return 100 * ratio(*(predictions.reduce(np.add, label) for label in (y & predicted, y)))


def auroc(predictions: Predictions) -> np.ndarray:
    """Mean area under the ROC curve of the labels that some, but not all samples of a client have."""
    y, p, starts = predictions.y, predictions.p, predictions.starts
    return 100 * mean_of_defined(area_under_roc(p, y != 0, starts))


def auprc(predictions: Predictions) -> np.ndarray:
    """Mean average precision of the labels that a client has."""
    y, p, starts = predictions.y, predictions.p, predictions.starts
    return 100 * mean_of_defined(average_precision(p, y != 0, starts))


def log_loss(predictions: Predictions) -> np.ndarray:
    """Mean binary log loss over samples and labels, with the natural logarithm."""
    p = clipped(predictions.p)
    return predictions.mean(-np.log(np.where(predictions.y != 0, p, 1 - p))).mean(axis=1)


def _correct(predictions: Predictions) -> np.ndarray:
    return (predictions.p >= THRESHOLD) == (predictions.y != 0)
