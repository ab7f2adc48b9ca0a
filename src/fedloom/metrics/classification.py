"""Metrics of classification per client, in percent except the log loss; NaN for clients for which one is undefined.

The predicted class is that with the largest probability, of several the one with the smallest index. A sample whose
probabilities are NaN, because the model diverged, has none: it counts as wrong.
"""

import numpy as np

from fedloom.metrics.arithmetic import clipped, mean_of_defined, ratio
from fedloom.metrics.predictions import Predictions
from fedloom.metrics.ranking import area_under_roc, average_precision

BINS = 15


def accuracy(predictions: Predictions) -> np.ndarray:
    """Share of the samples whose class is predicted."""
    return 100 * predictions.mean(_predicted(predictions) == predictions.y)


def balanced_accuracy(predictions: Predictions) -> np.ndarray:
    """Mean of the recalls of the classes that a client has."""
    correct, true, _ = _class_counts(predictions)
    return 100 * mean_of_defined(ratio(correct, true))


def macro_f1(predictions: Predictions) -> np.ndarray:
    """Mean of the F1 scores of the classes that a client has or that are predicted for it."""
    correct, true, predicted = _class_counts(predictions)
    return 100 * mean_of_defined(ratio(2 * correct, true + predicted))


def auroc(predictions: Predictions) -> np.ndarray:
    """Area under the ROC curve: of the positive class if there are two, else the mean of one-vs-rest areas.

    The mean is over the classes of which a client has some samples, but not only those.
    """
    return 100 * mean_of_defined(area_under_roc(*_one_vs_rest(predictions), predictions.starts))


def auprc(predictions: Predictions) -> np.ndarray:
    """Average precision: of the positive class if there are two, else the mean over the classes that a client has."""
    return 100 * mean_of_defined(average_precision(*_one_vs_rest(predictions), predictions.starts))


def log_loss(predictions: Predictions) -> np.ndarray:
    """Mean negative natural logarithm of the probability of the true class."""
    p = np.take_along_axis(predictions.p, predictions.y[:, None].astype(np.int64), axis=1)[:, 0]
    return predictions.mean(-np.log(clipped(p)))


def calibration_error(predictions: Predictions) -> np.ndarray:
    """Expected calibration error: mean distance of confidence and accuracy over 15 bins of equal width.

    The confidence is the largest probability; bins are weighted by their samples and contain their upper edges.

    Guo, Pleiss, Sun, Weinberger. On Calibration of Modern Neural Networks. ICML 2017, equation 3.
    """
    samples, confidence, correct = np.moveaxis(reliability(predictions), 2, 0)
    return 100 * ratio(np.abs(confidence - correct).sum(axis=1), samples.sum(axis=1))


def reliability(predictions: Predictions) -> np.ndarray:
    """A reliability diagram: samples, summed confidence, correct predictions, (clients, 15 bins of confidence, 3)."""
    confidence = predictions.p.max(axis=1)
    bins = np.searchsorted(np.arange(1, BINS) / BINS, confidence)  # bin b: b / 15 < confidence <= (b + 1) / 15
    cell, cells = predictions.client * BINS + bins, len(predictions.sizes) * BINS
    weights = (None, confidence, _predicted(predictions) == predictions.y)
    counts = [np.bincount(cell, weight, cells).reshape(-1, BINS) for weight in weights]
    return np.stack(counts, axis=2).astype(np.float64)


def confusion(predictions: Predictions) -> np.ndarray:
    """Confusion matrices (clients, classes, classes): entry [i, a, b] counts samples of class a predicted as b.

    Samples without a predicted class are left out.
    """
    clients, classes = len(predictions.sizes), predictions.p.shape[1]
    predicted = _predicted(predictions)
    cell = (predictions.client * classes + predictions.y) * classes + predicted
    return np.bincount(cell[predicted >= 0], minlength=clients * classes**2).reshape(clients, classes, classes)


def recalls(confusions: np.ndarray) -> np.ndarray:
    """Recall of every class, as (clients, classes), from confusion matrices; NaN for classes a client does not have."""
    return 100 * ratio(np.diagonal(confusions, axis1=1, axis2=2), confusions.sum(axis=2))


def _predicted(predictions: Predictions) -> np.ndarray:
    """The predicted class of every sample, -1 for none."""
    p = predictions.p
    return np.where(np.isnan(p).any(axis=1), -1, p.argmax(axis=1))


def _class_counts(predictions: Predictions) -> list[np.ndarray]:
    """By client and class: samples of it that are predicted correctly, samples of it, samples predicted to be of it."""
    y, predicted = predictions.y, _predicted(predictions)
    clients, classes = len(predictions.sizes), predictions.p.shape[1]
    offset = predictions.client * classes
    cells = (offset + y)[y == predicted], offset + y, (offset + predicted)[predicted >= 0]
    return [np.bincount(cell, minlength=clients * classes).reshape(clients, classes) for cell in cells]


def _one_vs_rest(predictions: Predictions) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of classes, and whether samples are of them; of two classes only the positive one."""
    y, p = predictions.y, predictions.p
    classes = np.array([predictions.positive]) if p.shape[1] == 2 else np.arange(p.shape[1])
    return p[:, classes], y[:, None] == classes
