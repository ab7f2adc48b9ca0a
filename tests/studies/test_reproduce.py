"""A paper's table: its runs, its numbers beside the measured ones, what was not run, what differs from the paper."""

import csv

import numpy as np
import pytest
from helpers import run_cli
from sentences import user_error

import fedloom
from fedloom.papers.catalog import find_experiment
from fedloom.studies import reproduce as module
from fedloom.studies.protocols import measure, trailing_mean

SMALL = {"clients": 4, "rounds": 4, "batch_size": 50, "local_epochs": 1, "plan": "stacked-eager"}
FEW = {"algorithms": ["FedAvg", "PAGE (server only)", "FedRECON"], "tasks": ["synthetic"], "seeds": 2}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("page")
    return fedloom.reproduce("PAGE-T1", out=out, **FEW, **SMALL)


def by_cell(found):
    return {(row["method"], row["metric"]): row for row in found.rows}


def test_a_table_has_the_papers_numbers_beside_the_measured_ones(page):
    rows = by_cell(page)
    assert len(rows) == len(page.rows) == 13 * 2 + 2
    row = rows["FedAvg", "acc_local"]
    runs = [fedloom.load(page.folder / "synthetic" / "runs" / "fedavg" / f"seed-{seed}") for seed in (0, 1)]
    ours = [np.mean([r["post_acc_mean"] for r in run.rounds[: _settled(run)]]) for run in runs]
    assert (row["paper"], row["paper_std"], row["seeds"]) == (95.26, 1.26, 2)
    assert row["ours"] == pytest.approx(np.mean(ours))
    assert row["difference"] == pytest.approx(row["ours"] - 95.26)
    assert row["se"] == pytest.approx(np.std(ours, ddof=1) / np.sqrt(2))
    assert row["last"] == pytest.approx(np.mean([run.last()["post_acc_mean"] for run in runs]))
    best = [run.best_on_validation("post")["post_acc_mean"] for run in runs]
    assert row["validation"] == pytest.approx(np.mean(best))


def _settled(run):
    """FedAvg's convergence round, by the trailing means of its global model, of at most ten rounds."""
    values = [row["acc_global"] for row in run.rounds]
    means = [np.mean(values[max(0, t - 10) : t]) for t in range(1, len(values) + 1)]
    return next(t for t, mean in enumerate(means, 1) if mean >= max(means) - 0.1)


def test_what_was_not_run_and_what_differs_is_said(page):
    rows = by_cell(page)
    assert rows["SCAFFOLD", "acc_global"]["state"] == "not run"
    assert rows["SCAFFOLD", "acc_global"]["ours"] is None
    assert "4 of 1000 rounds" in rows["FedAvg", "acc_global"]["state"]
    assert "clients=4 (paper 100)" in rows["FedAvg", "acc_global"]["state"]
    assert "single layer" in rows["FedRECON", "acc_local"]["state"]  # it does not fit logistic regression
    ours = rows["PAGE (server only)", "acc_global"]
    assert ours["ours"] > 0
    assert ours["paper"] is ours["difference"] is None


