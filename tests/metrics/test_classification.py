"""Metrics of classification, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from fedloom.metrics.classification import (
    accuracy,
    auprc,
    auroc,
    balanced_accuracy,
    calibration_error,
    confusion,
    log_loss,
    macro_f1,
    recalls,
)
from fedloom.metrics.predictions import Predictions

# Two clients with three classes. The first has classes 0, 0, 0, 1, predicted as 0, 0, 1, 1; the second has class 2,
# predicted as 0.
Y = np.array([0, 0, 0, 1, 2])
P = np.array([[0.8, 0.1, 0.1], [0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.3, 0.4, 0.3], [0.6, 0.2, 0.2]])
TWO = Predictions(Y, P, np.array([0, 4, 5]))


def binary(y, p):
    """One client with two classes; p are probabilities of class 1."""
    p = np.array(p, dtype=float)
    return Predictions(np.array(y), np.stack([1 - p, p], axis=1), np.array([0, len(y)]))


def test_accuracy():
    np.testing.assert_allclose(accuracy(TWO), [75, 0])


def test_balanced_accuracy_is_the_mean_recall_of_classes_that_occur():
    np.testing.assert_allclose(balanced_accuracy(TWO), [100 * (2 / 3 + 1) / 2, 0])


def test_macro_f1_is_over_classes_that_occur_or_are_predicted():
    # class 0: 2 * 2 / (3 + 2), class 1: 2 * 1 / (1 + 2), class 2 does not count; the second client has classes 0 and 2
    np.testing.assert_allclose(macro_f1(TWO), [100 * (4 / 5 + 2 / 3) / 2, 0])


def test_log_loss():
    expected = -(math.log(0.8) + math.log(0.5) + math.log(0.2) + math.log(0.4)) / 4
    np.testing.assert_allclose(log_loss(TWO), [expected, -math.log(0.2)], rtol=1e-12)


def test_log_loss_of_a_probability_of_zero_is_finite():
    np.testing.assert_allclose(log_loss(binary([1], [0.0])), -math.log(np.finfo(np.float64).eps))


def test_auroc_is_the_share_of_pairs_in_the_right_order_and_half_of_the_ties():
    # positives 0.9, 0.4; negatives 0.4, 0.1, 0.5: right are 3 pairs of 0.9, of 0.4 one and a tie: 4.5 of 6
    np.testing.assert_allclose(auroc(binary([1, 1, 0, 0, 0], [0.9, 0.4, 0.4, 0.1, 0.5])), [75])


def test_auroc_of_several_classes_is_the_mean_over_classes_with_both_kinds_of_samples():
    # Client 1: class 0 has 0.8, 0.5, 0.2 against 0.3, so 2 of 3; class 1 has 0.4 against 0.1, 0.3, 0.7, so 2 of 3;
    # class 2 has no samples. Client 2 has no other class.
    np.testing.assert_allclose(auroc(TWO), [100 * 2 / 3, np.nan])


def test_auprc_is_precision_weighted_by_the_rise_in_recall():
    # thresholds 0.9 (precision 1, recall 1/2), 0.5 (no rise), 0.4 with a tie (precision 2/4, recall 1)
    np.testing.assert_allclose(auprc(binary([1, 1, 0, 0, 0], [0.9, 0.4, 0.4, 0.1, 0.5])), [100 * (1 / 2 + 1 / 4)])


def test_areas_are_undefined_for_two_classes_without_samples_of_the_second():
    assert np.isnan(auroc(binary([0, 0], [0.3, 0.6]))).all()
    assert np.isnan(auprc(binary([0, 0], [0.3, 0.6]))).all()
    assert np.isnan(auroc(binary([1, 1], [0.3, 0.6]))).all()
    np.testing.assert_allclose(auprc(binary([1, 1], [0.3, 0.6])), [100])


def test_negative_zero_equals_zero():
    np.testing.assert_allclose(auroc(binary([0, 1], [-0.0, 0.0])), [50])


def test_calibration_error():
    # Confidences 0.8 (right), 0.5 (right), 0.7 (wrong), 0.4 (right), in bins of their own:
    # (0.2 + 0.5 + 0.7 + 0.6) / 4; client 2: 0.6, wrong.
    np.testing.assert_allclose(calibration_error(TWO), [50, 60])


def test_calibration_errors_cancel_within_a_bin_only():
    # 0.61 and 0.65 are in (9/15, 10/15]: |0.61 + 0.65 - 1| / 2; 0.59 would be in the bin before
    np.testing.assert_allclose(calibration_error(binary([1, 0], [0.61, 0.65])), [13])
    np.testing.assert_allclose(calibration_error(binary([1, 0], [0.59, 0.65])), [100 * (0.41 + 0.65) / 2])


@pytest.mark.parametrize("p", [0.6, 1.0])  # 9/15 and 15/15
def test_bins_contain_their_upper_edges(p):
    # in one bin with a slightly lower probability, so that a right and a wrong prediction cancel
    below = p - 0.01
    np.testing.assert_allclose(calibration_error(binary([1, 0], [p, below])), [100 * (p + below - 1) / 2])


def test_ties_go_to_the_smallest_class():
    tie = Predictions(np.array([1, 2]), np.array([[0.2, 0.4, 0.4], [0.2, 0.4, 0.4]]), np.array([0, 2]))
    np.testing.assert_allclose(accuracy(tie), [50])
    np.testing.assert_array_equal(confusion(tie), [[[0, 0, 0], [0, 1, 0], [0, 1, 0]]])


def test_confusion_has_true_classes_in_rows():
    np.testing.assert_array_equal(
        confusion(TWO), [[[2, 1, 0], [0, 1, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0], [1, 0, 0]]]
    )


def test_recalls_are_undefined_for_classes_that_do_not_occur():
    np.testing.assert_allclose(recalls(confusion(TWO)), [[200 / 3, 100, np.nan], [np.nan, np.nan, 0]])


def test_samples_without_a_predicted_class_are_not_in_the_confusion_matrix():
    p = P.copy()
    p[3:] = np.nan
    np.testing.assert_array_equal(confusion(TWO._replace(p=p))[0], [[2, 1, 0], [0, 0, 0], [0, 0, 0]])
    assert not confusion(TWO._replace(p=p))[1].any()
