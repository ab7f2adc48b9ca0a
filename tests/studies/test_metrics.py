"""Runs that are measured by more than accuracy: metrics by client, selection, the majority baseline, class weights."""

import csv
import math

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from helpers import methods, run_cli
from sentences import user_error

import fedloom

TASK = {
    "dataset": "synthetic",
    "model": "mlp",
    "per_client": 60,
    "width": 8,
    "clients": 4,
    "rounds": 3,
    "dtype": "float64",
}
PLANS = ("per-client", "stacked-eager", "stacked")


def probabilities(result, client, when="last"):
    """Classes and probabilities of a client's test samples."""
    data = result.simulation.population.data
    rows = data.splits["test"][client]
    return data.y[rows].cpu().numpy(), result.model(client, when).probabilities(data.x[rows].cpu()).numpy()


def reference_auprc(y, p):
    of_class = [sk.average_precision_score(y == c, p[:, c]) for c in range(p.shape[1]) if (y == c).any()]
    return 100 * np.mean(of_class)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("method", ["fedavg", "gpfl", "fedbabu"])
def test_the_metric_of_every_client_is_that_of_its_model(method, plan):
    result = fedloom.run(method, metric="auprc", plan=plan, **TASK)
    last = [row for row in result.clients.to_pylist() if row["round"] == 3]
    expected = [reference_auprc(*probabilities(result, i)) for i in range(4)]
    np.testing.assert_allclose([row["pre_auprc"] for row in last], expected, rtol=1e-9)
    assert result.last()["pre_auprc_mean"] == pytest.approx(np.mean(expected), rel=1e-9)
    assert result.last()["pre_auprc_worst"] == pytest.approx(min(expected), rel=1e-9)
    best = max(result.rounds, key=lambda row: (row["pre_val_auprc_mean"], -row["pre_val_loss"]))
    assert result.best_on_validation() == best


@pytest.mark.parametrize("method", methods())
def test_every_method_has_the_same_metrics_on_every_engine(method):
    settings = {**TASK, "rounds": 2, "metric": "log_loss", "class_weight": "balanced", "server_share": 0.1}
    one, other = (fedloom.run(method, plan=plan, **settings) for plan in ("per-client", "stacked-eager"))
    for mine, theirs in zip(one.rounds, other.rounds, strict=True):
        for column in mine:
            if "log_loss" in column or column.endswith("loss"):
                assert mine[column] == pytest.approx(theirs[column], rel=1e-6, nan_ok=True), column
    # the others jump where rounding changes an order or a bin
    a, b = (result.client_metrics("last")["log_loss"].to_numpy() for result in (one, other))
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_all_metrics_are_kept_for_the_best_and_the_last_round(tmp_path):
    result = fedloom.run("ditto", out=tmp_path / "run", lr=2.0, **{**TASK, "rounds": 8})
    again = fedloom.load(tmp_path / "run")
    assert result.best_on_validation()["round"] != 8
    for when, row in (("best", result.best_on_validation()), ("last", result.last())):
        found = again.client_metrics(when)
        columns = ["round", "client", "accuracy", "log_loss", "confusion"]
        assert found.select(columns).equals(result.client_metrics(when).select(columns))
        assert np.mean(found["accuracy"].to_numpy()) == pytest.approx(row["pre_acc_mean"], rel=1e-12)
        counts = np.array(found["confusion"].to_pylist())
        assert counts.sum(1).tolist() == found["samples"].to_pylist()


def test_where_lower_is_better_the_lowest_is_selected():
    result = fedloom.run("fedavg", metric="log_loss", plan="per-client", **{**TASK, "rounds": 6})
    values = [row["pre_val_log_loss_mean"] for row in result.rounds]
    assert result.best_on_validation()["pre_val_log_loss_mean"] == min(values)
    assert result.last()["pre_log_loss_low5"] >= result.last()["pre_log_loss_mean"]  # the worst have the highest


def test_a_metric_of_a_user_is_one_function(tmp_path):
    def share_of_certain(y, p):
        return float(np.mean(p.max(1) > 0.5))

    result = fedloom.run("fedavg", metric=share_of_certain, out=tmp_path / "run", plan="per-client", **TASK)
    y, p = probabilities(fedloom.run("fedavg", plan="per-client", **TASK), 0)
    last = [row for row in result.clients.to_pylist() if row["round"] == 3]
    assert last[0]["pre_share_of_certain"] == pytest.approx(share_of_certain(y, p))
    assert fedloom.load(tmp_path / "run").best_on_validation() == result.best_on_validation()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"metric": "roc_auc"}, ("Unknown metric 'roc_auc'", "did you mean 'auroc'")),
        ({"metric": "rmse"}, ("'rmse'", "numbers")),
        ({"class_weight": "balancd"}, ("class_weight", "balanced")),
    ],
)
def test_mistakes_are_found_before_training(settings, words):
    with user_error(*words):
        fedloom.run("fedavg", **{**TASK, **settings})