def test_files(page):
    with (page.folder / "PAGE-T1.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["ours"]) == page.rows[0]["ours"]
    assert rows[2]["state"] == "not run"
    markdown = (page.folder / "PAGE-T1.md").read_text()
    assert "| FedAvg | acc_global | 91.46 ± 0.07 |" in markdown
    assert "| SCAFFOLD | acc_local | 95.71 ± 0.53 | not run |" in markdown
    assert markdown.count("4 of 1000 rounds") == 1
    latex = (page.folder / "PAGE-T1.tex").read_text()
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 1
    assert r"acc\_global" in latex


def test_runs_that_are_there_are_kept_and_others_are_added(page, monkeypatch):
    trained = []
    execute = module.execute_group

    def watched(configs, names, **more):
        trained.append(names)
        return execute(configs, names=names, **more)

    monkeypatch.setattr(module, "execute_group", watched)
    again = fedloom.reproduce("PAGE-T1", out=page.folder, **FEW, **SMALL)
    assert again.rows == page.rows
    assert trained == []
    more = fedloom.reproduce("PAGE-T1", out=page.folder, **{**FEW, "algorithms": ["fedprox"]}, **SMALL)
    assert [names[0] for names in trained] == ["synthetic fedprox"]
    assert by_cell(more)["FedProx", "acc_local"]["ours"] > 0
    assert by_cell(more)["FedAvg", "acc_local"]["ours"] == by_cell(page)["FedAvg", "acc_local"]["ours"]


def test_another_setting_in_the_same_folder_is_refused(page):
    with user_error("lr"):
        fedloom.reproduce("PAGE-T1", out=page.folder, **FEW, **{**SMALL, "lr": 0.01})


@pytest.fixture(scope="module")
def digits():
    return fedloom.run("ditto", rounds=12, clients=6, beta=0.3, plan="stacked-eager", seed=3)


@pytest.mark.parametrize(("metric", "view"), [("acc_mean", "post"), ("acc_low5", "pre"), ("acc_top5", "global")])
def test_plgus_numbers_are_of_the_round_with_the_best_mean(digits, metric, view):
    best = max(digits.rounds, key=lambda row: row[f"{view}_acc_mean"])
    found = measure(digits, metric, view)
    assert found.paper == best[f"{view}_{metric}"]
    assert found.validation == digits.best_on_validation(view)[f"{view}_{metric}"]
    assert found.last == digits.last()[f"{view}_{metric}"]


def test_gpfls_numbers_are_weighted_by_test_samples(digits):
    best = max(digits.rounds, key=lambda row: row["pre_acc_weighted"])
    assert measure(digits, "acc_best", None).paper == best["pre_acc_weighted"]
    std, cv = (measure(digits, name, None).paper for name in ("client_acc_std", "client_acc_cv_x1e-2"))
    assert std == best["pre_client_acc_std"]
    assert cv == pytest.approx(100 * std / best["pre_acc_weighted"])


def test_pfedkts_numbers_are_of_trained_models(digits):
    values = [row["post_acc_mean"] for row in digits.rounds]
    assert measure(digits, "best", None).paper == max(values)
    assert measure(digits, "last30", None).paper == pytest.approx(np.mean(values))  # the run is shorter


def test_shares_of_badly_served_clients(digits):
    best = max(digits.rounds, key=lambda row: row["post_acc_mean"])
    scores = [row["post_acc"] for row in digits.clients.to_pylist() if row["round"] == best["round"]]
    limit = sorted(scores)[2]
    digits_below = measure(digits, f"pct_clients_below_{limit + 1e-6}", "post").paper
    assert digits_below == pytest.approx(100 * sum(score <= limit for score in scores) / 6)


def test_a_method_without_a_global_model_has_no_such_number():
    assert measure(fedloom.run("local", rounds=1, clients=3), "acc_mean", "global") is None


def test_the_trailing_mean_is_over_ten_rounds_whatever_is_evaluated():
    rounds = [{"round": t, "x": float(t)} for t in range(2, 41, 2)]
    assert trailing_mean(rounds, "x", 40) == np.mean([32, 34, 36, 38, 40])
    assert trailing_mean(rounds, "x", 4) == 3


def test_every_table_of_an_experiment_has_rows_for_all_methods(page):
    experiment = find_experiment("PAGE-T1")
    labels = {method.label for method in experiment.methods}
    assert {row["method"] for row in page.rows} == {*labels, "PAGE_vs_worst_baseline"}


@pytest.mark.parametrize("name", ["synthetic", "cifar100", "tiny", "shakespeare"])
def test_the_gain_over_the_worst_baseline_follows_from_the_rows_of_a_task(name):
    """From the paper's own accuracies follow the gains that it prints."""
    experiment = find_experiment("PAGE-T1")
    (task,) = (task for task in experiment.tasks if task.name == name)
    rows = [
        module._row(experiment, task, method.label, metric, experiment.number(task, method, metric))
        for method in experiment.methods
        for metric in experiment.metrics
    ]
    rows = [row | {"ours": row["paper"], "seeds": 1} for row in rows]
    gains = list(module._improvement(experiment, task, rows))
    assert [row["metric"] for row in gains] == ["improvement_rel_pct_global", "improvement_rel_pct_local"]
    for row in gains:
        assert row["paper"] > 5
        assert row["difference"] == pytest.approx(0, abs=0.006)
    unfinished = [row | {"ours": None} if row["method"] == "Ditto" else row for row in rows]
    assert {row["state"] for row in module._improvement(experiment, task, unfinished)} == {"not run"}


def test_ctrl_c_says_how_to_go_on_and_the_same_command_does(tmp_path, monkeypatch, capsys):
    command = ["reproduce", "PAGE-T1", "--task", "synthetic", "--algorithms", "FedAvg", "--seeds", "1"]
    command += ["--rounds", "3", "--set", "clients=3", "--set", "local_epochs=1", "--plan", "stacked-eager"]
    command += ["--out", str(tmp_path / "page")]

    def interrupted(*args, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "execute_group", interrupted)
        code, _, err = run_cli(patch, capsys, *command)
    assert (code, "The same command continues" in err) == (130, True)
    code, out, _ = run_cli(monkeypatch, capsys, *command)
    assert (code, "3 of 1000 rounds" in out) == (0, True)
