"""Data that are given to `fedloom.run` as objects: data frames, torch data sets, arrays, Hugging Face data sets."""

from types import SimpleNamespace

import numpy as np
import owndata
import pyarrow as pa
import pytest
import torch
from PIL import Image
from sentences import user_error
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

import fedloom
from fedloom.data.sets.own import Given, ObjectData


class Frame:
    """What FedLoom uses of a pandas.DataFrame."""

    def __init__(self, columns):
        self._values = columns
        self.columns = list(columns)

    def __getitem__(self, name):
        return self._values[name]


class HuggingFace:
    """What FedLoom uses of a datasets.Dataset."""

    def __init__(self, table, features, indices=None):
        self.data = SimpleNamespace(table=table)
        self.features = SimpleNamespace(to_dict=lambda: features)
        self._indices = None if indices is None else pa.table({"indices": indices})


class Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.full((3,), float(i)), i % 2) for i in range(20)])


def columns():
    site, age, sex, outcome = map(list, zip(*owndata.rows(60), strict=True))
    return {"site": site, "age": age, "sex": sex, "diagnosis": outcome}


def tensors(n=30, seed=0):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long())


def samples(given, **settings):
    return ObjectData(given=Given(given), **settings)._read()


@pytest.mark.parametrize("make", [Frame, pa.table], ids=["data frame", "arrow"])
def test_a_data_frame_is_read_like_the_same_file(make, tmp_path):
    path = owndata.write(tmp_path / "a.csv", owndata.csv(owndata.rows(60), "site,age,sex,diagnosis"))
    settings = {"label": "diagnosis", "client": "site", "rounds": 2, "plan": "stacked-eager"}
    given, read = fedloom.run("ditto", make(columns()), **settings), fedloom.run("ditto", path, **settings)
    assert given.rounds == read.rounds
    assert given.config["dataset"] == {"name": make(columns()).__class__.__name__, "own": True, "label": "diagnosis",
                                       "client": "site"}  # fmt: skip
    row = {"age": 70.0, "sex": "f"}
    assert given.model("Paris").predict(row) == read.model("Paris").predict(row)


def test_a_mistake_in_a_data_frame_names_the_row():
    with user_error("row 7", "'age'", "missing=mean"):
        samples(Frame({**columns(), "age": [None if i == 7 else float(i) for i in range(60)]}), label="diagnosis")
    with user_error("no column 'diagnose'", "did you mean 'diagnosis'?"):
        samples(Frame(columns()), label="diagnose")


def test_pandas_and_polars():
    import pandas

    frame = pandas.DataFrame(columns())
    assert samples(frame, label="diagnosis", client="site").clients == owndata.SITES
    import polars

    same = samples(polars.from_pandas(frame), label="diagnosis", client="site")
    assert np.array_equal(same.x, samples(frame, label="diagnosis", client="site").x)


def test_a_hugging_face_data_set_has_names_of_classes_and_its_selection():
    table = pa.table({"age": [float(i) for i in range(40)], "label": [i % 2 for i in range(40)]})
    features = {"age": {"dtype": "float64", "_type": "Value"}, "label": {"names": ["no", "yes"], "_type": "ClassLabel"}}
    found = samples(HuggingFace(table, features, list(range(10, 30))))
    assert found.classes == ("no", "yes")
    assert found.x[:, 0].tolist() == list(range(10, 30))
    both = samples({"train": HuggingFace(table, features), "test": HuggingFace(table, features)})
    assert both.split.tolist() == ["train"] * 40 + ["test"] * 40


def test_data_sets_by_client(tmp_path):
    given = {
        "Paris": tensors(),
        "Rome": DataLoader(tensors(seed=1), shuffle=True),
        "Bonn": Subset(tensors(), range(20)),
    }
    found = samples(given)
    assert found.clients == ("Bonn", "Paris", "Rome")
    rome = found.x[found.client == 2]
    assert np.allclose(rome, tensors(seed=1).tensors[0])  # in the order of the data set, not of the loader
    result = fedloom.run("ditto", given, rounds=2, out=tmp_path / "run")
    more = fedloom.run("ditto", given, rounds=3, out=tmp_path / "run", resume=True)
    assert result.last()["round"] == 2
    assert more.last()["round"] == 3


