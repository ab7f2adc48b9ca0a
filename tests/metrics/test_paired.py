"""Differences of two methods on the same clients and seeds."""

import numpy as np
import pytest
from scipy import stats

from fedloom.metrics.paired import paired, ranks


def test_with_one_seed_the_interval_is_that_of_a_paired_t_test():
    draw = np.random.default_rng(0)
    a, b = draw.normal(80, 5, (1, 30)), draw.normal(78, 5, (1, 30))
    found = paired(a, b)
    expected = stats.ttest_rel(a[0], b[0]).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert found.difference == pytest.approx((a - b).mean())
    assert found.better == pytest.approx(100 * (a > b).mean())


def test_lower_may_be_better():
    a, b = np.array([[1.0, 2.0, 3.0]]), np.array([[2.0, 3.0, 5.0]])
    assert paired(a, b, higher_is_better=False).difference == pytest.approx(4 / 3)
    assert paired(a, b, higher_is_better=False).better == 100


@pytest.mark.parametrize(("of_clients", "of_seeds", "rest"), [(2.0, 0.0, 1.0), (0.5, 1.5, 0.5), (0.0, 0.0, 1.0)])
def test_intervals_contain_the_truth_as_often_as_they_say(of_clients, of_seeds, rest):
    """1000 comparisons of methods that do not differ, with effects of clients and of seeds: 95 % contain 0, give or
    take; they may contain it more often where effects are 0, but not less."""
    draw, seeds, clients = np.random.default_rng(1), 5, 20
    hits = 0
    for _ in range(1000):
        d = (
            of_clients * draw.normal(size=clients)
            + of_seeds * draw.normal(size=(seeds, 1))
            + rest * draw.normal(size=(seeds, clients))
        )
        hits += paired(d, np.zeros_like(d)).tie
    assert hits > 925


def test_a_clear_difference_is_no_tie_and_an_undefined_client_does_not_count():
    draw = np.random.default_rng(2)
    a = draw.normal(80, 1, (3, 12))
    b = a - 5 + 0.1 * draw.normal(size=a.shape)
    b[1, 4] = np.nan
    found = paired(a, b)
    assert not found.tie
    assert found.difference == pytest.approx(5, abs=0.2)


def test_too_few_clients_say_nothing():
    assert paired(np.array([[3.0]]), np.array([[1.0]])).tie
    assert np.isnan(paired(np.array([[np.nan]]), np.array([[1.0]])).difference)


def test_methods_that_differ_by_chance_have_the_same_rank():
    draw = np.random.default_rng(3)
    base = draw.normal(70, 8, (3, 20))
    noise = [0.5 * draw.normal(size=base.shape) for _ in range(4)]
    values = [base + 4 + noise[0], base + 4 - 0.01 + noise[1], base + noise[2], base - 6 + noise[3]]
    found = ranks(values)
    assert [rank for rank, _ in found] == [1, 1, 3, 4]
    assert found[0][1].difference == 0
    assert found[3][1].difference == pytest.approx(-10, abs=0.5)


def test_equal_values_tie():
    same = np.ones((2, 5))
    assert [rank for rank, _ in ranks([same, same])] == [1, 1]
