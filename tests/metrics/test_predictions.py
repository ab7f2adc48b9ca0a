"""Reductions of samples by client."""

import numpy as np

from fedloom.metrics.predictions import Predictions

# clients with no, two, no, no, one and no samples
SIX = Predictions(np.array([1.0, 2.0, 5.0]), np.zeros(3), np.array([0, 0, 2, 2, 2, 3, 3]))


def test_sizes_and_clients_of_samples():
    np.testing.assert_array_equal(SIX.sizes, [0, 2, 0, 0, 1, 0])
    np.testing.assert_array_equal(SIX.client, [1, 1, 4])


def test_reductions_are_undefined_for_empty_clients():
    np.testing.assert_array_equal(SIX.reduce(np.add, SIX.y), [np.nan, 3, np.nan, np.nan, 5, np.nan])
    np.testing.assert_array_equal(SIX.mean(SIX.y), [np.nan, 1.5, np.nan, np.nan, 5, np.nan])


def test_means_of_columns():
    columns = np.stack([SIX.y, SIX.y > 1], axis=1)
    np.testing.assert_array_equal(SIX.mean(columns)[[1, 4]], [[1.5, 0.5], [5, 1]])


def test_true_counts_as_one():
    np.testing.assert_array_equal(SIX.reduce(np.add, SIX.y > 0)[[1, 4]], [2, 1])


def test_sums_are_in_double_precision():
    values = np.array([1, 2**24, 1], dtype=np.float32)  # 2^24 + 1 has no single-precision number
    np.testing.assert_array_equal(Predictions(values, values, np.array([0, 3])).reduce(np.add, values), [2**24 + 2])
