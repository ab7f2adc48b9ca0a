"""Models to take home: those of every method predict as recorded, in memory and from disk, in the best and in the last
round; with running statistics, from users' own data, of runs that were stacked, and what is said if there are none."""

import contextlib
import dataclasses
import functools
import json
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from helpers import Crash, SmallNet, crash_after, make_federation, methods
from owndata import TEXT_FEATURES, arrays, csv, pictures, rows, texts, write
from PIL import Image
from safetensors.torch import load_file
from sentences import user_error
from torch import nn

import fedloom
from fedloom.config.resolve import configure
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.federation import Federation, Ragged
from fedloom.storage.manifest import Manifest
from fedloom.studies.build import make_data
from fedloom.studies.joining import join

TIE = 1e-5  # two logits that are as near as this may change places
CLASSES = 4
NAMES = ("Berlin", "Madrid", "Oslo")
TASK = {"lr": 0.6, "batch_size": 100, "rounds": 2, "plan": "per-client", "holdout_clients": 1, "join_rounds": 2}
SMALL = {"model": "mlp", "width": 8, **TASK}
# of methods that refuse the settings above, or take long
OF_METHOD = {
    "dap-fl": {"ep_max": 2},
    "fedala": {"start_epochs": 2},
    "fedrecon": {"query_epochs": 2, "pseudo_clients": 2},
    "mapper": {"lambdas": "0.25/0.5"},
    "per-fedavg": {"allow_small": True},
    "pfedme": {"lam": 0.5},
}


@functools.cache
def pixels(validation=1) -> Federation:
    """Three clients with pixels, and samples of the server. With `validation=1`, the labels of validation samples are
    wrong by one class, so that training makes the models worse on them."""
    draw = np.random.default_rng(0)
    sizes = [(n, 40, 12) for n in (20, 34, 41)]
    total = sum(map(sum, sizes)) + 30
    y = draw.integers(0, CLASSES, total)
    x = draw.normal(128, 40, (CLASSES, 6))[y] + draw.normal(0, 30, (total, 6))
    splits, start = {"train": [], "val": [], "test": []}, 0
    for each in sizes:
        for split, count in zip(splits, each, strict=True):
            splits[split].append(np.arange(start, start + count))
            start += count
    wrong = np.concatenate(splits["val"])
    y[wrong] = (y[wrong] + validation) % CLASSES
    return Federation(
        torch.from_numpy(x.clip(0, 255).astype(np.uint8)),
        torch.from_numpy(y),
        CLASSES,
        {name: Ragged.of(lists) for name, lists in splits.items()},
        server=torch.arange(start, total),
        mean=(0.5,),
        std=(0.25,),
        class_names=("ash", "beech", "elm", "oak"),
        client_names=NAMES,
    )


def recorded(result, t, client, column):
    """What clients.parquet, or the table in memory, says of a client in a round."""
    (found,) = result.clients.filter((pc.field("round") == t) & (pc.field("client") == client))[column].to_pylist()
    return found


def assert_as_recorded(model, x, y, accuracy):
    """A model is right on as many samples as its accuracy says, but for those whose two best logits are equal."""
    with torch.no_grad():
        logits = model(x)
    best = logits.topk(2, -1).values
    ties = int((best[:, 0] - best[:, 1] < TIE).sum())
    correct = int((logits.argmax(-1) == y).sum())
    assert abs(correct - accuracy * len(y) / 100) <= ties + 1e-6, (correct, accuracy * len(y) / 100, ties)


def assert_same_weights(one, other):
    """Two models have the same parameters and statistics."""
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def contents(folder):
    """All files of a folder."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def flip(file):
    """Change one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def pq_names(result):
    """Names of the clients by number, those who are held out last."""
    return json.loads((result.folder / "names.json").read_text())["clients"]


def rows_of(result, client, split="test"):
    """Rows of the data that are a client's."""
    if result.folder is None:
        return result.simulation.population.data.splits[split][client].numpy()
    return np.array(pq.read_table(result.folder / "partition.parquet")[split][client].as_py())


def assert_models_as_recorded(result, data):
    """All clients' models of the best and of the last round are those that were scored."""
    participants = sorted({row["client"] for row in result.clients.to_pylist() if row.get("pre_acc") is not None})
    for when, row in (("best", result.best_on_validation()), ("last", result.last())):
        for client in [*participants, *result.unseen]:
            mine, column = rows_of(result, client), "joined_acc" if client in result.unseen else "pre_acc"
            accuracy = recorded(result, row["round"], client, column)
            assert_as_recorded(result.model(client, when), data.x[mine], data.y[mine], accuracy)


