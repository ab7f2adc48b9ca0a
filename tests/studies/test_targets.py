"""Runs that predict numbers or labels: recorded metrics are those of the models that one takes home, personal models
win where clients differ, and what is said of methods and settings that are for classes."""

import json

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from helpers import Crash, crash_after, make_federation, methods, run_cli, with_targets
from owndata import csv, write
from sentences import user_error
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from sklearn.metrics import average_precision_score, mean_absolute_error, r2_score, root_mean_squared_error

import fedloom
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.targets import Number
from fedloom.data.divide import validated
from fedloom.studies.export import example
from fedloom.studies.predict import evaluate, predict

SMALL = {"rounds": 2, "plan": "per-client", "lr": 0.1, "batch_size": 20, "width": 8}
OF_METHOD = {
    "page": {"ep_max": 2},
    "dap-fl": {"ep_max": 2},
    "pfedme": {"lam": 0.5},
    "per-fedavg": {"allow_small": True},
}


def federation(kind):
    return with_targets(make_federation((20, 30, 25), held_out=9, server=20, dtype=torch.float32), kind)


def test_samples(data, i):
    rows = data.splits["test"][i]
    return data.x[rows], data.targets.in_unit(data.y[rows]).numpy()


test_samples.__test__ = False


def metrics_of(result, when, client):
    table = result.client_metrics(when).filter(pc.field("client") == client)
    return {name: column[0].as_py() for name, column in zip(table.column_names, table.columns, strict=True)}


@pytest.mark.parametrize("name", [name for name in methods() if "number" in ALGORITHMS[name].targets])
def test_models_of_every_method_predict_the_numbers_that_are_recorded(name):
    data = federation("number")
    result = fedloom.run(name, data, holdout_clients=0, **SMALL, **OF_METHOD.get(name, {}))
    for i in (1, 2):
        x, y = test_samples(data, i)
        found = result.model(i, "last")(x).numpy()
        assert found.shape == y.shape
        recorded = metrics_of(result, "last", i)
        assert recorded["rmse"] == pytest.approx(root_mean_squared_error(y, found), rel=1e-5)
        assert recorded["mae"] == pytest.approx(mean_absolute_error(y, found), rel=1e-5)
        assert recorded["r2"] == pytest.approx(r2_score(y, found), abs=1e-5)
        (of_round,) = result.clients.filter((pc.field("client") == i) & (pc.field("round") == 2))[
            "pre_rmse"
        ].to_pylist()
        assert of_round == pytest.approx(recorded["rmse"], rel=1e-5)


@pytest.mark.parametrize("name", [name for name in methods() if "labels" in ALGORITHMS[name].targets])
def test_models_of_every_method_predict_the_labels_that_are_recorded(name):
    data = federation("labels")
    result = fedloom.run(name, data, **SMALL, **OF_METHOD.get(name, {}))
    assert result.metric == "auprc"
    for i in (1, 2):
        x, y = test_samples(data, i)
        p = result.model(i, "last").probabilities(x).numpy()
        recorded = metrics_of(result, "last", i)
        assert recorded["accuracy"] == pytest.approx(100 * ((p >= 0.5) == (y > 0)).mean())
        some = y.any(0)
        expected = np.mean([average_precision_score(y[:, c], p[:, c]) for c in np.flatnonzero(some)])
        assert recorded["auprc"] == pytest.approx(100 * expected, abs=1e-3)


def test_r2_agrees_with_scikit_learn():
    """In float64, from the models' own predictions, to 1e-6 and better."""
    data = federation("number")
    result = fedloom.run("ditto", data, dtype="float64", **SMALL)
    for i in range(3):
        x, y = test_samples(data, i)
        if len(y) > 1:
            found = result.model(i, "last")(x).numpy()
            assert metrics_of(result, "last", i)["r2"] == pytest.approx(r2_score(y, found), abs=1e-9)


def test_the_baseline_of_numbers_is_the_mean_of_a_clients_training_targets():
    data = federation("number")
    result = fedloom.run("fedavg", data, **SMALL)
    for i in range(3):
        train = data.targets.in_unit(data.y[data.splits["train"][i]]).numpy()
        _, y = test_samples(data, i)
        expected = root_mean_squared_error(y, np.full(len(y), train.mean()))
        assert metrics_of(result, "baseline", i)["rmse"] == pytest.approx(expected, rel=1e-6)


