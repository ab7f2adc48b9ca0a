"""Elementary metrics, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from fedloom.metrics.scores import accuracies, convergence_round, summarize, trailing_mean, trend

# correct, summed loss, samples
THREE = np.array([[1.0, 4.0, 2.0], [9.0, 6.0, 10.0], [4.0, 2.0, 4.0]])


def clients(percent, samples=100):
    """Clients with these accuracies on as many samples each."""
    return np.array([[p * samples / 100, 0.0, samples] for p in percent])


def test_accuracies_are_in_percent_and_nan_without_samples():
    found = accuracies(np.array([[1.0, 0.3, 2.0], [0.0, 0.0, 0.0], [3.0, 0.1, 3.0]]))
    np.testing.assert_array_equal(found, [50.0, np.nan, 100.0])


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("acc_mean", 80.0),  # (50 + 90 + 100) / 3
        ("acc_weighted", 87.5),  # 14 of 16
        ("acc_low5", 50.0),  # ceil(0.15) = 1 client
        ("acc_top5", 100.0),
        ("acc_worst", 50.0),
        ("client_acc_std", math.sqrt(1400 / 3)),  # (30^2 + 10^2 + 20^2) / 3, unweighted, ddof = 0
        ("client_acc_cv_x1e-2", 100 * math.sqrt(1400 / 3) / 87.5),  # relative to the weighted accuracy
        ("loss", 0.75),  # 12 / 16: per sample, not per client
    ],
)
def test_metric_of_three_clients(metric, value):
    assert summarize(THREE)[metric] == pytest.approx(value, rel=1e-12)


def test_these_are_all_metrics():
    assert sorted(summarize(THREE)) == sorted(
        [
            "acc_mean",
            "acc_weighted",
            "acc_low5",
            "acc_top5",
            "acc_worst",
            "client_acc_std",
            "client_acc_cv_x1e-2",
            "loss",
        ]
    )


@pytest.mark.parametrize(
    ("count", "low", "top"),
    [
        (1, 1.0, 1.0),
        (20, 1.0, 20.0),  # ceil(1.0) = 1
        (21, 1.5, 20.5),  # ceil(1.05) = 2: (1 + 2) / 2, (20 + 21) / 2
        (40, 1.5, 39.5),  # 2
        (41, 2.0, 40.0),  # ceil(2.05) = 3: (1 + 2 + 3) / 3
        (60, 2.0, 59.0),  # 3; 0.05 * 60 must not come out above 3
        (100, 3.0, 98.0),  # 5: (1 + ... + 5) / 5
    ],
)
def test_low5_and_top5_average_a_twentieth_of_the_clients_rounded_up(count, low, top):
    percent = np.random.default_rng(0).permutation(np.arange(1, count + 1))  # accuracies of 1, 2, ..., count percent
    found = summarize(clients(percent))
    assert found["acc_low5"] == pytest.approx(low, rel=1e-12)
    assert found["acc_top5"] == pytest.approx(top, rel=1e-12)


def test_clients_without_samples_do_not_count():
    padded = np.insert(THREE, 1, [0.0, 0.0, 0.0], axis=0)
    assert summarize(padded) == summarize(THREE)


def test_clients_without_samples_do_not_count_for_the_twentieth():
    # 20 clients with samples: one counts, although with the five others it would be ceil(1.25) = 2
    scores = np.concatenate([clients(range(1, 21)), np.zeros((5, 3))])
    assert summarize(scores)["acc_low5"] == 1.0


def test_there_are_no_metrics_without_samples():
    assert summarize(np.zeros((4, 3))) == {}


def test_variation_is_undefined_when_nothing_is_correct():
    found = summarize(np.array([[0.0, 5.0, 4.0], [0.0, 2.0, 3.0]]))
    assert math.isnan(found["client_acc_cv_x1e-2"])
    assert found["acc_mean"] == found["client_acc_std"] == 0.0


def test_trailing_mean_is_over_the_last_values_and_fewer_at_the_start():
    # 3; (3+5)/2; (3+5+1)/3; then the last three: (5+1+9)/3, (1+9+2)/3
    np.testing.assert_allclose(trailing_mean([3, 5, 1, 9, 2], 3), [3, 4, 3, 5, 4], rtol=1e-12)


def test_trailing_mean_is_over_ten_rounds_by_default():
    found = trailing_mean(list(range(1, 13)))
    # mean of 1..10 is 5.5, of 2..11 6.5, of 3..12 7.5
    np.testing.assert_allclose(found[-3:], [5.5, 6.5, 7.5], rtol=1e-12)
    assert found[8] == pytest.approx(5.0)  # mean of 1..9


def test_convergence_is_the_first_round_whose_trailing_mean_is_within_a_tenth_of_a_point_of_the_best():
    # the k-th trailing mean is 80 (k-1)/k up to k = 10, which is 72; then the 0 leaves, and it is 80
    assert convergence_round([0.0] + [80.0] * 15) == 11
    # a peak that fades still counts: trailing means 90, then below 90 - 0.1
    assert convergence_round([90.0] + [80.0] * 15) == 1
    # 79.95 is within 0.1 of 80.0; a constant has converged in round 1
    assert convergence_round([79.95] * 10 + [80.0] * 20) == 1
    assert convergence_round([50.0] * 5) == 1
    # 79.7 for ten rounds, then 80.0: the k-th trailing mean after is 79.7 + 0.03 k, at least 79.9 from k = 7 on
    assert convergence_round([79.7] * 10 + [80.0] * 20) == 17


def test_a_convergence_tolerance_of_zero_asks_for_the_best_itself():
    assert convergence_round([10.0, 30.0, 20.0], tolerance=0.0) == 2  # trailing means 10, 20, 20


def test_the_trend_is_the_last_twenty_rounds_less_the_twenty_before():
    rounds = list(range(1, 51))
    values = [0.0] * 10 + [50.0] * 20 + [51.0] * 20
    assert trend(rounds, values) == pytest.approx(1)
    assert trend([5, 10, 15, 20, 25, 30, 35, 40], [1.0] * 4 + [3.0] * 4) == pytest.approx(2)  # evaluated now and then
    assert math.isnan(trend([100], [50.0]))


def test_the_trend_of_a_short_run_is_its_second_half_less_its_first():
    assert trend([1, 2, 3, 4], [10.0, 20.0, 30.0, 50.0]) == pytest.approx(25)
    assert trend([1, 2, 3], [10.0, 20.0, 50.0]) == pytest.approx(30)
    assert math.isnan(trend([1], [50.0]))