@contextlib.contextmanager
def best_is_first(name):
    """Within this context, the models of a method are said to get worse on validation data from round to round."""
    cls = ALGORITHMS[name]
    report_round = cls.report_round

    def falling(self, rounds):
        row = rounds[-1]
        columns = {"pre_val_acc_mean", "global_val_acc_mean"} & row.keys()
        return {**report_round(self, rounds), **dict.fromkeys(columns, -row["round"])}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "report_round", falling)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the finished run of a method, loaded from its folder."""

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp("finished") / name
        with best_is_first(name):
            fedloom.run(name, pixels(), out=folder, **SMALL, **OF_METHOD.get(name, {}))
        return fedloom.load(folder)

    return run


@pytest.mark.parametrize("name", methods())
def test_every_model_predicts_as_recorded(name, finished):
    data, on_disk = pixels(), finished(name)
    with best_is_first(name):
        in_memory = fedloom.run(name, data, **SMALL, **OF_METHOD.get(name, {}))
    assert on_disk.simulation is None
    assert in_memory.folder is None
    for result in (in_memory, on_disk):
        assert (result.best_on_validation()["round"], result.last()["round"]) == (1, 2)
        assert len(result.unseen) == 1
        assert_models_as_recorded(result, data)
    for when in ("best", "last"):
        a, b = (result.model(0, when).state_dict() for result in (in_memory, on_disk))
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key])


@pytest.mark.parametrize("name", methods())
def test_a_new_client_joins_as_one_that_was_held_out_does(name, finished, tmp_path):
    """With the same samples, and the same number, it gets the same model, though the others' samples are not there."""
    data, result = pixels(), finished(name)
    (client,) = result.unseen
    mine = rows_of(result, client, "train")
    labels = np.array(data.class_names)[data.y[mine].numpy()]
    before = contents(result.folder)
    model = join(result, arrays(tmp_path / "new.npz", x=data.x[mine].numpy(), y=labels))
    expected = result.model(client, "last")
    with torch.no_grad():
        torch.testing.assert_close(model(data.x), expected(data.x))
    assert contents(result.folder) == before


def test_the_models_of_two_rounds_are_two_models():
    result = fedloom.run("fedavg", pixels(), **SMALL)
    best, last = (result.model(0, when).state_dict() for when in ("best", "last"))
    assert not torch.equal(best["network.head.weight"], last["network.head.weight"])


def test_without_validation_data_the_best_round_is_the_last():
    data = pixels()
    nobody = Ragged.of([np.zeros(0, np.int64)] * len(NAMES))
    result = fedloom.run("fedavg", dataclasses.replace(data, splits={**data.splits, "val": nobody}), **SMALL)
    assert_models_as_recorded(result, data)
    assert_same_weights(result.model(0), result.model(0, "last"))


# -- what a model takes and returns


@pytest.fixture
def done(finished):
    """A finished run in a folder, of a method without a global model."""
    return finished("fedrep")


def test_clients_are_known_by_name_and_by_number(done):
    for client, name in enumerate(pq_names(done)):
        assert_same_weights(done.model(name), done.model(client))
        assert_same_weights(done.model(str(client)), done.model(client))


def test_an_unknown_client_is_answered_with_the_nearest_name(done):
    with user_error("no client 'Berlim'", "did you mean 'Berlin'?"):
        done.model("Berlim")
    with user_error("no client '3'"):
        done.model(3)
    with user_error("no client '-1'"):
        done.model(-1)
    with user_error("no client 'True'"):
        done.model(True)
    unnamed = fedloom.run("fedavg", make_federation((4, 5, 6)), rounds=1, plan="per-client")
    with user_error("no client '3'; clients are 0 to 2."):
        unnamed.model(3)
    with user_error("no client 'Berlin'; clients are 0 to 2."):
        unnamed.model("Berlin")


def test_another_word_for_a_round_is_refused(done):
    with user_error("when cannot be 'lsat'", "did you mean 'last'?"):
        done.model(0, "lsat")


def test_a_model_is_a_module_that_predicts_names(done):
    model, x = done.model(0), pixels().x[:5]
    assert isinstance(model, nn.Module)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    best = model(x).argmax(-1).tolist()
    assert model.predict(x) == [model.classes[c] for c in best]
    torch.testing.assert_close(model.probabilities(x), torch.softmax(model(x), -1))
    assert model.predict(x[0].numpy()) == model.predict(x[:1])
    assert model.predict(x.tolist()) == model.predict(x)
    scaled = (x.float() / 255 - 0.5) / 0.25
    torch.testing.assert_close(model.network(scaled), model(x))