# -- learning


def test_personal_methods_beat_the_global_model_where_regions_have_different_coefficients():
    found = fedloom.compare(
        ["fedavg", "fedavg-ft", "ditto", "plgu-lf"], "regions", seeds=1, rounds=30, clients=8, plan="stacked"
    )
    board = {row["method"]: row for row in found.rows()}
    for name in ("fedavg-ft", "ditto", "plgu-lf"):
        assert board[name]["rmse_mean"] < 0.95 * board["fedavg"]["rmse_mean"]
        assert board[name]["gain"] > 0
    assert [row["method"] for row in found.rows()][-1] == "mean"
    assert board["fedavg"]["rmse_mean"] < 0.5 * board["mean"]["rmse_mean"]
    assert "acc_mean" not in board["fedavg"]


def test_the_global_model_on_diabetes_is_as_good_as_linear_regression_on_all_data():
    result = fedloom.run("fedavg", "diabetes", clients=4, partition="iid", rounds=30, plan="stacked")
    splits = result.simulation.population.data.splits
    train, test = (splits[name].flat.cpu().numpy() for name in ("train", "test"))
    x, y = load_diabetes(return_X_y=True, scaled=False)
    expected = root_mean_squared_error(y[test], LinearRegression().fit(x[train], y[train]).predict(x[test]))
    found = root_mean_squared_error(y[test], result.global_model("last").predict(x[test]))
    assert found < 1.05 * expected < 0.8 * y[test].std()


def test_hubers_loss_does_without_outliers():
    """One target in ten is far off; the error on the others is smaller with Huber's loss."""
    draw = np.random.default_rng(3)
    x = draw.normal(size=(400, 3)).astype(np.float32)
    y = x @ [3.0, -2.0, 1.0] + 0.1 * draw.normal(size=400)
    far = np.arange(400) % 10 == 0
    data = fedloom.federation(x, np.where(far, y + 60 * draw.random(400), y), np.arange(400) % 4)
    errors = {}
    for huber in (None, 0.2):
        result = fedloom.run("fedavg", data, huber=huber, rounds=20, plan="stacked", model="logreg")
        found = result.global_model("last")(torch.from_numpy(x)).numpy()
        errors[huber] = np.abs(found - y)[~far].mean()
    assert errors[0.2] < 0.5 * errors[None]


def test_class_weights_find_rare_labels():
    draw = np.random.default_rng(4)
    x = draw.normal(size=(600, 4)).astype(np.float32)
    noise = draw.normal(size=(600, 2))
    y = np.stack([x[:, 0] + noise[:, 0] > 2.2, x[:, 1] + noise[:, 1] > 0], 1).astype(int)
    data = fedloom.federation(x, y, np.arange(600) % 3)
    recall = {}
    for weight in ("none", "balanced"):
        result = fedloom.run("fedavg", data, class_weight=weight, rounds=10, plan="stacked")
        rows = result.client_metrics("last")["recall"].to_pylist()
        recall[weight] = np.nanmean([row[0] for row in rows])
    assert recall["balanced"] > recall["none"] + 20


def test_a_run_that_is_no_better_than_the_mean_is_warned_of(caplog):
    data = fedloom.federation(np.random.default_rng(0).normal(size=(90, 3)), np.arange(90) % 7 + 0.5, np.arange(90) % 3)
    fedloom.run("fedavg", data, rounds=1, lr=1e-9)
    assert "no better than always predicting the mean" in caplog.text


# -- scales, runs that go on, new clients


def test_targets_are_scaled_by_the_participants_training_samples_only():
    x, y = np.zeros((40, 2), np.float32), np.arange(40) + 0.5
    data = fedloom.federation(x + np.arange(40)[:, None], y, np.arange(40) % 4)
    ready = validated(data)
    assert isinstance(ready.targets, Number)
    train = data.y[data.splits["train"].flat].numpy()
    assert (ready.targets.mean, ready.targets.std) == (train.mean(), train.std())
    np.testing.assert_allclose(ready.targets.in_unit(ready.y), y)


