"""Curves draw the records: means over seeds, smoothing, the order of values and costs are computed by hand here."""

import numpy as np
import pyarrow as pa
import pytest
from sentences import user_error

from fedloom.plots import convergence, hypernetwork_costs, rewards, sweep
from fedloom.studies.sweep import Sweep


def lines(axes):
    """The drawn lines by their labels."""
    return {line.get_label(): tuple(map(list, line.get_data())) for line in axes.lines}


# -- scores by round


def test_a_line_is_the_mean_over_seeds_and_the_band_one_standard_deviation(made, axes):
    """50 and 54 are 52 on average; with two values the standard deviation (ddof 1) is their distance by sqrt 2."""
    runs = {"ditto": [made(scores=(50, 60, 70)), made(seed=1, scores=(54, 60, 64))]}
    convergence(axes, runs, smooth=1)
    assert lines(axes)["ditto"] == ([1, 2, 3], [52, 60, 67])
    band = axes.collections[0].get_paths()[0].vertices
    low = {x: min(y for at, y in band if at == x) for x in (1, 2, 3)}
    high = {x: max(y for at, y in band if at == x) for x in (1, 2, 3)}
    std = {1: 4 / np.sqrt(2), 2: 0.0, 3: 6 / np.sqrt(2)}
    for x, mean in zip((1, 2, 3), (52, 60, 67), strict=True):
        assert (low[x], high[x]) == pytest.approx((mean - std[x], mean + std[x]))


def test_smoothing_is_a_trailing_mean_of_evaluated_rounds(made, axes):
    """Rounds 5, 10, 15, 20 were evaluated; with smooth=2: 40, (40+50)/2, (50+90)/2, (90+30)/2."""
    convergence(axes, {"ditto": [made(scores={5: 40.0, 10: 50.0, 15: 90.0, 20: 30.0})]}, smooth=2)
    assert lines(axes)["ditto"] == ([5, 10, 15, 20], [40, 45, 70, 60])
    assert not axes.collections  # one seed has no band


def test_only_rounds_that_all_seeds_have_are_drawn(made, axes):
    runs = {"ditto": [made(scores={1: 10.0, 2: 20.0, 4: 40.0}), made(seed=1, scores={2: 30.0, 3: 0.0, 4: 50.0})]}
    convergence(axes, runs, smooth=1)
    assert lines(axes)["ditto"] == ([2, 4], [25, 45])
    with user_error("ditto", "no evaluated round in common"):
        convergence(axes, {"ditto": [made(scores={1: 1.0}), made(seed=1, scores={2: 1.0})]})


def test_methods_without_the_model_of_a_view_are_left_out(made, axes):
    runs = {"fedavg": [made("fedavg", view="global", scores=(1.0, 3.0))], "fedrep": [made("fedrep")]}
    convergence(axes, runs, view="global", smooth=1)
    assert lines(axes) == {"fedavg": ([1, 2], [1, 3])}
    assert axes.get_ylabel() == "accuracy of the global model (%)"
    assert axes.get_legend() is None
    with user_error("None of these methods", "after local training"):
        convergence(axes, runs, view="post")


def test_several_methods_have_a_legend_in_their_order(made, axes):
    convergence(axes, {name: [made(name)] for name in ("local", "ditto")})
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["local", "ditto"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "accuracy of personal models (%)")


def test_the_metric_of_the_run_is_drawn(made, axes):
    convergence(axes, made(metric="rmse", scores=(3.0, 2.0)), smooth=1)
    assert lines(axes)["ditto"] == ([1, 2], [3, 2])
    assert axes.get_ylabel() == "rmse of personal models"


def test_smooth_below_one_is_refused(made, axes):
    with user_error("smooth must be at least 1, not 0"):
        convergence(axes, made(), smooth=0)


# -- sweeps


def table(grid, rows, metric="accuracy"):
    """A sweep whose rows have (values of settings, validation, test, standard deviation of test)."""
    names = [item.partition("=")[0] for item in grid]
    name = {"accuracy": "acc"}.get(metric, metric)
    found = [
        dict(zip(names, values, strict=True))
        | {f"val_{name}_mean": val, f"{name}_mean": test, f"{name}_mean_std": std, f"val_{name}_mean_std": 0.5}
        for values, val, test, std in rows
    ]
    return Sweep({"grid": grid, "metric": metric}, found)


def test_values_of_a_setting_stand_in_their_order_not_in_that_of_the_ranks(axes):
    found = table(["lr=0.1,0.3,0.2"], [((0.2,), 9.0, 8.0, 1.0), ((0.3,), 7.0, 6.0, 2.0), ((0.1,), 5.0, 4.0, 3.0)])
    sweep(axes, found)
    test = {bars.get_label(): bars for bars in axes.containers}["test"]
    assert [list(values) for values in test.lines[0].get_data()] == [[0.1, 0.2, 0.3], [4, 8, 6]]
    spans = [segment[:, 1].tolist() for segment in test.lines[2][0].get_segments()]
    assert spans == [[1, 7], [7, 9], [4, 8]]  # mean -+ standard deviation
    validation = {bars.get_label(): bars for bars in axes.containers}["validation"]
    assert list(validation.lines[0].get_data()[1]) == [5, 9, 7]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("lr", "accuracy of personal models (%)")
    assert axes.get_xscale() == "linear"


def test_wide_ranges_are_logarithmic_and_with_a_zero_side_by_side(axes):
    rows = [((value,), 1.0, value, 0.0) for value in (1.0, 0.01, 0.1)]
    sweep(axes, table(["mu=0.01,0.1,1"], rows))
    assert axes.get_xscale() == "log"
    assert list(axes.containers[1].lines[0].get_data()[1]) == [0.01, 0.1, 1]


