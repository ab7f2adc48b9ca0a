"""Trained models through the command line: predictions for new samples, files for other programs; and one sentence for
every mistake."""

import contextlib
import functools
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from helpers import make_federation, make_unfinished, run_cli
from owndata import arrays, csv, pictures, rows, write
from PIL import Image
from safetensors.torch import load_file

import fedloom
from fedloom.core.federation import Federation, Ragged
from fedloom.core.preprocessing import Preprocessing
from fedloom.models import residual
from fedloom.models.zoo import MODELS
from fedloom.studies.export import example, export
from fedloom.studies.joining import join

PAGE = Path(__file__).parents[2] / "docs" / "trained-models.md"
SMALL = {"rounds": 2, "batch_size": 100, "lr": 0.3, "plan": "per-client"}
PATIENTS = rows(60)
CLASSES = ("ill", "well")
close = functools.partial(np.testing.assert_allclose, rtol=1e-5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns the folder of a finished run, or of a comparison, on a table of patients with missing ages."""

    @functools.cache
    def make(name="fedrep"):
        folder = tmp_path_factory.mktemp("runs")
        made = [list(row) for row in PATIENTS]
        made[5][1] = ""
        data = write(folder / "patients.csv", csv(made))
        if name == "comparison":
            fedloom.compare("fedavg", data, seeds=2, out=folder / "run", missing="mean", **SMALL)
        else:
            settings = {**SMALL, "batch_size": 5} if name == "per-fedavg" else SMALL
            fedloom.run(name, data, out=folder / "run", missing="mean", **settings)
        data.unlink()
        return folder / "run"

    return make


@pytest.fixture
def fed(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder, which must succeed; returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code, out, err = run_cli(monkeypatch, capsys, *words)
        assert code == 0, err
        return out

    return call


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder, which must end with exit code 2 and one sentence that has the given words."""
    monkeypatch.chdir(tmp_path)

    def call(*words, says):
        code, out, err = run_cli(monkeypatch, capsys, *words)
        assert (code, out) == (2, ""), (code, out, err)
        message = err.removeprefix("fedloom: ").removesuffix("\n")
        assert message != err
        assert message.endswith((".", "?")), message
        assert "\n" not in message, message
        assert not re.search(r"[.?!]\s+[A-Z]", message), message
        for word in [says] if isinstance(says, str) else says:
            assert word in message, message

    return call


def samples(path, header="client,age,sex", count=6):
    """A table of new patients with the given columns."""
    names = ("client", "age", "sex", "label")
    made = [[row[names.index(name)] for name in header.split(",")] for row in rows(count, seed=1)]
    return write(path, csv(made, header))


def probabilities(folder, row, client, when="best"):
    """What the model of a client makes of a patient."""
    model = fedloom.load(folder).model(client, when)
    return model.probabilities({"age": row[1], "sex": row[2]})[0].double().numpy()


# -- predictions


def test_predictions_are_those_of_each_clients_model(fed, runs, tmp_path):
    out = fed("predict", runs(), samples(tmp_path / "new.csv"), "--out", "found.csv")
    assert re.search(r"sample +client +predicted +p\(ill\) +p\(well\)", out)
    assert "6 predictions in found.csv" in out
    found = pyarrow.csv.read_csv("found.csv").to_pylist()
    for i, (row, patient) in enumerate(zip(found, rows(6, seed=1), strict=True)):
        expected = probabilities(runs(), patient, patient[0])
        assert row["sample"].endswith(f"new.csv, row {i + 2}")
        assert row["client"] == patient[0]
        close([row["p(ill)"], row["p(well)"]], expected)
        assert row["predicted"] == CLASSES[int(expected.argmax())]
        assert re.search(rf"row {i + 2} +{row['client']} +{row['predicted']} +{row['p(ill)']:.3f}", out)


@pytest.mark.parametrize("when", ["best", "last"])
def test_one_client_and_one_round_may_be_asked_for(when, fed, runs, tmp_path):
    data = samples(tmp_path / "new.csv", "age,sex")
    fed("predict", runs(), data, "--client", "Paris", "--when", when, "--out", "found.parquet")
    found = pq.read_table("found.parquet").to_pylist()
    assert {row["client"] for row in found} == {"Paris"}
    for row, patient in zip(found, rows(6, seed=1), strict=True):
        close([row["p(ill)"], row["p(well)"]], probabilities(runs(), patient, "Paris", when))


def test_classes_that_the_data_name_are_shown_beside_the_predicted_ones(fed, runs, tmp_path):
    out = fed("predict", runs(), samples(tmp_path / "new.csv", "client,age,sex,label"), "--out", "found.json")
    assert re.search(r"sample +client +label +predicted", out)
    assert [row["label"] for row in json.loads((tmp_path / "found.json").read_text())] == [
        row[3] for row in rows(6, seed=1)
    ]


def test_of_many_predictions_the_first_are_printed(fed, runs, tmp_path):
    data = samples(tmp_path / "new.csv", count=40)
    assert "The first 20 of 40 samples; --out FILE keeps all." in fed("predict", runs(), data)
    out = fed("predict", runs(), data, "--out", "found.csv")
    assert "The first 20 of 40 samples.\n" in out
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 41


def test_of_many_classes_the_probability_of_the_predicted_one_is_printed(fed, tmp_path):
    """A file has those of all."""
    fedloom.run("fedavg", make_federation((9, 8, 7), classes=6), out=tmp_path / "run", **SMALL)
    x = np.random.default_rng(0).normal(size=(1, 6))
    new = arrays(tmp_path / "new.npz", x=x)
    assert re.search(r"predicted +p\n", fed("predict", "run", new, "--client", "0", "--out", "found.json"))
    (row,) = json.loads((tmp_path / "found.json").read_text())
    expected = fedloom.load("run").model(0).probabilities(x[0])[0].numpy()
    close([row[f"p({c})"] for c in range(6)], expected)


def test_missing_values_and_unknown_words_are_noted(fed, runs, tmp_path):
    out = fed("predict", runs(), write(tmp_path / "new.csv", "client,age,sex\nRome,,f\nRome,60,x\n"))
    assert "Note: Column 'age' has no value in 1 row, first in" in out
    assert "the mean of the training data" in out
    assert "Note: Column 'sex' has x in 1 row" in out, out


def test_pictures_and_texts(fed, tmp_path):
    fedloom.run("fedavg", pictures(tmp_path / "photos"), out=tmp_path / "seen", **SMALL)
    fed("predict", "seen", "photos/a/cat/0.png", "--client", "b", "--out", "found.json")
    (row,) = json.loads((tmp_path / "found.json").read_text())
    assert [row["predicted"]] == fedloom.load("seen").model("b").predict(Image.open("photos/a/cat/0.png"))
    out = fed("predict", "seen", "photos")
    assert out.count(" cat ") + out.count(" dog ") >= 16  # label and prediction of every picture
    lines = [f"{'ab'[i % 2]},{('a good day', 'a bad night')[i % 3 == 0]},{i % 3 == 0}" for i in range(30)]
    table = write(tmp_path / "texts.csv", "\n".join(["client,text,label", *lines]) + "\n")
    fedloom.run("fedavg", table, out=tmp_path / "read", text="text", **SMALL)
    out = fed("predict", "read", write(tmp_path / "new.txt", "a good night\nxyz\n"), "--client", "a")
    assert "Note: 1 text without any word of the training data" in out


def test_arrays_of_a_run_without_names(fed, tmp_path):
    """Clients and classes are numbers."""
    fedloom.run("fedavg", make_federation((9, 8, 7)), out=tmp_path / "run", **SMALL)
    x = np.random.default_rng(0).normal(size=(3, 6))
    fed("predict", "run", arrays(tmp_path / "new.npz", x=x, client=np.array([2, 0, 1])), "--out", "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["client"] for row in found] == ["2", "0", "1"]
    for row, sample in zip(found, x, strict=True):
        assert [row["predicted"]] == fedloom.load("run").model(int(row["client"])).predict(sample)


def test_a_new_client_joins_with_its_labelled_samples(fed, runs, tmp_path):
    mine = samples(tmp_path / "mine.csv", "age,sex,label", count=20)
    data = samples(tmp_path / "new.csv", "age,sex")
    fed("predict", runs(), data, "--join", mine, "--out", "found.json")
    model = join(fedloom.load(runs()), mine)
    for row, patient in zip(json.loads((tmp_path / "found.json").read_text()), rows(6, seed=1), strict=True):
        assert row["client"] == "new"
        expected = model.probabilities({"age": patient[1], "sex": patient[2]})[0].double().numpy()
        close([row["p(ill)"], row["p(well)"]], expected)
    assert " Oslo " in fed("predict", runs(), data, "--join", mine, "--client", "Oslo")


def test_a_run_of_a_comparison_is_chosen(fed, runs, tmp_path):
    folder, data = runs("comparison"), samples(tmp_path / "new.csv")
    found = fedloom.load(folder)
    for options, run in (
        ((), found.run()),
        (("--method", "fedavg"), found.run("fedavg", 0)),
        (("--method", "local", "--seed", "1"), found.run("local", 1)),
    ):
        fed("predict", folder, data, *options, "--out", "found.json")
        for row, patient in zip(json.loads((tmp_path / "found.json").read_text()), rows(6, seed=1), strict=True):
            close([row["p(ill)"], row["p(well)"]], probabilities(run.folder, patient, patient[0]))


def test_mistakes_with_predictions(refused, runs, tmp_path):
    data, run = samples(tmp_path / "new.csv"), runs()
    refused("predict", run, data, "--client", "Pariss", says=("no client 'Pariss'", "did you mean 'Paris'?"))
    other = write(tmp_path / "other.csv", "client,age,sex\nRom,50,f\n")
    refused("predict", run, other, says=("samples of 'Rom'", "no client of the run", "did you mean 'Rome'?"))
    nobody = samples(tmp_path / "nobody.csv", "age,sex")
    refused("predict", run, nobody, says=("whose samples these are", "Berlin", "Paris", "Rome"))
    refused("predict", run, samples(tmp_path / "less.csv", "client,age"), says=("'sex'",))
    refused("predict", run, data, "--out", "found.txt", says=(".csv, .json or .parquet", "found.txt"))
    refused("predict", run, data, "--out", "no/found.csv", says="no folder")
    refused("predict", run, data, "--when", "lst", says=("when cannot be 'lst'", "did you mean 'last'?"))
    refused("predict", run, data, "--method", "fedavg", says=("--method and --seed are for comparisons", "single run"))
    refused("predict", runs("comparison"), data, "--method", "fedav", says="did you mean 'fedavg'?")
    refused("predict", runs("comparison"), data, "--seed", "7", says=("seed", "'7'"))
    refused("predict", run, "nothing.csv", says="nothing.csv")
    refused("predict", "nothing", data, says="no run directory nothing")
    refused("predict", tmp_path, data, says="config.yaml")
    refused("predict", run, pictures(tmp_path / "photos"), says=("pictures", "rows of a table"))
    refused("predict", run, write(tmp_path / "empty.csv", ""), says="empty.csv")
    refused("predict", run, says="Missing argument")


def test_mistakes_of_a_new_client(refused, runs, tmp_path):
    data, run = samples(tmp_path / "new.csv", "age,sex"), runs()
    refused("predict", run, data, "--join", data, says="must name the target of every sample")
    other = write(tmp_path / "other.csv", "age,sex,label\n50,f,dead\n60,m,ill\n")
    refused("predict", run, data, "--join", other, says="must name the target of every sample")
    refused("predict", run, data, "--join", "nothing.csv", says="nothing.csv")
    one = write(tmp_path / "one.csv", "age,sex,label\n50,f,ill\n")
    refused(
        "predict",
        runs("per-fedavg"),
        data,
        "--join",
        one,
        says=("per-fedavg needs 10 samples", "there are 1", "give more"),
    )


def test_runs_without_models(refused, runs, tmp_path):
    data = samples(tmp_path / "new.csv")
    folder = shutil.copytree(runs(), tmp_path / "run")
    make_unfinished(folder)
    refused("predict", folder, data, says=("is not finished", "--resume"))
    folder = shutil.copytree(runs(), tmp_path / "damaged")
    for file in (folder / "final").glob("models_*"):
        file.write_bytes(file.read_bytes()[:-1])
    refused("predict", folder, data, says=("is damaged", "final/models_"))
    fedloom.run("fedavg", make_federation((9, 8, 7)), out=tmp_path / "none", keep="none", **SMALL)
    new = arrays(tmp_path / "new.npz", x=np.zeros((1, 6)))
    refused("predict", "none", new, "--client", "0", says=("keep=none", "run it again"))


def test_a_model_with_a_prediction_at_every_position(refused, tmp_path):
    """Python gives the names of all; the table has one prediction for each sample."""
    draw = np.random.default_rng(0)
    lists = Ragged.of([np.arange(5), np.arange(5, 10)])
    x, y = (torch.from_numpy(draw.integers(0, 9, (10, 4))) for _ in range(2))
    data = Federation(x, y, 9, dict.fromkeys(("train", "val", "test"), lists), vocab=9)
    small = {"model": "lstm_so", "embedding": 3, "model__width": 4}
    result = fedloom.run("fedavg", data, out=tmp_path / "run", **small, **SMALL)
    model = result.model(0)
    assert model.predict(x[:2]) == [[str(c) for c in best] for best in model(x[:2]).argmax(-1).tolist()]
    new = arrays(tmp_path / "new.npz", x=x.numpy())
    refused("predict", "run", new, "--client", "0", says=("position", "Python"))


def test_outputs_that_stand_for_no_class_are_never_predicted(tmp_path):
    """A module may have more outputs than there are classes."""
    data, net = make_federation((9, 8, 7), classes=2, dtype=torch.float32), torch.nn.Linear(6, 5)
    with torch.no_grad():
        net.bias[4] = 100
    model = fedloom.run("local", data, model=torch.nn.Sequential(net), head="0", **{**SMALL, "lr": 1e-9}).model(0)
    assert model(data.x).shape[1] == 5
    assert set(model.predict(data.x)) <= {"0", "1"}
    assert model.probabilities(data.x).shape == (len(data.x), 2)


# -- files for other programs


def assert_exported(model, path):
    """The program in a file gives the logits of the model, for batches of 1 and of 5 samples."""
    if path.suffix == ".onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
        program = lambda x: torch.from_numpy(session.run(None, {"samples": x.numpy()})[0])  # noqa: E731
    else:
        program = torch.export.load(path).module()
    for count in (1, 5):
        x = example(model, count)
        with torch.no_grad():
            torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)
    return program


@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_a_program_takes_encoded_samples_and_returns_logits(format, fed, runs, tmp_path):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    name = {"torch": "model.pt2", "onnx": "model.onnx"}[format]
    out = fed("export", runs(), "--client", "Paris", "--format", format, "--out", "paris")
    assert out == f"paris/{name}\nparis/preprocessing.json\n"
    assert {file.name for file in (tmp_path / "paris").iterdir()} == {name, "preprocessing.json"}
    model = fedloom.load(runs()).model("Paris")
    program = assert_exported(model, tmp_path / "paris" / name)
    x = model.encode([{"age": 63, "sex": "f"}, {"age": None, "sex": "m"}])  # NaN is filled by the program
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)
    assert (tmp_path / "paris" / "preprocessing.json").read_bytes() == (runs() / "preprocessing.json").read_bytes()


