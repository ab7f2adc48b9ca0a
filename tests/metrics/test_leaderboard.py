"""The numbers of a leaderboard, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from fedloom.metrics.leaderboard import METRICS, RoundScores, RunScores, leaderboard

NAN = float("nan")


def round_scores(acc, t=1, clients=None, **metrics):
    """A model view in round t whose clients 0, 1, ... have these accuracies."""
    ids = np.arange(len(acc)) if clients is None else np.array(clients)
    values = {**dict.fromkeys(METRICS, 0.0), "acc_mean": float(np.nanmean(acc)), **metrics}
    return RoundScores(t, values, ids, np.array(acc, dtype=float))


def run_scores(label, seed, acc, last=None, views=None, costs=(0.0, 0.0, 0.0, 0.0), trend=0.0, **how):
    """A run with these accuracies in the selected round, and others in the last one where it says so."""
    pre = {"validation": round_scores(acc, **how), "last": round_scores(acc if last is None else last, **how)}
    views = {"pre": pre, **(views or {})}
    return RunScores(label, seed, views, dict.fromkeys(views, trend), *costs)


def row(runs, method, model="pre", selection="validation"):
    """The one row of a method."""
    (found,) = [r for r in leaderboard(runs) if (r["method"], r["model"], r["selection"]) == (method, model, selection)]
    return found


def test_mean_and_standard_deviation_are_over_seeds():
    """60, 66, 72: mean 66, deviations -6, 0, 6, variance (36 + 0 + 36) / (3 - 1) = 36, standard deviation 6."""
    found = row([run_scores("fedavg", seed, [acc]) for seed, acc in enumerate((60, 66, 72))], "fedavg")
    assert found["seeds"] == 3
    assert found["acc_mean"] == pytest.approx(66, rel=1e-12)
    assert found["acc_mean_std"] == pytest.approx(6, rel=1e-12)


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_has_its_mean_and_standard_deviation(metric):
    """10 and 14: mean 12, deviations -2 and 2, variance (4 + 4) / (2 - 1) = 8."""
    runs = [run_scores("fedavg", seed, [50], **{metric: value}) for seed, value in enumerate((10.0, 14.0))]
    found = row(runs, "fedavg")
    assert found[metric] == pytest.approx(12, rel=1e-12)
    assert found[f"{metric}_std"] == pytest.approx(math.sqrt(8), rel=1e-12)


def test_metrics_of_unseen_clients_are_averaged_over_seeds_and_absent_where_there_are_none():
    """20 and 30: mean 25, variance (25 + 25) / (2 - 1) = 50. Held-out clients have no PM_pre, and no gain."""
    runs = [run_scores("local", 0, [50, 60, NAN]), run_scores("local", 1, [50, 60, NAN])]
    runs += [run_scores("fedavg", 0, [49, 63, NAN]), run_scores("fedavg", 1, [49, 63, NAN])]
    for run, gap in zip(runs[2:], (20.0, 30.0), strict=True):
        views = run.views["pre"]
        views |= {name: one._replace(unseen={"new_gap": gap}) for name, one in views.items()}
    found = row(runs, "fedavg")
    assert found["new_gap"] == pytest.approx(25, rel=1e-12)
    assert found["new_gap_std"] == pytest.approx(math.sqrt(50), rel=1e-12)
    assert (found["gain"], found["harmed"]) == (1.0, 50.0)
    assert "new_gap" not in row(runs, "local")


def test_one_seed_has_no_standard_deviation():
    found = row([run_scores("local", 5, [40, 60]), run_scores("fedavg", 5, [50, 70])], "fedavg")
    assert found["acc_mean"] == 60
    deviations = {name: value for name, value in found.items() if name.endswith("_std") and name != "client_acc_std"}
    assert set(deviations) == {f"{name}_std" for name in (*METRICS, "gain", "harmed", "trend", "round")}
    assert set(deviations.values()) == {None}


def test_the_standard_deviation_of_undefined_numbers_is_none():
    """The variation of a run in which nothing is correct is not a number, and neither is its standard deviation."""
    runs = [run_scores("fedavg", seed, [0], **{"client_acc_cv_x1e-2": NAN}) for seed in (0, 1)]
    assert row(runs, "fedavg")["client_acc_cv_x1e-2_std"] is None


# Seed 0: Local has 50, 60, 70, the method 60, 60, 40; the changes are 10, 0, -30.
# Seed 1: Local has 40, 80, 90, the method 70, 79, 89; the changes are 30, -1, -1.
PAIRED = [
    run_scores("local", 1, [40, 80, 90]),  # in another order than the method's: runs are paired by seed
    run_scores("local", 0, [50, 60, 70]),
    run_scores("fedrep", 0, [60, 60, 40]),
    run_scores("fedrep", 1, [70, 79, 89]),
]


def test_gain_is_the_mean_change_of_a_client_against_the_same_client_with_local():
    """Per seed (10 + 0 - 30) / 3 = -20/3 and (30 - 1 - 1) / 3 = 28/3: mean 4/3, and they are 16 apart, so each is 8
    from their mean and the standard deviation is sqrt(8^2 + 8^2)."""
    found = row(PAIRED, "fedrep")
    assert found["gain"] == pytest.approx(4 / 3, rel=1e-12)
    assert found["gain_std"] == pytest.approx(math.sqrt(128), rel=1e-12)


def test_harmed_is_the_share_of_clients_below_their_own_local():
    """Per seed 1 of 3 (the change of 0 is no harm) and 2 of 3: mean 50 %, standard deviation sqrt(2 (50/3)^2)."""
    found = row(PAIRED, "fedrep")
    assert found["harmed"] == pytest.approx(50, rel=1e-12)
    assert found["harmed_std"] == pytest.approx(math.sqrt(2) * 50 / 3, rel=1e-12)


def test_a_tie_is_neither_gain_nor_harm():
    runs = [run_scores("local", 0, [50, 60]), run_scores("fedavg", 0, [50, 60])]
    for method in ("fedavg", "local"):  # Local ties with itself
        assert (row(runs, method)["gain"], row(runs, method)["harmed"]) == (0, 0)


def test_harm_is_of_clients_not_of_means():
    """Changes of 40, -10, -10, -10: the mean rises by 2.5 although three of four lose."""
    runs = [run_scores("local", 0, [50, 50, 50, 50]), run_scores("fedavg", 0, [90, 40, 40, 40])]
    assert (row(runs, "fedavg")["gain"], row(runs, "fedavg")["harmed"]) == (2.5, 75)


def test_clients_without_test_samples_are_left_out():
    """Clients 1 and 3 have no accuracy with one method or both: of the changes 10 and -4 the mean is 3, half are
    harm. Were they counted as unharmed it would be a quarter."""
    runs = [run_scores("local", 0, [50, NAN, 70, 20]), run_scores("fedavg", 0, [60, NAN, 66, NAN])]
    found = row(runs, "fedavg")
    assert (found["gain"], found["harmed"]) == (3, 50)


def test_other_clients_than_locals_give_no_gain():
    runs = [run_scores("local", 0, [50, 60], clients=[0, 1]), run_scores("fedavg", 0, [70, 80], clients=[0, 2])]
    found = row(runs, "fedavg")
    assert not {"gain", "gain_std", "harmed", "harmed_std"} & set(found)
    assert found["acc_mean"] == 75


def test_fewer_clients_than_locals_give_no_gain():
    runs = [run_scores("local", 0, [50, 60, 70]), run_scores("fedavg", 0, [70, 80])]
    assert "gain" not in row(runs, "fedavg")


def test_without_local_there_is_no_gain():
    assert "gain" not in row([run_scores("fedavg", 0, [70, 80])], "fedavg")


def test_a_seed_without_its_local_does_not_count_for_the_gain():
    """Only seed 0 can be paired: changes 10 and 20, and no standard deviation of one number."""
    runs = [run_scores("local", 0, [50, 60]), run_scores("fedavg", 0, [60, 80]), run_scores("fedavg", 1, [0, 0])]
    found = row(runs, "fedavg")
    assert (found["gain"], found["gain_std"], found["harmed"]) == (15, None, 0)
    assert found["seeds"] == 2


def test_a_selection_is_measured_against_locals_own():
    """At the validation rounds 60 - 50 = 10; in the last rounds 61 - 70 = -9."""
    runs = [run_scores("local", 0, [50], last=[70]), run_scores("fedavg", 0, [60], last=[61])]
    assert [row(runs, "fedavg", selection=s)["gain"] for s in ("validation", "last")] == [10, -9]
    assert [row(runs, "fedavg", selection=s)["acc_mean"] for s in ("validation", "last")] == [60, 61]


def test_every_view_is_measured_against_the_models_that_local_has():
    """A global model with 45 and 65 where Local's models have 50 and 60 before training: changes -5 and 5."""
    views = {"global": {name: round_scores([45, 65]) for name in ("validation", "last")}}
    trained = {"post": {name: round_scores([7, 8]) for name in ("validation", "last")}}
    runs = [run_scores("local", 0, [50, 60], views=trained), run_scores("fedavg", 0, [80, 90], views=views)]
    found = row(runs, "fedavg", "global")
    assert (found["acc_mean"], found["gain"], found["harmed"]) == (55, 0, 50)
    assert row(runs, "fedavg")["gain"] == 30


