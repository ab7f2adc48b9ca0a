"""Partitions: the sanity checks of the data specification (section 7) and the sizes it names (section 3)."""

import logging
import math

import numpy as np
import pytest
from sentences import user_error

from fedloom.core.settings import build
from fedloom.data.partitions import (
    DirichletClass,
    DirichletClientLognormal,
    Iid,
    KClassEqual,
    KClassRatio,
    Natural,
    Pathological,
)

SCHEMES = [Iid(), KClassEqual(), Pathological(), DirichletClass(), DirichletClientLognormal(), KClassRatio()]


def generator(seed=1):
    return np.random.default_rng(seed)


def balanced(classes, per_class):
    """As many labels of every class, in no order."""
    return generator(99).permutation(np.repeat(np.arange(classes), per_class))


def name(scheme):
    return scheme.name


def sizes(lists):
    return np.array([len(rows) for rows in lists])


def histogram(labels, lists, classes):
    """Samples per client and class."""
    return np.array([np.bincount(labels[rows], minlength=classes) for rows in lists])


def total_variation(labels, lists, classes):
    """Mean distance between a client's label distribution and that of all samples."""
    counts = histogram(labels, lists, classes)
    counts = counts[counts.sum(1) > 0]
    whole = np.bincount(labels, minlength=classes) / len(labels)
    return float(np.abs(counts / counts.sum(1, keepdims=True) - whole).sum(1).mean() / 2)


def assert_disjoint(lists, n):
    rows = np.concatenate(lists)
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < n


def assert_each_used_once(lists, n):
    np.testing.assert_array_equal(np.sort(np.concatenate(lists)), np.arange(n))