@pytest.mark.parametrize(
    "given",
    [
        tensors(),
        tensors().tensors,
        [tensors(), tensors()],
        [tensors().tensors, tensors().tensors],
        Items(list(tensors())),
        list(tensors()),
        Stream(),
        Items([("good film" if i % 2 else "bad film", i % 2) for i in range(20)]),
    ],
    ids=["one", "pair", "list", "list of pairs", "items", "list of items", "iterable", "texts"],
)
def test_forms(given):
    assert fedloom.run("fedavg", given, clients=2, rounds=1).last()["round"] == 1


def test_a_client_may_have_its_own_split():
    one = {"train": tensors(20), "val": tensors(4, 1), "test": tensors(6, 2)}
    given = {"a": one, "b": one}
    assert samples(given).split.tolist() == (["train"] * 20 + ["val"] * 4 + ["test"] * 6) * 2
    assert fedloom.run("fedavg", given, rounds=1).config["pool"] == "separate"


def test_pictures_stay_pixels_and_floats_stay_as_they_are():
    draw = np.random.default_rng(0)
    pixels = [draw.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in range(20)]
    found = samples(Items([(Image.fromarray(picture), i % 2) for i, picture in enumerate(pixels)]))
    assert found.x.dtype == np.uint8
    assert np.array_equal(found.x[3], pixels[3].transpose(2, 0, 1))
    floats = torch.rand(20, 1, 8, 8)
    found = samples((floats, torch.arange(20) % 2))
    assert found.scaling is None
    assert np.array_equal(found.x, floats.numpy())


def test_a_call_reads_the_data_once():
    class Counting(Items):
        reads = 0

        def __getitem__(self, i):
            Counting.reads += 1
            return self.items[i]

    fedloom.compare(["fedavg", "ditto"], Counting(list(tensors())), seeds=2, rounds=1, clients=2)
    assert Counting.reads == 30


MISTAKES = {
    "shapes": (lambda: {"a": tensors(), "b": Items([(torch.zeros(3 + i), 0) for i in range(2)])}, "'b', sample 1"),
    "clients' shapes": (lambda: [tensors(), (torch.zeros(9, 5), torch.zeros(9))], "Client '1'"),
    "no pair": (lambda: Items([{"x": 1}]), "not a pair (x, y) but 'dict'"),
    "empty": (lambda: {"a": tensors(), "b": Items([])}, "Client 'b' has no samples"),
    "unknown": (lambda: 5, "'int'"),
    "type": (lambda: fedloom.OwnData, "no samples can be read"),
    "array": (lambda: np.zeros((3, 3)), "'ndarray'"),
    "nobody": (lambda: {}, "is empty"),
    "mixed": (lambda: {"a": tensors(), "b": Frame(columns())}, "same kind"),
    "sampler": (lambda: DataLoader(tensors(), sampler=SubsetRandomSampler([1, 2])), "torch.utils.data.Subset"),
    "no test": (lambda: {"a": {"train": tensors()}, "b": {"train": tensors()}}, "train, test and perhaps val"),
    "half a split": (lambda: {"a": {"train": tensors(), "test": tensors()}, "b": tensors()}, "Client 'b' has no split"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_used_gets_a_sentence(name):
    make, words = MISTAKES[name]
    with user_error(words):
        fedloom.run("fedavg", make(), rounds=1)


def test_settings_that_do_not_fit():
    with user_error("label names a column"):
        samples(tensors(), label="y")
    with user_error("delimiter is for data in files"):
        samples(Frame(columns()), delimiter=",")