@pytest.mark.parametrize("kind", ["number", "labels"])
def test_a_run_goes_on_after_a_crash_and_grows(kind, tmp_path):
    data = federation(kind)
    with pytest.raises(Crash):
        fedloom.run("ditto", data, out=tmp_path / "a", on_round=crash_after(1), checkpoint_every=1, **SMALL)
    fedloom.run("ditto", data, out=tmp_path / "a", resume=True, checkpoint_every=1, **SMALL)
    fedloom.run("ditto", data, out=tmp_path / "a", resume=True, checkpoint_every=1, **{**SMALL, "rounds": 4})
    fedloom.run("ditto", data, out=tmp_path / "b", checkpoint_every=1, **{**SMALL, "rounds": 4})
    for name in ("rounds.parquet", "clients.parquet", "metrics.parquet", "final/models_last.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


HOUSES = np.random.default_rng(8).normal(size=(90, 2)).round(3)


def price(row, site):
    return round(200_000.25 + 30_000 * row[0] * (1, -1, 2)[site] + 9_000 * row[1], 2)


def houses(folder, sites=(0, 1, 2)):
    made = [(("Rome", "Oslo", "Bonn", "Lima")[i % 3], *row, price(row, i % 3)) for i, row in enumerate(HOUSES)]
    kept = [row for row in made if ("Rome", "Oslo", "Bonn").index(row[0]) in sites]
    return write(folder / "houses.csv", csv(kept, "client,size,age,price"))


def test_a_table_of_prices_from_the_command_line(tmp_path, monkeypatch, capsys):
    """Check, run, predict with and without known prices, evaluate, export: all in the unit of the table."""
    table = houses(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, text, _ = run_cli(monkeypatch, capsys, "data", "check", str(table), "--set", "label=price")
    assert code == 0
    assert "a number to predict" in text
    command = ("run", "fedavg-ft", "--dataset", str(table), "--set", "label=price", "--rounds", "40", "--lr", "0.05")
    code, text, _ = run_cli(monkeypatch, capsys, *command, "--out", "run")
    assert code == 0
    assert "Test rmse over clients" in text
    assert "accuracy" not in text

    new = write(tmp_path / "new.csv", csv([("Rome", 1.0, 0.0), ("Oslo", 1.0, 0.0)], "client,size,age"))
    code, text, _ = run_cli(monkeypatch, capsys, "predict", "run", str(new), "--out", "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["predicted"] for row in found] == pytest.approx([230_000, 170_000], rel=0.05)
    code, text, _ = run_cli(monkeypatch, capsys, "evaluate", "run", str(table), "--json")
    over = json.loads(text)["over_clients"]
    assert set(over) == {"rmse", "mae", "r2"}
    assert over["r2"]["worst"] > 0.8
    code, text, _ = run_cli(monkeypatch, capsys, "evaluate", "run", str(table))
    assert "RMSE" in text
    code, _, err = run_cli(monkeypatch, capsys, "evaluate", "run", str(new))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "have no targets" in err


def test_models_of_numbers_in_python_and_in_other_programs(tmp_path):
    result = fedloom.run("ditto", houses(tmp_path), label="price", rounds=5, out=tmp_path / "run")
    model = fedloom.load(tmp_path / "run").model("Rome", "last")
    rows = [{"size": 0.5, "age": 1.0}, {"size": -0.5, "age": 0.0}]
    assert model.predict(rows) == pytest.approx(result.model("Rome", "last").predict(rows))
    assert all(150_000 < value < 250_000 for value in model.predict(rows))
    with user_error("predicts numbers", "use predict"):
        model.probabilities(rows)
    for form in ("torch", "onnx"):
        path = model.export(tmp_path / form, form)
        x = example(model, 3)
        if form == "torch":
            found = torch.export.load(path).module()(x).numpy()
        else:
            onnxruntime = pytest.importorskip("onnxruntime")
            session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            assert session.get_outputs()[0].name == "values"
            (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(found, model(x).numpy(), rtol=1e-5)


def test_a_new_client_joins_with_its_own_numbers(tmp_path):
    fedloom.run("fedavg-ft", houses(tmp_path, (0, 2)), label="price", rounds=10, out=tmp_path / "run")
    path = houses(tmp_path, (1,))  # where larger houses cost less
    model = fedloom.load(tmp_path / "run").join(path)
    (large,) = model.predict([{"size": 2.0, "age": 0.0}])
    before = fedloom.load(tmp_path / "run").global_model("last").predict([{"size": 2.0, "age": 0.0}])[0]
    assert large < before
    assert 100_000 < large < 300_000


def test_a_table_of_labels(tmp_path):
    draw = np.random.default_rng(1)
    made = []
    for i in range(120):
        a, b = draw.normal(size=2).round(3)
        words = [word for word, there in (("fever", a > 0), ("cough", b > 0.5), ("rash", a < -1)) if there]
        made.append((("Rome", "Oslo")[i % 2], a, b, "; ".join(words)))
    path = write(tmp_path / "cases.csv", csv(made, "client,a,b,signs"))
    result = fedloom.run(
        "fedavg-ft", path, label="signs", target="labels", rounds=25, lr=0.3, out=tmp_path / "run", plan="stacked"
    )
    assert result.metric == "auprc"
    model = fedloom.load(tmp_path / "run").model("Rome")
    assert model.classes == ("cough", "fever", "rash")
    assert model.predict([{"a": 2.0, "b": 2.0}, {"a": -0.5, "b": -2.0}, {"a": -3.0, "b": -2.0}]) == [
        ["cough", "fever"], [], ["rash"],
    ]  # fmt: skip
    found = predict(fedloom.load(tmp_path / "run"), path)
    table = fedloom.load(tmp_path / "run").predict(path).to_pylist()
    assert table == found.table().to_pylist()
    assert table[0]["label"] == made[0][3].replace("fever; cough", "cough; fever")
    assert set(table[0]) == {"sample", "client", "label", "predicted", "p(cough)", "p(fever)", "p(rash)"}
    report = evaluate(found)
    assert report["over_clients"]["accuracy"]["worst"] > 85
    assert set(report["recall"]) == {"cough", "fever", "rash"}


# -- what is for classes only


@pytest.mark.parametrize(
    ("kind", "name", "settings", "words"),
    [
        ("number", "gpfl", {}, ("gpfl predicts one of several classes", "is a number")),
        ("number", "page", {}, ("page predicts one of several classes or several labels", "is a number")),
        ("labels", "fedproto", {}, ("is several labels", "fedloom list algorithms")),
        ("number", "fedavg", {"class_weight": "balanced"}, ("class_weight", "a number")),
        ("labels", "fedavg", {"huber": 1.0}, ("huber is a loss for numbers", "several labels")),
        ("classes", "fedavg", {"huber": 1.0}, ("huber is a loss for numbers", "one of several classes")),
        ("number", "fedavg", {"metric": "accuracy"}, ("'accuracy'", "these are numbers", "rmse")),
        ("labels", "fedavg", {"metric": "rmse"}, ("'rmse'", "these are labels")),
        ("number", "fedphp", {"transfer": "kd"}, ("transfer=kd is for classes", "transfer=mmd")),
        ("number", "pfedkt", {"distance": "cos"}, ("distance=cos", "a number has none", "level=feature")),
    ],
)
def test_what_does_not_fit_is_refused_before_training(kind, name, settings, words):
    with user_error(*words):
        fedloom.run(name, federation(kind), **{**SMALL, **settings})


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.full(30, 2.5), ("nothing to learn",)),
        (np.r_[np.nan, np.arange(29.0)] + 0.5, ("Sample 0", "empty")),
        (np.arange(30) * 1e20 + 0.5, ("larger unit",)),
    ],
)
def test_numbers_that_cannot_be_learnt(y, words):
    with user_error(*words):
        fedloom.federation(np.ones((30, 2)), y, np.arange(30) % 3, target="number")


def test_a_metric_of_ones_own_for_numbers():
    from fedloom.metrics.registry import OWN, add_metric

    def within_a_unit(y_true, prediction):
        return float((np.abs(y_true - prediction) < 1).mean())

    try:
        result = fedloom.run("fedavg", federation("number"), metric=add_metric(within_a_unit), **SMALL)
        assert 0 <= result.last()["pre_within_a_unit_mean"] <= 1
        assert result.last()["pre_rmse_mean"] > 0
    finally:
        OWN.clear()
