"""Membership inference: scores against scikit-learn and by hand, and no advantage where there is none."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedloom.attacks.membership import membership, overall


@pytest.mark.parametrize("digits", [1, 8])
def test_auc_is_that_of_scikit_learn(digits):
    """Rounded to one digit there are many ties, which count half."""
    draw = np.random.default_rng(0)
    members, others = draw.normal(0.5, 0.5, 40).round(digits), draw.normal(1, 1, 25).round(digits)
    is_member = np.r_[np.ones(40), np.zeros(25)]
    expected = roc_auc_score(is_member, -np.r_[members, others])  # members have the smaller loss
    assert membership(members, others).auc == pytest.approx(expected, abs=1e-12)


def test_auc_and_standard_error_by_hand():
    """Members 1 and 2, others 2 and 3. Member 1 wins both times, member 2 one and a half times of two: AUC 3.5 / 4. The
    shares of wins are (1, 0.75) for members and (0.75, 1) for others; both have the variance 2 * 0.125^2 = 0.03125, so
    that of the AUC is 0.03125 / 2 + 0.03125 / 2."""
    found = membership(np.array([1.0, 2.0]), np.array([2.0, 3.0]))
    assert found.auc == pytest.approx(0.875)
    assert found.se == pytest.approx(math.sqrt(0.03125))


def test_the_standard_error_is_the_spread_of_the_auc():
    draw = np.random.default_rng(1)
    found = [membership(draw.normal(0, 1, 60), draw.normal(0.5, 1, 40)) for _ in range(300)]
    spread = np.std([one.auc for one in found])
    assert np.mean([one.se for one in found]) == pytest.approx(spread, rel=0.15)  # 1 / sqrt(2 * 300) is 4 percent


def test_losses_that_do_not_overlap_give_everybody_away():
    found = membership(np.linspace(0, 1, 20), np.linspace(2, 3, 30))
    assert (found.auc, found.advantage, found.balanced_accuracy) == (1, 1, 100)
    assert (found.members, found.others) == (20, 30)


def test_chance_has_no_advantage():
    """A threshold that is chosen on the samples that it is tried on would have an advantage of about 0.2 here."""
    draw = np.random.default_rng(2)
    found = [membership(draw.normal(size=30), draw.normal(size=30), seed).advantage for seed in range(300)]
    error = np.std(found) / math.sqrt(len(found))
    assert abs(np.mean(found)) < 4 * error
    assert error < 0.02


def test_the_mean_over_clients_counts_those_more_who_have_more_samples():
    """Weights m n / (m + n): 20 * 20 / 40 = 10 and 30 * 60 / 90 = 20, so a third and two thirds."""
    first, second = membership(np.zeros(20), np.ones(20)), membership(np.ones(30), np.zeros(60))
    found = overall([first, second])
    assert found.auc == pytest.approx(1 / 3)  # of 1 and 0
    assert found.advantage == pytest.approx((first.advantage + 2 * second.advantage) / 3)
    assert (found.members, found.others) == (50, 80)


def test_of_nobody_nothing_is_known():
    found = overall([])
    assert math.isnan(found.auc)
    assert math.isnan(found.advantage)
    assert found.members == 0
