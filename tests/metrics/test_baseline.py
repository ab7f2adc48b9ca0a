"""Predictions of the training majority or mean."""

import numpy as np

from fedloom.metrics import classification, regression
from fedloom.metrics.baseline import majority, training_mean

STARTS = np.array([0, 2, 2, 3])  # clients with 2, 0 and 1 test samples


def test_majority_predicts_the_frequencies_of_the_training_classes():
    found = majority(np.array([[1, 3, 0], [5, 0, 0], [2, 1, 1]]), np.array([1, 2, 0]), STARTS)
    np.testing.assert_array_equal(found.p, [[0.25, 0.75, 0], [0.25, 0.75, 0], [0.5, 0.25, 0.25]])
    np.testing.assert_array_equal(found.y, [1, 2, 0])
    np.testing.assert_array_equal(classification.accuracy(found), [50, np.nan, 100])


def test_majority_ranks_nothing():
    found = majority(np.array([[1, 3]]), np.array([0, 1, 1, 0]), np.array([0, 4]))
    np.testing.assert_array_equal(classification.auroc(found), [50])
    np.testing.assert_array_equal(classification.auprc(found), [50])  # the share of positives


def test_numbers_are_predicted_by_the_training_mean():
    found = training_mean(np.array([6.0, 0.0, 5.0]), np.array([3, 2, 1]), np.array([1.0, 3.0, 5.0]), STARTS)
    np.testing.assert_array_equal(found.p, [2, 2, 5])
    np.testing.assert_array_equal(regression.rmse(found), [1, np.nan, 0])


def test_labels_are_predicted_by_their_training_frequencies():
    found = training_mean(np.array([[1, 4], [0, 0], [3, 0]]), np.array([4, 1, 3]), np.eye(3, 2), STARTS)
    np.testing.assert_array_equal(found.p, [[0.25, 1], [0.25, 1], [1, 0]])


def test_a_client_without_training_samples_predicts_the_frequencies_of_all():
    counts = np.array([[0, 0], [1, 0], [2, 5]])
    found = majority(counts, np.array([0, 0, 1]), np.array([0, 1, 2, 3]))
    np.testing.assert_array_equal(found.p, [[3 / 8, 5 / 8], [1, 0], [2 / 7, 5 / 7]])
