"""Metrics by name, and metrics that users write."""

import functools

import numpy as np
import pytest
from sentences import user_error

from fedloom.core.errors import UserError
from fedloom.metrics.predictions import Predictions
from fedloom.metrics.registry import METRICS, OTHER_NAMES, find_metric, own_metric

# clients with two, no and one sample
NUMBERS = Predictions(np.array([1.0, 2.0, 5.0]), np.array([1.0, 4.0, 4.0]), np.array([0, 2, 2, 3]))


def test_every_metric_is_found_by_its_name_and_kind():
    for metric in METRICS:
        assert find_metric(metric.name, metric.kind) is metric


def test_losses_and_errors_are_better_when_they_are_lower():
    lower = {metric.name for metric in METRICS if not metric.higher_is_better}
    assert lower == {"log_loss", "calibration_error", "rmse", "mae"}


def test_perfect_predictions_have_100_percent():
    perfect = {
        "classes": Predictions(np.array([0, 1]), np.eye(2), np.array([0, 2])),
        "labels": Predictions(np.eye(2), np.eye(2), np.array([0, 2])),
        "number": Predictions(np.array([1.0, 2.0]), np.array([1.0, 2.0]), np.array([0, 2])),
    }
    for metric in METRICS:
        best = 0 if not metric.higher_is_better else 100 if metric.percent else 1
        np.testing.assert_allclose(metric.per_client(perfect[metric.kind]), [best], atol=1e-12, err_msg=metric.name)


@pytest.mark.parametrize(
    ("name", "kind", "meant"),
    [
        ("f1", "classes", "macro_f1"),
        ("F1", "labels", "macro_f1"),
        ("roc_auc", "classes", "auroc"),
        ("roc-auc", "classes", "auroc"),
        ("auc", "labels", "auroc"),
        ("average_precision", "classes", "auprc"),
        ("ap", "classes", "auprc"),
        ("pr_auc", "classes", "auprc"),
        ("acc", "classes", "accuracy"),
        ("mse", "number", "rmse"),
        ("nll", "classes", "log_loss"),
        ("ece", "classes", "calibration_error"),
        ("acuracy", "classes", "accuracy"),
        ("rsme", "number", "rmse"),
    ],
)
def test_another_name_suggests_the_one_that_is_meant(name, kind, meant):
    with user_error(f"Unknown metric '{name}'", f"did you mean '{meant}'?"):
        find_metric(name, kind)


def test_other_names_stand_for_metrics_and_are_none():
    names = {metric.name for metric in METRICS}
    assert set(OTHER_NAMES.values()) <= names
    assert not set(OTHER_NAMES) & names


def test_a_metric_for_another_kind_of_target_is_refused_with_those_that_fit():
    with user_error("'accuracy' is for targets that are classes or labels", "these are numbers", "mae, r2, rmse"):
        find_metric("accuracy", "number")
    with user_error("'rmse' is for targets that are numbers", "these are classes", "auroc"):
        find_metric("rmse", "classes")


def test_another_name_suggests_only_metrics_for_the_kind():
    with pytest.raises(UserError) as caught:
        find_metric("mse", "classes")
    assert "rmse" not in str(caught.value)


def test_an_unknown_name_lists_all():
    with user_error("Unknown metric 'xyz'", "known: mae, r2, rmse"):
        find_metric("xyz", "number")


def largest_error(y_true, prediction):
    """The largest error.

    Of one client.
    """
    return np.abs(y_true - prediction).max()


def test_a_function_is_called_for_every_client_with_samples():
    metric = own_metric(largest_error)
    np.testing.assert_array_equal(metric.per_client(NUMBERS), [2, np.nan, 1])
    assert (metric.name, metric.kind, metric.about) == ("largest_error", None, "The largest error.")
    assert metric.higher_is_better
    assert not metric.percent


def test_a_function_can_say_that_lower_is_better():
    def error(y_true, prediction):
        return 1.0

    error.higher_is_better = False
    assert not own_metric(error).higher_is_better


def test_a_function_of_classes_gets_probabilities():
    def confidence(y_true, prediction):
        assert y_true.shape == (2,)
        return prediction.max(axis=1).mean()

    predictions = Predictions(np.array([0, 1]), np.array([[0.5, 0.5], [0.1, 0.9]]), np.array([0, 2]))
    np.testing.assert_allclose(own_metric(confidence).per_client(predictions), [0.7])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, None, "0.5", 1j, np.zeros(3), 10**400])
def test_results_that_are_no_finite_numbers_are_undefined(value):
    def odd(y_true, prediction):
        return value

    np.testing.assert_array_equal(own_metric(odd).per_client(NUMBERS), [np.nan] * 3)


@pytest.mark.parametrize("value", [3, np.float32(3), np.array(3), np.int64(3)])
def test_numbers_of_any_type_count(value):
    def fine(y_true, prediction):
        return value

    np.testing.assert_array_equal(own_metric(fine).per_client(NUMBERS), [3, np.nan, 3])


def test_a_function_that_raises_is_named_with_what_it_raised():
    def fragile(y_true, prediction):
        if len(y_true) < 2:
            raise ValueError("Needs two samples. More is better.\nSee the manual.")
        return 1.0

    with user_error("'fragile'", "ValueError", "needs two samples", "a client with 1 sample;"):
        own_metric(fragile).per_client(NUMBERS)


def test_a_function_needs_a_name():
    with user_error("<lambda>", "has no name", "def"):
        own_metric(lambda y_true, prediction: 1.0)
    with user_error("has no name", "def"):
        own_metric(functools.partial(largest_error))