def test_a_zero_in_a_wide_range_stands_first(axes):
    rows = [((value,), 1.0, value, 0.0) for value in (1.0, 0, 0.01)]
    sweep(axes, table(["mu=0,0.01,1"], rows))
    assert axes.get_xscale() == "linear"
    assert [list(values) for values in axes.containers[1].lines[0].get_data()] == [[0, 1, 2], [0, 0.01, 1]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "0.01", "1.0"]


def test_words_stand_side_by_side(axes):
    sweep(axes, table(["scale=sum1,mean1"], [(("sum1",), 1.0, 5.0, 0.0), (("mean1",), 1.0, 7.0, 0.0)]))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["mean1", "sum1"]
    assert list(axes.containers[1].lines[0].get_data()[1]) == [7, 5]


def test_a_second_setting_has_a_line_per_value_with_test_scores(axes):
    rows = [((lr, mu), 0.0, 10 * lr + mu, 0.0) for lr in (3, 1, 2) for mu in (5, 6)]
    sweep(axes, table(["lr=3,1,2", "mu=5,6"], rows))
    found = {bars.get_label(): list(bars.lines[0].get_data()[1]) for bars in axes.containers}
    assert found == {"mu=5": [15, 25, 35], "mu=6": [16, 26, 36]}
    assert axes.get_xlabel() == "lr"  # the setting with the most values


def test_the_axis_of_a_sweep_can_be_chosen(axes):
    rows = [((lr, mu), 0.0, 10 * lr + mu, 0.0) for lr in (1, 2, 3) for mu in (5, 6)]
    found = table(["lr=1,2,3", "mu=5,6"], rows)
    sweep(axes, found, setting="mu")
    assert {bars.get_label(): list(bars.lines[0].get_data()[1]) for bars in axes.containers}["lr=2"] == [25, 26]
    with user_error("'mue'", "did you mean 'mu'?"):
        sweep(axes, found, setting="mue")


def test_too_many_lines_are_refused(axes):
    rows = [((lr, mu), 0.0, 1.0, 0.0) for lr in range(10) for mu in range(9)]
    with user_error("9 lines", "of mu"):
        sweep(axes, table(["lr=0,1,2,3,4,5,6,7,8,9", "mu=0,1,2,3,4,5,6,7,8"], rows))


# -- rewards


@pytest.fixture
def page(made):
    """Two rounds of PAGE: of clients 0 and 1, and of the server, which is client -1."""
    reports = pa.table(
        {
            "round": [1, 1, 1, 2, 2, 2],
            "client": [0, 1, -1, 0, 1, -1],
            "reward": [2.0, 4.0, None, 5.0, 8.0, None],
            "reward_CS": [None, None, -0.5, None, None, 0.25],
        }
    )
    columns = {t: {"acc_global": 70.0 + t, "global_acc_mean": 1.0, "global_loss": 1.0} for t in (1, 2)}
    return made("page", view="post", scores=(80.0, 90.0), reports=reports, columns=columns)


def drawn(axes):
    """The line of accuracy, and that of rewards on the other axis."""
    (other,) = [twin for twin in axes.figure.axes if twin is not axes]
    return [[list(values) for values in each.lines[0].get_data()] for each in (axes, other)], other


def test_the_server_is_rewarded_for_accuracy_on_its_own_samples(page, axes):
    rewards(axes, page)
    found, other = drawn(axes)
    assert found == [[[1, 2], [71, 72]], [[1, 2], [-0.5, 0.25]]]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("accuracy of the global model (%)", "round")
    assert other.get_ylabel() == "reward of the server (dotted)"
    assert other.lines[0].get_linestyle() == ":"


def test_the_reward_of_clients_is_their_mean(page, axes):
    rewards(axes, page, side="clients")
    found, other = drawn(axes)
    assert found == [[[1, 2], [80, 90]], [[1, 2], [3, 6.5]]]
    assert axes.get_ylabel() == "accuracy after local training (%)"
    assert other.get_ylabel() == "mean reward of clients (dotted)"


def test_a_run_without_rewards_says_so(made, page, axes):
    with user_error("ditto has no rewards", "page"):
        rewards(axes, made())
    with user_error("server or clients", "'sever'"):
        rewards(axes, page, side="sever")


# -- costs of hypernetworks


def test_costs_are_those_of_the_paper(axes):
    """pFedKT, Fig. 9 (a), for the CNN of 1,706,458 parameters. With 400 outputs a call costs 2 (13 x 100 + 100 x 100 +
    100 x 400) = 102,600 operations (Table 12), and it takes 1,706,458 / 400 calls, rounded up: 4267; all in one call
    costs 2 (13 x 100 + 100 x 100 + 100 x 1,706,458). The paper prints 1.28."""
    hypernetwork_costs(axes, 1_706_458, outputs=[400, 1_706_458])
    x, y = axes.lines[0].get_data()
    assert list(x) == [400, 1_706_458]
    assert y[0] == pytest.approx(4267 * 102_600 / (2 * (1300 + 10_000 + 170_645_800)))
    assert y[0] == pytest.approx(1.28, abs=0.005)
    assert y[1] == 1
    assert (axes.get_xlabel(), axes.get_xscale()) == ("outputs of the small hypernetwork", "log")
    assert axes.get_ylabel() == "FLOPs, small over large"


def test_costs_of_nothing_are_refused(axes):
    for parameters, outputs in ((0, [1]), (5, []), (5, [0])):
        with user_error("at least 1"):
            hypernetwork_costs(axes, parameters, outputs=outputs)
