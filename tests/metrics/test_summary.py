"""Statistics of a metric over clients, against those of accuracy and numbers worked out by hand."""

import math

import numpy as np
import pytest

from fedloom.metrics.scores import accuracies, summarize
from fedloom.metrics.summary import over_clients

NAMES = {
    "mean": "acc_mean",
    "weighted": "acc_weighted",
    "low5": "acc_low5",
    "top5": "acc_top5",
    "worst": "acc_worst",
    "std": "client_acc_std",
}


@pytest.mark.parametrize("clients", [1, 3, 20, 21, 60, 100])
def test_of_accuracies_they_are_those_of_scores(clients):
    rng = np.random.default_rng(clients)
    samples = rng.integers(0, 30, clients)
    samples[0] = 5
    scores = np.stack([rng.integers(0, samples + 1), np.zeros(clients), samples], axis=1).astype(float)
    found, expected = over_clients(accuracies(scores), samples), summarize(scores)
    for name, other in NAMES.items():
        assert found[name] == pytest.approx(expected[other], rel=1e-12)
    assert found["clients"] == np.count_nonzero(samples)
    assert set(found) == {*NAMES, "clients"}


def test_where_lower_is_better_the_worst_clients_have_the_highest_values():
    values, sizes = np.arange(1.0, 41.0), np.ones(40)
    losses = over_clients(values, sizes, higher_is_better=False)
    assert (losses["low5"], losses["top5"], losses["worst"]) == (39.5, 1.5, 40)  # two clients are 5 %
    assert (losses["mean"], losses["std"]) == (20.5, pytest.approx(math.sqrt((40**2 - 1) / 12)))


def test_clients_without_a_value_do_not_count():
    values, sizes = np.array([np.nan, 1.0, 4.0]), np.array([100, 2, 1])
    found = over_clients(values, sizes)
    assert found == {"mean": 2.5, "weighted": 2.0, "low5": 1, "top5": 4, "worst": 1, "std": 1.5, "clients": 2}


def test_there_is_nothing_if_nobody_has_a_value():
    assert over_clients(np.full(3, np.nan), np.array([1, 0, 2])) == {}
    assert over_clients(np.zeros(0), np.zeros(0)) == {}


def test_an_infinite_value_makes_the_mean_infinite():
    found = over_clients(np.array([1.0, np.inf]), np.array([1, 1]), higher_is_better=False)
    assert (found["mean"], found["weighted"], found["worst"], found["top5"]) == (np.inf, np.inf, np.inf, 1)