def test_making_a_model_leaves_the_global_random_state_alone(done):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    done.model(0)
    assert torch.equal(torch.rand(3), expected)


def test_a_model_is_the_same_in_another_process(done, tmp_path):
    program = (
        "import sys, torch, fedloom; torch.set_num_threads(1); model = fedloom.load(sys.argv[1]).model(0); "
        "torch.save(model(torch.load(sys.argv[2])), sys.argv[3])"
    )
    x = pixels().x[:50]
    torch.save(x, tmp_path / "x.pt")
    command = [sys.executable, "-c", program, done.folder, tmp_path / "x.pt", tmp_path / "logits.pt"]
    subprocess.run(command, check=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), done.model(0)(x))


# -- the global model


def test_the_global_model_is_scored_as_recorded(tmp_path):
    """On the server's samples, by the mean of the clients' running statistics."""
    data = pixels()
    fedloom.run("fedavg", data, out=tmp_path / "run", model=Normalised(), **TASK)
    in_memory = fedloom.run("fedavg", data, model=Normalised(), **TASK)
    for result in (in_memory, fedloom.load(tmp_path / "run", model=Normalised())):
        assert result.best_on_validation("global") is not result.last()
        for when, row in (("best", result.best_on_validation("global")), ("last", result.last())):
            assert_as_recorded(result.global_model(when), data.x[data.server], data.y[data.server], row["acc_global"])


def test_the_global_model_of_a_method_that_predicts_otherwise_predicts_by_its_head(tmp_path):
    """FedRoD's clients add the logits of a second head."""
    data = pixels()
    result = fedloom.run("fedrod", data, out=tmp_path / "run", **SMALL)
    assert_as_recorded(
        result.global_model("last"), data.x[data.server], data.y[data.server], result.last()["acc_global"]
    )


def test_a_method_without_a_global_model_says_so(done):
    for result in (done, fedloom.run("fedrep", pixels(), **SMALL)):
        for when in ("best", "last"):
            with user_error("fedrep has no global model"):
                result.global_model(when)


# -- running statistics