# -- all schemes


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_no_sample_belongs_to_two_clients(scheme):
    lists = scheme.assign(balanced(10, 200), 10, 20, generator())
    assert len(lists) == 20
    assert_disjoint(lists, 2000)


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_lists_are_a_function_of_the_generators_seed(scheme):
    labels = balanced(10, 200)
    first, again, other = (scheme.assign(labels, 10, 20, generator(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("scheme", [*SCHEMES, DirichletClass(beta=0.01), KClassEqual(k=8), KClassRatio(k=8)], ids=str)
def test_500_clients_share_60000_samples(scheme):
    lists = scheme.assign(balanced(10, 6000), 10, 500, generator())
    assert len(lists) == 500
    assert sizes(lists).min() > 0
    assert_disjoint(lists, 60_000)


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_a_single_client_gets_the_samples_of_a_single_class(scheme):
    k = {"k": 1} if hasattr(scheme, "k") else {}
    (rows,) = type(scheme)(**k).assign(np.zeros(50, dtype=np.int64), 1, 1, generator())
    # kclass_ratio gives every class one slot more than is used, so about half of the class is left over
    assert len(rows) == 50 if scheme.name != "kclass_ratio" else 19 <= len(rows) <= 30


@pytest.mark.parametrize(
    ("scheme", "labels", "classes", "clients", "words"),
    [
        (KClassEqual(k=11), balanced(10, 50), 10, 5, ["k must be at most", "10", "11"]),
        (Pathological(k=11), balanced(10, 50), 10, 5, ["k must be at most", "10", "11"]),
        (KClassRatio(k=11), balanced(10, 50), 10, 5, ["k must be at most", "10", "11"]),
        # 40 clients x 2 classes / 4 classes = 20 holders of a class with 10 samples
        (KClassEqual(k=2), balanced(4, 10), 4, 40, ["10 samples", "20 clients"]),
        (Pathological(k=2), balanced(4, 10), 4, 40, ["10 samples", "20 clients"]),
        (KClassRatio(k=2), balanced(4, 10), 4, 40, ["10 samples", "20 clients"]),
        (DirichletClass(), balanced(4, 10), 4, 21, ["40 samples", "21 clients"]),  # below two for each
        (DirichletClientLognormal(), balanced(4, 10), 4, 21, ["40 samples", "21 clients"]),
        (KClassRatio(low=0.6, high=0.4), balanced(10, 50), 10, 5, ["high", "0.4", "0.6"]),
        (Natural(), balanced(10, 50), 10, 5, ["no clients of its own", "partition"]),
    ],
)
def test_an_impossible_request_is_refused_in_one_sentence(scheme, labels, classes, clients, words):
    with user_error(*words):
        scheme.assign(labels, classes, clients, generator())


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.name != "kclass_equal"], ids=name)
def test_only_kclass_equal_divides_training_and_test_data_separately(scheme):
    with user_error(scheme.name, "pool=merged"):
        scheme.assign_both(balanced(10, 50), balanced(10, 10), 10, 5, generator())


# -- iid


def test_iid_uses_each_sample_once_in_sizes_that_differ_by_at_most_one():
    lists = Iid().assign(balanced(10, 100), 10, 7, generator())
    assert_each_used_once(lists, 1000)
    # 1000 = 7 * 142 + 6
    assert sorted(sizes(lists)) == [142, 143, 143, 143, 143, 143, 143]


def test_iid_clients_have_the_label_distribution_of_all_samples():
    labels = balanced(2, 5000)
    counts = histogram(labels, Iid().assign(labels, 2, 10, generator()), 2)
    # 500 of 1000 expected; hypergeometric standard deviation sqrt(1000/4 * 0.9) = 15, bound at five of them
    assert np.abs(counts - 500).max() < 75


# -- kclass_equal (3.1)


@pytest.mark.parametrize(
    ("k", "least", "most"),
    [
        (2, 500, 500),  # 100*2/10 = 20 holders of 5000: 250 each
        (5, 500, 500),  # 50 holders: 100 each
        (3, 498, 501),  # 30 holders: 166 or 167 each
        (8, 496, 504),  # 80 holders: 62 or 63 each
    ],
)
def test_kclass_equal_gives_100_clients_500_samples_of_exactly_k_classes(k, least, most):
    labels = balanced(10, 5000)
    lists = KClassEqual(k=k).assign(labels, 10, 100, generator())
    assert_each_used_once(lists, 50_000)
    assert ((histogram(labels, lists, 10) > 0).sum(1) == k).all()
    assert least <= sizes(lists).min() <= sizes(lists).max() <= most
    assert np.ptp(sizes(lists)) <= k


def test_kclass_equal_gives_left_over_slots_to_the_first_classes():
    # 7 clients x 3 classes = 21 slots for 10 classes: two each, the one left over goes to class 0
    labels = balanced(10, 60)
    lists = KClassEqual(k=3).assign(labels, 10, 7, generator())
    held = histogram(labels, lists, 10) > 0
    assert held.sum(0).tolist() == [3, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    assert (held.sum(1) == 3).all()


def test_kclass_equal_with_all_classes_gives_everyone_every_class():
    labels = balanced(6, 90)
    lists = KClassEqual(k=6).assign(labels, 6, 9, generator())
    np.testing.assert_array_equal(histogram(labels, lists, 6), np.full((9, 6), 10))  # 90 / 9 clients


def test_kclass_equal_draws_different_classes_for_different_seeds():
    labels = balanced(10, 100)
    first, other = (histogram(labels, KClassEqual(k=2).assign(labels, 10, 20, generator(s)), 10) > 0 for s in (1, 2))
    assert not np.array_equal(first, other)


def test_kclass_equal_divides_test_data_by_the_classes_of_the_training_data():
    train, test = balanced(10, 5000), balanced(10, 1000)
    mine, tests = KClassEqual(k=2).assign_both(train, test, 10, 100, generator())
    assert_each_used_once(mine, 50_000)
    assert_each_used_once(tests, 10_000)
    np.testing.assert_array_equal(histogram(train, mine, 10) > 0, histogram(test, tests, 10) > 0)
    assert set(sizes(mine)) == {500}
    assert set(sizes(tests)) == {100}


# -- pathological (3.2)


def test_pathological_gives_blocks_of_clients_the_same_two_classes():
    labels = balanced(10, 7000)
    lists = Pathological(k=2).assign(labels, 10, 20, generator())
    assert_each_used_once(lists, 70_000)
    for i, counts in enumerate(histogram(labels, lists, 10)):
        block = i // 4  # clients 0-3 hold classes 0, 1; clients 4-7 hold 2, 3; ...
        assert np.flatnonzero(counts).tolist() == [2 * block, 2 * block + 1]


def test_pathological_sizes_lie_in_the_specified_interval_and_the_last_takes_the_rest():
    labels = balanced(10, 7000)
    counts = histogram(labels, Pathological(k=2).assign(labels, 10, 20, generator()), 10)
    for c in range(10):
        *drawn, rest = counts[counts[:, c] > 0, c]
        # four holders: num_per = 1750; least = 10/0.25 = 40; interval [max(175, 40/10), 1750)
        assert len(drawn) == 3
        assert 175 <= min(drawn) <= max(drawn) < 1750
        assert rest == 7000 - sum(drawn)
    assert len(np.unique(counts[counts > 0])) > 20  # sizes are drawn, not equal


def test_pathological_gives_consecutive_ranges_of_a_class_in_client_order():
    labels = balanced(4, 100)
    lists = Pathological(k=2).assign(labels, 4, 4, generator())
    for c in range(4):
        dealt = np.concatenate([rows[labels[rows] == c] for rows in lists])
        np.testing.assert_array_equal(dealt, np.flatnonzero(labels == c))


@pytest.mark.parametrize("seed", range(5))
def test_pathological_never_draws_an_empty_share(seed):
    # 200 clients x 2 / 10 classes = 40 holders of 100 samples: num_per = 2.5, least = min(40, 1000/200/2) = 2.5,
    # interval [max(0.25, 0.25), 2.5): the whole numbers in it are 1 and 2
    labels = balanced(10, 100)
    counts = histogram(labels, Pathological(k=2).assign(labels, 10, 200, generator(seed)), 10)
    assert ((counts > 0).sum(1) == 2).all()
    for c in range(10):
        drawn = counts[counts[:, c] > 0, c][:-1]
        assert set(drawn) == {1, 2}


def test_pathological_counts_holders_exactly_where_floats_would_round_up():
    # 14 clients x 50 / 100 classes = 7 holders; 14 / 100 * 50 in floating point is 7.000000000000001
    labels = balanced(100, 70)
    counts = histogram(labels, Pathological(k=50).assign(labels, 100, 14, generator()), 100)
    assert set((counts > 0).sum(0)) == {7}
    assert set((counts > 0).sum(1)) == {50}


def test_pathological_leaves_late_clients_with_fewer_classes_when_slots_do_not_divide():
    # 5 clients x 2 / 3 classes: ceil(10/3) = 4 holders; classes 0 and 1 fill clients 0-3, client 4 has class 2 alone
    labels = balanced(3, 300)
    counts = histogram(labels, Pathological(k=2).assign(labels, 3, 5, generator()), 3)
    assert (counts > 0).tolist() == [[True, True, False]] * 4 + [[False, False, True]]
    assert counts[4].tolist() == [0, 0, 300]


# -- dirichlet_class (3.3)


@pytest.mark.parametrize("beta", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("min_size", [10, 40])
def test_dirichlet_class_uses_each_sample_once_and_gives_everyone_min_size(beta, min_size):
    labels = balanced(10, 1000)
    lists = DirichletClass(beta=beta, min_size=min_size).assign(labels, 10, 20, generator())
    assert_each_used_once(lists, 10_000)
    assert sizes(lists).min() >= min_size


def test_dirichlet_class_asks_for_half_an_equal_share_where_min_size_is_more():
    # 1000 samples, 20 clients: half an equal share is 25, less than 40; with beta this small nobody gets it by luck,
    # so the smallest client has it exactly
    labels = balanced(10, 100)
    lists = DirichletClass(beta=0.01, min_size=40).assign(labels, 10, 20, generator())
    assert sizes(lists).min() == 25


def test_dirichlet_class_is_less_skewed_for_larger_beta():
    labels = balanced(10, 600)

    def skew(beta):
        scheme = DirichletClass(beta=beta, min_size=10)
        return np.mean([total_variation(labels, scheme.assign(labels, 10, 20, generator(s)), 10) for s in range(3)])

    skews = [skew(beta) for beta in (0.05, 0.2, 1.0, 5.0, 100.0)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.6  # nearly one class per client
    assert skews[-1] < 0.1  # nearly the distribution of all samples


def test_dirichlet_class_gives_nothing_more_to_a_client_that_has_an_equal_share():
    labels = balanced(10, 400)
    counts = histogram(labels, DirichletClass(beta=0.3, min_size=10).assign(labels, 10, 10, generator()), 10)
    assert counts.sum(1).max() > 400  # otherwise nobody was ever full
    for mine in counts:
        last = np.flatnonzero(mine).max()  # classes are dealt in ascending order
        assert mine[:last].sum() < 400  # n_total / N


@pytest.mark.parametrize("seed", range(8))
def test_dirichlet_class_passes_on_a_class_whose_whole_draw_fell_on_a_full_client(seed):
    # beta is so small that every class falls to one of two clients whole. Two of the four classes of 100 fill a client
    # (n_total / N = 200), and whatever is drawn for it afterwards must go to the other one.
    lists = DirichletClass(beta=1e-6).assign(balanced(4, 100), 4, 2, generator(seed))
    assert sizes(lists).tolist() == [200, 200]
    assert_each_used_once(lists, 400)


@pytest.mark.parametrize("clients", [1, 2])
def test_dirichlet_class_takes_classes_without_samples_when_everyone_is_full(clients):
    # classes 2 and 3 of 4 are empty; warnings, such as of 0/0, are errors in these tests
    lists = DirichletClass(beta=1e-6).assign(balanced(2, 50), 4, clients, generator())
    assert sizes(lists).tolist() == [100 // clients] * clients


def test_dirichlet_class_repairs_a_draw_that_cannot_succeed(caplog):
    # One class and beta near 0: one of four clients has all 40 samples. least = min(40, 40/4/2) = 5, so the three
    # others get 5 each and 15 samples move.
    with caplog.at_level(logging.INFO, logger="fedloom"):
        lists = DirichletClass(beta=1e-6).assign(np.zeros(40, dtype=np.int64), 1, 4, generator())
    assert sorted(sizes(lists)) == [5, 5, 5, 25]
    assert_each_used_once(lists, 40)
    assert any("15 samples moved" in record.message for record in caplog.records)


def test_dirichlet_class_repairs_many_clients_and_few_classes():
    # every class falls to one client whole, so at most four of 200 have anything before the repair;
    # least = min(40, 10000/200/2) = 25
    lists = DirichletClass(beta=1e-6).assign(balanced(4, 2500), 4, 200, generator())
    assert np.sort(sizes(lists))[:196].tolist() == [25] * 196
    assert_each_used_once(lists, 10_000)


def test_dirichlet_class_takes_repairs_from_whoever_has_most():
    # Four classes of 100 fall to four of 40 clients; least = min(40, 400/40/2) = 5, so 36 * 5 = 180 samples move.
    # Taking each from the largest keeps the four level: (400 - 180) / 4 = 55.
    lists = DirichletClass(beta=1e-6).assign(balanced(4, 100), 4, 40, generator())
    assert sorted(sizes(lists)) == [5] * 36 + [55] * 4


# -- dirichlet_client_lognormal (3.4)


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5, 3.0])
def test_lognormal_sizes_add_up_and_each_sample_is_used_once(sigma):
    lists = DirichletClientLognormal(sigma=sigma).assign(balanced(10, 500), 10, 30, generator())
    assert len(lists) == 30
    assert_each_used_once(lists, 5000)


def test_lognormal_shortfall_of_rounding_goes_to_client_0():
    # sizes are nearly equal: floor(100/7) = 14, and client 0 gets 100 - 7*14 = 2 more
    lists = DirichletClientLognormal(sigma=1e-3).assign(balanced(10, 10), 10, 7, generator())
    assert sizes(lists).tolist() == [16, 14, 14, 14, 14, 14, 14]


@pytest.mark.parametrize("sigma", [0.1, 0.5])
def test_lognormal_sizes_have_the_standard_deviation_asked_for(sigma):
    lists = DirichletClientLognormal(sigma=sigma).assign(balanced(10, 4000), 10, 200, generator())
    # standard error of a standard deviation from 200 draws: sigma / sqrt(400) = 5 %; bound at four of them
    assert np.log(sizes(lists)).std() == pytest.approx(sigma, rel=0.2)


def test_a_lognormal_sigma_that_overflows_is_refused():
    with user_error("sigma", "at most 10"):
        build(DirichletClientLognormal, {"sigma": 1000}, "partition")  # exp(1000) is not a number of samples
    lists = build(DirichletClientLognormal, {"sigma": 10}, "partition").assign(balanced(10, 500), 10, 30, generator())
    assert_each_used_once(lists, 5000)


def test_lognormal_clients_are_less_skewed_for_larger_delta():
    labels = balanced(10, 600)
    skews = [
        total_variation(labels, DirichletClientLognormal(delta=delta).assign(labels, 10, 20, generator()), 10)
        for delta in (0.05, 0.3, 3.0, 100.0)
    ]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.5
    assert skews[-1] < 0.1


# -- kclass_ratio (3.5)


def test_kclass_ratio_gives_50_clients_about_1100_samples_of_60000():
    labels = balanced(10, 6000)
    lists = KClassRatio(k=2).assign(labels, 10, 50, generator())
    assert ((histogram(labels, lists, 10) > 0).sum(1) == 2).all()
    # 11 ratios per class that add up to 1, of which 100 of 110 are used: 60000 * 100/110 / 50 = 1091 on average
    assert sizes(lists).mean() == pytest.approx(1091, abs=15)
    # a ratio is least when it is 0.4 among ten of 0.6, 0.0625, and greatest when 0.6 among ten of 0.4, 0.1304
    counts = histogram(labels, lists, 10)
    assert counts[counts > 0].min() >= math.floor(0.0625 * 6000)
    assert counts[counts > 0].max() <= 0.1305 * 6000


@pytest.mark.parametrize("k", [1, 3, 10])
def test_kclass_ratio_gives_exactly_k_classes(k):
    labels = balanced(10, 600)
    lists = KClassRatio(k=k).assign(labels, 10, 15, generator())
    assert ((histogram(labels, lists, 10) > 0).sum(1) == k).all()


def test_kclass_ratio_with_equal_low_and_high_gives_equal_shares_rounded_down():
    # floor(2*10/4) + 1 = 6 slots per class, every ratio 1/6: floor(100/6) = 16 samples
    labels = balanced(4, 100)
    counts = histogram(labels, KClassRatio(k=2, low=0.5, high=0.5).assign(labels, 4, 10, generator()), 4)
    assert set(counts[counts > 0]) == {16}
    assert (counts > 0).sum(0).tolist() == [5, 5, 5, 5]  # most free slots first keeps classes level
