"""Predictions without a model: every client predicts the same for all its samples, from its training targets."""

import numpy as np

from fedloom.metrics.predictions import Predictions


def majority(counts: np.ndarray, y: np.ndarray, starts: np.ndarray, positive: int = 1) -> Predictions:
    """Every client predicts its most frequent training class, with the frequencies as probabilities.

    Args:
        counts: training samples by client and class.
        y: test targets, in the order of clients.
        starts: test samples of client i are rows starts[i]:starts[i + 1].
        positive: of two classes, the one that ranking metrics are of.
    """
    return training_mean(counts, counts.sum(axis=1), y, starts)._replace(positive=positive)


def training_mean(sums: np.ndarray, samples: np.ndarray, y: np.ndarray, starts: np.ndarray) -> Predictions:
    """Every client predicts the mean of its training targets: of numbers, or of labels, which is their frequency.

    A client without training samples predicts the mean over the training samples of all clients.

    Args:
        sums: by client (for labels, by client and label), sum of the training targets.
        samples: by client, number of training samples.
        y: test targets, in the order of clients.
        starts: test samples of client i are rows starts[i]:starts[i + 1].
    """
    means = np.empty(sums.shape)
    trained = samples > 0
    means[trained] = (sums[trained].T / samples[trained]).T
    means[~trained] = sums.sum(axis=0) / max(1, samples.sum())
    return Predictions(y, np.repeat(means, np.diff(starts), axis=0), starts)