def test_there_is_a_row_per_method_view_and_selection():
    views = {"global": {name: round_scores([45]) for name in ("validation", "last")}}
    models = {"local": {}, "fedavg": views}
    runs = [run_scores(label, seed, [50], views=more) for seed in (0, 1) for label, more in models.items()]
    found = sorted((r["method"], r["model"], r["selection"]) for r in leaderboard(runs))
    assert found == [
        ("fedavg", "global", "last"),
        ("fedavg", "global", "validation"),
        ("fedavg", "pre", "last"),
        ("fedavg", "pre", "validation"),
        ("local", "pre", "last"),
        ("local", "pre", "validation"),
    ]


def test_the_best_mean_over_seeds_is_first():
    """Means 55, 60 and 50, although the third method has the best single run."""
    runs = [
        *(run_scores("a", seed, [acc]) for seed, acc in enumerate((54, 56))),
        *(run_scores("b", seed, [acc]) for seed, acc in enumerate((60, 60))),
        *(run_scores("c", seed, [acc]) for seed, acc in enumerate((90, 10))),
    ]
    assert [r["method"] for r in leaderboard(runs) if r["selection"] == "validation"] == ["b", "a", "c"]


def test_rounds_and_costs_are_averaged_over_seeds():
    runs = [
        run_scores("fedavg", 0, [50], t=10, costs=(100.0, 10.0, 1.0, 0.5)),
        run_scores("fedavg", 1, [50], t=14, costs=(300.0, 20.0, 2.0, 1.5)),
    ]
    found = row(runs, "fedavg")
    assert (found["round"], found["round_std"]) == (12, pytest.approx(math.sqrt(8)))
    assert [found[name] for name in ("bytes_down", "bytes_up", "train_seconds", "eval_seconds")] == [200, 15, 1.5, 1]


def test_trends_are_averaged_over_seeds():
    found = row([run_scores("fedavg", seed, [50], trend=t) for seed, t in enumerate((0.5, -0.1))], "fedavg")
    assert found["trend"] == pytest.approx(0.2)
    assert "trend" not in row([run_scores("fedavg", 0, [50], trend=NAN)], "fedavg")


def test_without_runs_the_board_is_empty():
    assert leaderboard([]) == []
