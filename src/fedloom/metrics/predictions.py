"""`Predictions`: the targets and predictions of one model per client, from which metrics are computed."""

from typing import NamedTuple

import numpy as np


class Predictions(NamedTuple):
    """Targets and predictions of all samples, client after client. Clients may have no samples.

    Classes: y has indices of classes, p the probability of every class. Labels (a sample has any number of them): y is
    1 where a sample has a label, else 0, and p has the probability of every label. Numbers: y and p have the same unit.
    """

    y: np.ndarray  # (samples,), for labels (samples, labels)
    p: np.ndarray  # (samples, classes or labels), for numbers (samples,)
    starts: np.ndarray  # (clients + 1,): samples of client i are rows starts[i]:starts[i + 1]
    positive: int = 1  # of two classes, the one that ranking metrics (AUROC, AUPRC) are of

    @property
    def sizes(self) -> np.ndarray:
        """The number of samples of every client."""
        return np.diff(self.starts)

    @property
    def client(self) -> np.ndarray:
        """The client of every sample."""
        return np.repeat(np.arange(len(self.starts) - 1), self.sizes)

    def reduce(self, operation: np.ufunc, values: np.ndarray) -> np.ndarray:
        """Values of samples, reduced (np.add, np.maximum) over the samples of every client; NaN for empty clients."""
        found = np.full((len(self.starts) - 1, *values.shape[1:]), np.nan)
        filled = self.sizes > 0  # for an empty client, reduceat would give the next client's first value
        found[filled] = operation.reduceat(values, self.starts[:-1][filled], axis=0, dtype=np.float64)
        return found

    def mean(self, values: np.ndarray) -> np.ndarray:
        """The mean of values of samples over the samples of every client; NaN for empty clients."""
        sizes = self.sizes.reshape(-1, *[1] * (values.ndim - 1))
        return self.reduce(np.add, values) / np.maximum(sizes, 1)