# -- class weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_balanced_classes_count_equally(plan):
    """One step of FedAvg from known weights is that of torch's weighted cross-entropy, summed over samples."""
    draw = np.random.default_rng(0)
    x = torch.tensor(draw.normal(size=(20, 3)))
    y = torch.tensor([0] * 8 + [1] * 2 + [0] * 3 + [2] * 7)
    data = fedloom.Federation(
        x, y, 4, {
            "train": fedloom.Ragged.of([np.arange(10), np.arange(10, 20)]),
            "val": fedloom.Ragged.of([[], []]), "test": fedloom.Ragged.of([np.arange(3), np.arange(10, 13)]),
        }, dtype=torch.float64,
    )  # fmt: skip
    module = torch.nn.Sequential()
    module.add_module("head", torch.nn.Linear(3, 4).double())
    settings = {"dtype": "float64", "rounds": 1, "lr": 0.1, "batch_size": 10, "plan": plan, "model": module}
    found = fedloom.run("fedavg", data, class_weight="balanced", **settings).server["w"]
    new = []
    for rows, counts in ((slice(0, 10), [8, 2, 0, 0]), (slice(10, 20), [3, 0, 7, 0])):
        present = sum(n > 0 for n in counts)
        weights = torch.tensor([10 / (present * n) if n else 0.0 for n in counts], dtype=torch.float64)
        w = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        losses = torch.nn.functional.cross_entropy(
            x[rows] @ w["head.weight"].T + w["head.bias"], y[rows], weight=weights, reduction="none"
        )
        gradients = torch.autograd.grad(losses.mean(), list(w.values()))
        new.append({name: (p - 0.1 * g).detach() for (name, p), g in zip(w.items(), gradients, strict=True)})
    for name in found:
        torch.testing.assert_close(found[name].cpu(), (new[0][name] + new[1][name]) / 2, rtol=1e-10, atol=1e-12)


# -- the hospital story ----------------------------------------------------------------------------------------------


@pytest.fixture
def hospitals(tmp_path, monkeypatch):
    """patients.csv: eight wards, 7 % of the patients are ill. new.csv: patients without a diagnosis."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    rows = []
    for ward in range(8):
        for _ in range(int(draw.integers(90, 120))):
            ill = draw.random() < 0.07
            age, crp = draw.normal(50 + 9 * ill, 12), draw.gamma(2 + 2 * ill, 2)
            smoker = draw.choice(["yes", "no"], p=[0.6, 0.4] if ill else [0.3, 0.7])
            rows.append([f"Ward {ward}", round(age, 1), round(crp, 2), smoker, "ill" if ill else "well"])
    with open("patients.csv", "w", newline="") as file:
        csv.writer(file).writerows([["client", "age", "crp", "smoker", "label"], *rows])
    with open("new.csv", "w", newline="") as file:
        csv.writer(file).writerows([["smoker", "age", "crp"], ["yes", 80, 15], ["no", 30, ""], ["pipe", 50, 4]])
    return tmp_path


SHORT = ("--rounds", "3", "--lr", "0.01", "--set", "plan=per-client")


def test_a_useless_classifier_does_not_look_good(hospitals, monkeypatch, capsys, caplog):
    code, out, _ = run_cli(monkeypatch, capsys, "run", "fedavg", "--dataset", "patients.csv", *SHORT)
    assert code == 0
    assert "Rare classes, of which accuracy tells little: ill (" in caplog.text
    assert "no better than always predicting the most frequent class" in caplog.text
    assert "class_weight=balanced" in caplog.text
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    models, majority = ([float(value) for value in rows[name]] for name in ("models", "majority"))
    assert models[0] > 90
    assert models[1] == majority[1] == 50  # balanced accuracy: nobody who is ill was found


def test_the_ill_are_found_and_new_patients_predicted(hospitals, monkeypatch, capsys, caplog):
    asked = ("--dataset", "patients.csv", "--rounds", "25", "--metric", "auprc", "--class-weight", "balanced")
    more = ("--seeds", "1", "--out", "study", "--set", "plan=stacked-eager")
    code, out, _ = run_cli(monkeypatch, capsys, "compare", "fedavg", "fedrep", *asked, *more)
    assert code == 0
    assert "Rare classes" not in caplog.text  # they were taken care of
    assert "test auprc over clients" in out
    board = {row["method"]: row for row in fedloom.load("study").rows()}
    assert board["fedavg"]["auprc_mean"] > 3 * board["majority"]["auprc_mean"]
    assert board["fedavg"]["balanced_accuracy_mean"] > 65 > board["majority"]["balanced_accuracy_mean"] == 50
    assert board["majority"]["acc_mean"] > board["fedavg"]["acc_mean"]  # what accuracy would have said
    code, out, _ = run_cli(
        monkeypatch, capsys, "predict", "study", "new.csv", "--client", "Ward 3", "--method", "fedavg", "--out", "p.csv"
    )
    assert code == 0
    assert "Column 'crp' has no value in 1 row" in out
    assert "pipe" in out
    with open("p.csv", newline="") as file:
        predicted = list(csv.DictReader(file))
    assert [row["predicted"] for row in predicted][:2] == ["ill", "well"]
    assert math.isclose(sum(float(predicted[0][f"p({name})"]) for name in ("ill", "well")), 1, rel_tol=1e-6)
    code, out, _ = run_cli(monkeypatch, capsys, "evaluate", "study", "patients.csv", "--method", "fedavg")
    assert code == 0
    assert "Found of each class, over all samples: ill " in out
    code, out, _ = run_cli(monkeypatch, capsys, "export", "study", "--client", "Ward 3", "--method", "fedavg")
    assert (code, out.split()) == (0, ["models/Ward_3/model.pt2", "models/Ward_3/preprocessing.json"])
    program = torch.export.load("models/Ward_3/model.pt2").module()
    model = fedloom.load("study").model("Ward 3", "fedavg")
    rows = model.encode([{"age": 80, "crp": 15, "smoker": "yes"}, {"age": 30, "crp": None, "smoker": "no"}])
    torch.testing.assert_close(program(rows), model(rows))