def test_weights_alone(fed, runs, tmp_path):
    fed("export", runs(), "--client", "Rome", "--format", "safetensors", "--when", "last")
    weights = load_file(tmp_path / "models" / "Rome" / "model.safetensors")
    expected = fedloom.load(runs()).model("Rome", "last").state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    about = json.loads((tmp_path / "models" / "Rome" / "preprocessing.json").read_text())
    assert Preprocessing.from_json(about) == fedloom.load(runs()).model("Rome").preprocessing


class Tied(torch.nn.Module):
    """Uses a weight twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = (torch.nn.Linear(6, n) for n in (6, 6, 4))
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(torch.tanh(self.first(x))))


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_a_weight_that_is_used_twice(format, tmp_path):
    data = make_federation((9, 8, 7), dtype=torch.float32)
    model = fedloom.run("fedavg", data, model=Tied(), **SMALL).model(0)
    path = export(model, tmp_path, format)
    if format == "torch":
        assert_exported(model, path)
    else:
        weights = load_file(path)
        assert torch.equal(weights["network.second.weight"], weights["network.first.weight"])


@pytest.mark.parametrize("name", ["fedproto", "fedrod", "gpfl"])
def test_methods_that_do_not_predict_by_the_head_alone(name, fed, runs, tmp_path):
    """Their prototypes, second heads and valves are part of the program."""
    model = fedloom.load(runs(name)).model("Paris")
    assert any(key.startswith("extra_") for key in model.state_dict())
    with torch.no_grad():
        x = example(model, 5)
        assert not torch.allclose(model.network(model.preprocessing.scale(x, model.dtype)), model(x))
    fed("export", runs(name), "--client", "Paris")
    assert_exported(model, tmp_path / "models" / "Paris" / "model.pt2")
    pytest.importorskip("onnxruntime")
    fed("export", runs(name), "--client", "Paris", "--format", "onnx")
    assert_exported(model, tmp_path / "models" / "Paris" / "model.onnx")


def test_the_global_model_and_that_of_a_new_client(fed, runs, tmp_path):
    folder = runs("fedavg")
    assert "models/global/model.safetensors" in fed("export", folder, "--global", "--format", "safetensors")
    weights = load_file(tmp_path / "models" / "global" / "model.safetensors")
    expected = fedloom.load(folder).global_model().state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    mine = samples(tmp_path / "mine.csv", "age,sex,label", count=20)
    fed("export", folder, "--join", mine, "--client", "Ward 3/b", "--format", "safetensors")
    weights = load_file(tmp_path / "models" / "Ward_3_b" / "model.safetensors")
    expected = join(fedloom.load(folder), mine).state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    fed("export", folder, "--join", mine, "--format", "safetensors")
    assert (tmp_path / "models" / "new" / "model.safetensors").exists()


def test_a_run_of_a_comparison_is_exported(fed, runs, tmp_path):
    folder = runs("comparison")
    options = ("--method", "local", "--seed", "1", "--format", "safetensors")
    fed("export", folder, "--client", "Rome", *options)
    weights = load_file(tmp_path / "models" / "Rome" / "model.safetensors")
    expected = fedloom.load(folder).run("local", 1).model("Rome").state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_mistakes_with_files_for_other_programs(refused, runs, tmp_path):
    run = runs()
    refused("export", run, says=("--client NAME", "--global"))
    refused("export", run, "--client", "Pariss", says="did you mean 'Paris'?")
    refused("export", run, "--client", "Paris", "--format", "onxn", says="did you mean 'onnx'?")
    refused("export", run, "--client", "Paris", "--global", says="exclude each other")
    refused("export", run, "--global", says="fedrep has no global model")
    refused("export", run, "--client", "Paris", "--when", "first", says="when cannot be 'first'")
    refused("export", run, "--client", "Paris", "--seed", "1", says="for comparisons")
    refused("export", "nothing", "--client", "Paris", says="no run directory nothing")
    write(tmp_path / "file", "")
    for format in ("torch", "safetensors"):
        refused("export", run, "--client", "Paris", "--out", "file", "--format", format, says="file")
    (tmp_path / "full" / "model.pt2").mkdir(parents=True)
    refused("export", run, "--client", "Paris", "--out", "full", says="full/model.pt2")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_without_the_packages_for_onnx(package, refused, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    says = (f"needs the package '{package}'", "pip install 'fedloom[onnx]'")
    refused("export", runs(), "--client", "Paris", "--format", "onnx", says=says)


@pytest.fixture(scope="module", autouse=True)
def _table_of_operators():
    """The exporter reads the table of ONNX operators anew for each program, half a second."""
    with pytest.MonkeyPatch.context() as patch:
        with contextlib.suppress(ImportError, AttributeError):
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield


# model: shape of a sample, number of token ids, settings that make it small
FAMILIES = {
    "logreg": ((6,), None, {}),
    "mlp": ((6,), None, {}),
    "mlp3": ((6,), None, {"widths": "8/7/5"}),
    "cnn8": ((1, 8, 8), None, {}),
    "cnn4": ((3, 16, 16), None, {}),
    "cnn_kt": ((3, 16, 17), None, {}),
    "harcnn": ((2, 1, 28), None, {}),
    "resnet18_bn": ((3, 16, 16), None, {"width": 2}),
    "resnet18_gn": ((3, 16, 16), None, {"width": 2}),
    "resnet18_gn_c": ((3, 8, 8), None, {"width": 2}),
    "resnet50_gn_t": ((3, 8, 8), None, {"width": 2}),
    "wrn28_10_gn": ((3, 8, 8), None, {"depth": 10, "widen": 1}),
    "fasttext": ((7,), 11, {}),
    "lstm_shakes": ((3,), 9, {"width": 5, "padding": 0}),
    "lstm_so": ((3,), 9, {"embedding": 4, "width": 5}),
}


def test_every_model_is_in_the_list():
    assert {name for name in MODELS.names() if MODELS[name].__module__.startswith("fedloom.")} == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_model_as_onnx(name, tmp_path, monkeypatch):
    """After one round, so that running statistics are not the initial ones; residual networks have two blocks."""
    pytest.importorskip("onnxruntime")
    whole = residual._resnet
    monkeypatch.setattr(residual, "_resnet", lambda stem, depths, *rest: whole(stem, (1, 1), *rest))
    shape, vocab, settings = FAMILIES[name]
    draw = np.random.default_rng(0)
    if vocab is not None:
        x = draw.integers(0, vocab, (8, *shape))
    elif len(shape) == 3 and name != "harcnn":
        x = draw.integers(0, 256, (8, *shape), dtype=np.uint8)
    else:
        x = draw.normal(size=(8, *shape)).astype(np.float32)
    y = draw.integers(0, vocab, x.shape) if name == "lstm_so" else np.arange(8) % 3
    lists = Ragged.of([np.arange(4), np.arange(4, 8)])
    splits = dict.fromkeys(("train", "val", "test"), lists)
    data = Federation(
        torch.from_numpy(x),
        torch.from_numpy(y),
        9 if name == "lstm_so" else 3,
        splits,
        mean=(0.5,),
        std=(0.25,),
        vocab=vocab,
    )
    settings = {f"model__{key}": value for key, value in settings.items()}
    model = fedloom.run("local", data, model=name, rounds=1, plan="per-client", keep="last", **settings).model(
        0, "last"
    )
    assert_exported(model, export(model, tmp_path, "onnx"))
