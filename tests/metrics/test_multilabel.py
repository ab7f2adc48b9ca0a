"""Metrics of multi-label classification, against numbers worked out by hand."""

import math

import numpy as np

from fedloom.metrics.multilabel import accuracy, auprc, auroc, exact_match, log_loss, macro_f1
from fedloom.metrics.predictions import Predictions

# One client with three samples and three labels, of which nobody has the last.
Y = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0]])
P = np.array([[0.5, 0.2, 0.1], [0.3, 0.8, 0.2], [0.4, 0.9, 0.3]])
ONE = Predictions(Y, P, np.array([0, 3]))


def test_a_probability_of_one_half_is_enough():
    np.testing.assert_allclose(accuracy(ONE), [100 * 8 / 9])  # only the first label of the second sample is wrong
    np.testing.assert_allclose(exact_match(ONE), [100 * 2 / 3])


def test_macro_f1_leaves_out_labels_that_neither_occur_nor_are_predicted():
    np.testing.assert_allclose(macro_f1(ONE), [100 * (2 / 3 + 1) / 2])  # 2 * 1 / (2 + 1), 2 * 2 / (2 + 2)
    never = Predictions(np.zeros((2, 2)), np.full((2, 2), 0.1), np.array([0, 2]))
    assert np.isnan(macro_f1(never)).all()


def test_areas_are_means_over_labels_that_have_them():
    # label 0: 0.5 and 0.3 against 0.4, one of two pairs; label 1: all in order
    np.testing.assert_allclose(auroc(ONE), [75])
    # label 0: precision 1 at recall 1/2, 2/3 at recall 1
    np.testing.assert_allclose(auprc(ONE), [100 * ((1 + 2 / 3) / 2 + 1) / 2])


def test_log_loss_is_the_mean_over_samples_and_labels():
    right = [0.5, 0.8, 0.9, 0.3, 0.8, 0.8, 0.6, 0.9, 0.7]  # probabilities of what is true
    np.testing.assert_allclose(log_loss(ONE), [-sum(map(math.log, right)) / 9], rtol=1e-12)
