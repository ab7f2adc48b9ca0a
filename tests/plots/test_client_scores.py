"""Histograms and strips draw the scores of clients; shares and means are computed by hand."""

import numpy as np
import pytest
from sentences import user_error

from fedloom.plots import clients, distribution


def bars(axes):
    """Left edge -> height of the bars that are not empty."""
    return {bar.get_x(): bar.get_height() for bar in axes.patches if bar.get_height()}


def texts(axes):
    return axes.texts[0].get_text().splitlines()


# -- histograms


def test_bins_are_one_point_wide_and_shares_are_of_clients_below(made, axes):
    """Of 63.9, 64, 70, 70.5, 75: below 64 one (64 itself is not), below 69 two, below 72 and 75 four."""
    distribution(axes, made(of_clients=(63.9, 64.0, 70.0, 70.5, 75.0)))
    assert bars(axes) == {63: 1, 64: 1, 70: 2, 75: 1}
    assert {bar.get_width() for bar in axes.patches} == {1}
    assert texts(axes) == ["below 64: 20.0 %", "below 69: 40.0 %", "below 72: 80.0 %", "below 75: 80.0 %"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("accuracy of personal models (%)", "clients")
    assert [line.get_xdata()[0] for line in axes.lines] == [64, 69, 72, 75]


def test_heights_are_means_over_seeds_and_shares_are_of_all(made, axes):
    """Two clients, two seeds: 50.2 and 50.9 are in one bin, which has one client per seed."""
    runs = {"ditto": [made(of_clients=(50.2, 80.0)), made(seed=1, of_clients=(50.9, 50.5))]}
    distribution(axes, runs, below=[60])
    assert bars(axes) == {50: 1.5, 80: 0.5}
    assert texts(axes) == ["below 60: 75.0 %"]


def test_100_percent_is_in_the_bin_from_99(made, axes):
    distribution(axes, made(of_clients=(100.0, 100.0, 99.5)), below=())
    assert bars(axes) == {99: 3}
    assert not axes.texts


def test_scores_that_are_not_in_percent_have_30_bins_and_no_thresholds(made, axes):
    distribution(axes, made(metric="rmse", scores=(0.1, 0.2), of_clients=(0.0, 0.5, 3.0)))
    assert len(axes.patches) == 30
    assert list(bars(axes)) == pytest.approx([0, 0.5, 2.9])  # bins are 0.1 wide
    assert not axes.texts
    assert axes.get_xlabel() == "rmse of personal models"


def test_only_the_round_that_is_best_on_validation_data_counts(made, axes):
    import pyarrow as pa

    result = made(of_clients=(10.0,))
    later = pa.table({"round": [2], "client": [0], "pre_acc": [90.0]})
    result.clients = pa.concat_tables([result.clients, later])
    distribution(axes, result)
    assert bars(axes) == {10: 1}


def test_scores_that_are_missing_are_left_out(made, axes):
    distribution(axes, made(of_clients=(10.0, None, float("nan"))))
    assert bars(axes) == {10: 1}
    with user_error("no scores of clients to draw"):
        distribution(axes, made(of_clients=(None,)))


def test_a_histogram_is_of_one_method(made, axes):
    with user_error("of one method, not of fedrep, ditto"):
        distribution(axes, {name: [made(name, of_clients=(1.0,))] for name in ("fedrep", "ditto")})


def test_a_run_without_scores_of_clients_in_its_metric_says_so(made, axes):
    result = made(of_clients=(1.0,))
    result.clients = result.clients.rename_columns(["round", "client", "pre_other"])
    with user_error("no scores of clients in accuracy", "(pre)"):
        distribution(axes, result)


# -- strips


def strip(axes):
    return np.asarray(axes.images[0].get_array().filled(np.nan))


def test_clients_are_sorted_by_their_means_over_methods_and_seeds(made, axes):
    """Means over the seeds of a: 15, 60, 40; over both methods: 12.5, 35, 65. So the order is 2, 1, 0."""
    a = [made("a", of_clients=(10.0, 50.0, 40.0)), made("a", 1, of_clients=(20.0, 70.0, 40.0))]
    clients(axes, {"a": a, "b": [made("b", of_clients=(10.0, 10.0, 90.0))]})
    assert strip(axes).tolist() == [[40, 60, 15], [90, 10, 10]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "1", "0"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert axes.get_xlabel() == "client, the best served first"
    assert axes.figure.axes[1].get_xlabel() == "accuracy of personal models (%)"  # of the colour bar


def test_a_client_that_one_seed_has_not_evaluated_has_the_mean_of_the_others(made, axes):
    runs = [made(of_clients=(10.0, 50.0, None)), made(seed=1, of_clients=(float("nan"), 70.0, None))]
    clients(axes, {"ditto": runs})
    assert strip(axes).tolist() == [[60, 10]]  # client 2 has no score with any seed


def test_with_errors_the_lowest_is_best(made, axes):
    clients(axes, made(metric="rmse", scores=(0.1, 0.2), of_clients=(3.0, 1.0, 2.0)))
    assert strip(axes).tolist() == [[1, 2, 3]]
    assert axes.images[0].get_cmap().name == "cividis_r"


def test_many_clients_are_not_named(made, axes):
    clients(axes, made(of_clients=tuple(map(float, range(30)))))
    assert axes.get_xlabel() == "30 clients, the best served first"
