"""Metrics of regression, against numbers worked out by hand."""

import numpy as np

from fedloom.metrics.predictions import Predictions
from fedloom.metrics.regression import mae, r2, rmse


def one(y, p):
    return Predictions(np.array(y, dtype=float), np.array(p, dtype=float), np.array([0, len(y)]))


def test_errors_have_the_unit_of_the_target():
    client = one([1, 2, 6], [1, 5, 2])  # errors 0, 3, 4
    np.testing.assert_allclose(rmse(client), [np.sqrt(25 / 3)])
    np.testing.assert_allclose(mae(client), [7 / 3])


def test_r2_compares_with_the_mean_of_the_client():
    np.testing.assert_allclose(r2(one([1, 2, 6], [1, 5, 2])), [1 - 25 / 14])  # the mean is 3, its errors 2, 1, 3
    np.testing.assert_allclose(r2(one([1, 2, 6], [3, 3, 3])), [0], atol=1e-12)


def test_r2_of_equal_targets_is_one_without_error_and_else_zero():
    # the mean of three times 0.1 is not 0.1, so that a quotient would be a huge number
    np.testing.assert_array_equal(r2(one([0.1, 0.1, 0.1], [0.1, 0.1, 0.1])), [1])
    np.testing.assert_array_equal(r2(one([0.1, 0.1, 0.1], [0.1, 0.1, 0.2])), [0])


def test_r2_is_undefined_for_one_sample():
    both = Predictions(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0]), np.array([0, 1, 3]))
    np.testing.assert_array_equal(r2(both), [np.nan, 1])


def test_a_model_that_diverged_has_an_infinite_error_or_none():
    np.testing.assert_array_equal(rmse(one([1, 2], [1e200, 0])), [np.inf])
    np.testing.assert_array_equal(r2(one([1, 2], [np.inf, 0])), [-np.inf])
    for metric in (rmse, mae, r2):
        assert np.isnan(metric(one([1, 2], [np.nan, 0]))).all()
        assert np.isnan(metric(one([2, 2], [np.nan, 2]))).all()