class Normalised(SmallNet):
    """BatchNorm before a named head, for samples of `pixels`."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(6, 8, CLASSES, norm=True)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "ditto"])
def test_running_statistics_are_kept_and_used(name, tmp_path):
    data = pixels()
    fedloom.run(name, data, out=tmp_path / "run", model=Normalised(), **{**TASK, "batch_size": 8})
    assert any("running_var" in key for key in load_file(tmp_path / "run" / "final" / "models_last.safetensors"))
    assert any("running_var" in key for key in load_file(tmp_path / "run" / "final" / "clients.safetensors"))
    result = fedloom.load(tmp_path / "run", model=Normalised())
    assert_models_as_recorded(result, data)
    model = result.model(0, "last")
    before = model(data.x)
    model.network.norm.reset_running_stats()
    assert (model(data.x) - before).abs().max() > 0.1
    assert (model(data.x).argmax(-1) != before.argmax(-1)).any()


# -- your own data: a model takes what the client has, and needs its training data no more


def recorded_numbers(result):
    """Correct predictions of every client on its test samples, in the last round."""
    rows = {
        row["client"]: row["pre_acc"] for row in result.clients.to_pylist() if row["round"] == result.last()["round"]
    }
    return [round(rows[i] * len(rows_of(result, i)) / 100) for i in range(len(rows))]


def correct_numbers(result, samples, labels):
    """The same, from what `predict` returns for each sample."""
    found = []
    for i in range(result.models.clients):
        model = result.model(i, "last")
        found.append(sum(model.predict(samples[row]) == [labels[row]] for row in rows_of(result, i)))
    return found


def assert_predicts_what_users_have(dataset, folder, samples, labels, **settings):
    """Each sample as the user has it is predicted as the tensor is that the model was trained and scored with, also
    after the data were deleted."""
    settings = {"rounds": 2, "batch_size": 10, "lr": 0.1, "plan": "per-client", "split": "0.5/0.2/0.3", **settings}
    fedloom.run("fedrep", dataset, out=folder / "run", **settings)
    data = make_data(configure("fedrep", dataset, values=settings))
    shutil.rmtree(dataset) if dataset.is_dir() else dataset.unlink()
    result = fedloom.load(folder / "run")
    model = result.model(result.models.names[1])
    with torch.no_grad():
        expected = model.network(data.prepare(data.x))
        found = torch.cat([model(sample) for sample in samples])
    torch.testing.assert_close(found, expected)
    assert model.predict(samples[3]) == [model.classes[int(expected[3].argmax())]]
    assert correct_numbers(result, samples, labels) == recorded_numbers(result)
    return model, samples


def test_rows_of_a_table(tmp_path):
    made = [list(row) for row in rows(60)]
    for i in (3, 7, 20):
        made[i][1] = ""
    for i in (4, 21):
        made[i][2] = ""
    names = ("client", "age", "sex", "label")
    samples = [{k: v or None for k, v in zip(names, row, strict=True) if k in ("age", "sex")} for row in made]
    model, _ = assert_predicts_what_users_have(
        write(tmp_path / "data.csv", csv(made)), tmp_path, samples, [row[3] for row in made], missing="mean"
    )
    table = pa.table({"age": [row["age"] for row in samples], "sex": [row["sex"] for row in samples]})
    assert model.predict(table) == [name for sample in samples for name in model.predict(sample)]
    assert model.predict([63.0, "f"]) == model.predict({"age": 63, "sex": "f"})
    with user_error("'age'"):
        model.predict({"sex": "f"})


def test_pictures(tmp_path):
    folder = pictures(tmp_path / "photos", clients=("a", "b", "c"), each=8)
    paths = sorted(folder.rglob("*.png"), key=lambda path: (path.parts[-3:-1], int(path.stem)))
    images = [Image.open(path).copy() for path in paths]
    labels = [path.parts[-2] for path in paths]
    kept = shutil.copytree(folder, tmp_path / "kept")
    model, _ = assert_predicts_what_users_have(folder, tmp_path, images, labels)
    copies = [kept / path.relative_to(folder) for path in paths]
    assert model.predict(copies[5]) == model.predict(str(copies[5])) == model.predict(images[5])
    assert model.predict(np.asarray(images[5])) == model.predict(images[5])
    assert model.predict(copies) == model.predict(images)


def test_texts(tmp_path):
    table = texts(30).to_pylist()
    names = TEXT_FEATURES["label"]["names"]
    made = [(row["client"], row["text"], names[row["label"]]) for row in table]
    samples, labels = [row[1] for row in made], [row[2] for row in made]
    path = write(tmp_path / "data.csv", csv(made, "client,text,label"))
    model, _ = assert_predicts_what_users_have(path, tmp_path, samples, labels, text="text")
    assert model.predict(samples) == [name for sample in samples for name in model.predict(sample)]
    assert model.predict({"text": samples[0]}) == model.predict(samples[0])


# -- runs that were stacked


def test_the_models_of_a_comparison(tmp_path):
    data = pixels()
    settings = {**SMALL, "plan": "stacked-eager"}
    made = fedloom.compare("fedproto", data, seeds=2, out=tmp_path / "mine", **settings)
    found = fedloom.load(tmp_path / "mine")
    assert found.board == made.board
    for method in ("local", "fedproto"):
        for seed in (0, 1):
            assert_models_as_recorded(found.run(method, seed), data)
    assert_same_weights(found.model(0, "fedproto", seed=1, when="last"), made.run("fedproto", 1).model(0, "last"))
    first = next(row["method"] for row in found.rows() if row["method"] in found.config["methods"])
    assert_same_weights(found.model("Oslo"), found.run(first, 0).model("Oslo"))
    with user_error("Unknown method of this comparison 'fedprot'", "did you mean 'fedproto'?"):
        found.model(0, "fedprot")
    with user_error("Unknown seed of this comparison '2'"):
        found.model(0, seed=2)
    with user_error("is a comparison", "load one of its runs"):
        fedloom.load(tmp_path / "mine", model=Normalised())


def test_a_comparison_without_a_folder_has_no_models():
    with user_error("kept no runs", "out=FOLDER"):
        fedloom.compare("fedavg", pixels(), seeds=1, **{**SMALL, "rounds": 1}).model(0)


def test_the_models_of_a_sweep(tmp_path):
    """Numbers differ between stacked runs; the models must have their own."""
    data = pixels()
    settings = {**SMALL, "plan": "stacked-eager"}
    del settings["lr"]
    grid = {"lr": [0.01, 0.2], "lam": [0.1, 2.0]}
    fedloom.sweep("ditto", data, grid=grid, seeds=1, out=tmp_path / "mine", **settings)
    folders = sorted((tmp_path / "mine" / "runs").glob("*/seed-*"))
    assert len(folders) == 4
    for folder in folders:
        assert_models_as_recorded(fedloom.load(folder), data)
    assert len(fedloom.load(tmp_path / "mine").table) == 4


# -- what is not kept


def test_without_the_best_round_only_the_last_one_is_to_be_had(tmp_path):
    data, settings = pixels(), {**SMALL, "keep": "last"}
    fedloom.run("fedavg", data, out=tmp_path / "run", **settings)
    assert {file.name for file in (tmp_path / "run" / "final").iterdir()} == {
        "server.safetensors", "clients.safetensors", "run.safetensors", "models_last.safetensors",
        "global_last.safetensors",
    }  # fmt: skip
    for result in (fedloom.load(tmp_path / "run"), fedloom.run("fedavg", data, **settings)):
        assert result.best_on_validation() is not result.last()
        with user_error("keep=best", "when=last"):
            result.model(0)
        with user_error("keep=best", "when=last"):
            result.global_model()
        mine, accuracy = rows_of(result, 0), recorded(result, result.last()["round"], 0, "pre_acc")
        assert_as_recorded(result.model(0, "last"), data.x[mine], data.y[mine], accuracy)


def test_without_any_model_final_is_empty(tmp_path):
    fedloom.run("fedavg", pixels(), out=tmp_path / "run", **SMALL, keep="none")
    assert list((tmp_path / "run" / "final").iterdir()) == []
    result = fedloom.load(tmp_path / "run")
    for ask in (result.model, lambda _: result.global_model(), lambda _: result.server):
        with user_error("keep=none", "run it again"):
            ask(0)


def test_an_unfinished_run_has_no_models_yet(tmp_path):
    settings = {**SMALL, "checkpoint_every": 1}
    with pytest.raises(Crash):
        fedloom.run("fedavg", pixels(), out=tmp_path / "run", on_round=crash_after(2), **settings)
    with user_error("is not finished", "--resume"):
        fedloom.load(tmp_path / "run").model(0)


def test_models_and_methods_that_were_made_in_python_are_given_again(tmp_path):
    data = pixels()
    fedloom.run("fedavg", data, out=tmp_path / "run", model=Normalised(), **TASK)
    with user_error("'Normalised' was made in Python", "fedloom.load(FOLDER, model=...)"):
        fedloom.load(tmp_path / "run").model(0)
    for given in (Normalised(), Normalised):  # a module, or a function that makes one
        assert_models_as_recorded(fedloom.load(tmp_path / "run", model=given), data)
    with user_error("does not fit the trained weights", "'bias'"):
        fedloom.load(tmp_path / "run", model=nn.Linear(6, 4)).model(0)


def test_the_result_of_a_run_knows_the_model_that_it_was_given(tmp_path):
    data = pixels()
    result = fedloom.run("fedavg", data, out=tmp_path / "run", model=Normalised(), **TASK)
    assert_models_as_recorded(result, data)


@pytest.mark.parametrize("name", ["models_best", "models_last"])
@pytest.mark.parametrize("how", [lambda file: file.write_bytes(b""), lambda file: file.unlink(), flip])
def test_a_damaged_file_of_models_is_one_sentence(name, how, done, tmp_path):
    folder = shutil.copytree(done.folder, tmp_path / "run")
    result = fedloom.load(folder)
    how(folder / "final" / f"{name}.safetensors")
    with user_error("is damaged", f"final/{name}.safetensors"):
        result.model(0, name.removeprefix("models_"))
    other = {"models_best": "last", "models_last": "best"}[name]
    assert_same_weights(result.model(0, other), done.model(0, other))  # which are in another file


def test_damaged_preprocessing_is_one_sentence(done, tmp_path):
    folder = shutil.copytree(done.folder, tmp_path / "run")
    (folder / "preprocessing.json").write_text("{}")
    with user_error("is damaged", "preprocessing.json"):
        fedloom.load(folder).model(0)


def test_a_run_of_format_2_has_no_models(done, tmp_path):
    """Until format 2, there was neither preprocessing.json nor a model in final/."""
    folder = shutil.copytree(done.folder, tmp_path / "run")
    manifest = Manifest(folder)
    manifest.load()
    manifest.remove(["preprocessing.json", "final/models_last.safetensors", "final/models_best.safetensors"])
    with user_error("older FedLoom", "run it again"):
        fedloom.load(folder).model(0)
