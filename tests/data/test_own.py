"""What is made of user data: numbers by hand, and the same from every layout."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from owndata import TEXT_FEATURES, arrays, csv, hugging_face, pictures, png, rows, texts, write
from PIL import Image
from sentences import user_error

import fedloom
from fedloom.config.resolve import configure, describe, resolve
from fedloom.data.divide import divide, validated
from fedloom.data.partitions import DirichletClass, Natural
from fedloom.data.sets.own import OwnData
from fedloom.studies.build import make_data

GOOD = rows()


def load(path, **settings):
    return OwnData(str(path), **settings).load(None, 20, 1)


def client_of_each_sample(raw):
    """Names of clients."""
    found = np.empty(len(raw.y), dtype=object)
    for name, mine in zip(raw.client_names, raw.natural, strict=True):
        found[mine] = name
    return found.tolist()


# -- tables


def test_a_table_becomes_numbers_classes_and_clients(tmp_path):
    made = [("Rome", 30, "no", "1e2", "ill"), ("Paris", 40, "yes", -2.5, "well"), ("Rome", " 50 ", "no", 0, "ill")]
    text = csv([*made, ("Paris", 60, "", 7, "ill")], "client,age,smoker,pressure,label")
    raw = load(write(tmp_path / "data.csv", text), missing="zero", normalise=False)
    assert raw.x.dtype == np.float32
    # age, smoker=no, smoker=yes, pressure; a missing word is none of the words
    assert raw.x.tolist() == [[30, 1, 0, 100], [40, 0, 1, -2.5], [50, 1, 0, 0], [60, 0, 0, 7]]
    assert raw.y.tolist() == [0, 1, 0, 0]
    assert raw.class_names == ("ill", "well")
    assert raw.client_names == ("Paris", "Rome")
    assert client_of_each_sample(raw) == ["Rome", "Paris", "Rome", "Paris"]


@pytest.mark.parametrize(
    ("given", "names", "ids"),
    [
        (["10", "9", "-1", "9"], ("-1", "9", "10"), [2, 1, 0, 1]),  # numbers in the order of numbers
        (["3.0", "1.0", "3", "1"], ("1", "3"), [1, 0, 1, 0]),  # whole numbers as a table with gaps has them
        (["b", "10", "9", "b"], ("10", "9", "b"), [2, 0, 1, 2]),  # words in alphabetical order
        (["true", "false", "true", "true"], ("false", "true"), [1, 0, 1, 1]),
    ],
)
def test_labels_of_any_kind_are_numbered_in_their_order(given, names, ids, tmp_path):
    text = csv([(i, label) for i, label in enumerate(given)] * 2, "age,y")
    raw = load(write(tmp_path / "data.csv", text))
    assert raw.class_names == names
    assert raw.y.tolist() == ids * 2


def test_numbers_are_standardised_by_the_training_samples_alone(tmp_path):
    parts = ["train", "train", "test", "train", "test", "train", "test", "test"]
    ages = [10, 20, 1000, 30, -1000, 40, 0, 5]
    sex = ["f", "m"] * 4
    made = [("ab"[i // 4], ages[i], sex[i], "xy"[i % 2], parts[i]) for i in range(8)]
    path = write(tmp_path / "data.csv", csv(made, "client,age,sex,label,split"))
    data = validated(divide(load(path), Natural(), 2, source="separate"))
    # client a trains on 10, 20, 30 and b on 40: mean 25, variance (15^2 + 5^2 + 5^2 + 15^2) / 4 = 125
    expected = [(age - 25) / np.sqrt(125) for age in ages]
    np.testing.assert_allclose(data.x[:, 0], expected, rtol=1e-12)
    assert data.x[:, 1].tolist() == [1, 0] * 4  # which of two words it is stays 0 or 1


def test_missing_numbers_become_the_mean_of_the_training_samples(tmp_path):
    made = [("a", "", "x", "train"), ("a", 2, "y", "train"), ("a", 100, "x", "test")]
    made += [("b", 6, "x", "train"), ("b", "NA", "y", "test")]
    path = write(tmp_path / "data.csv", csv(made, "client,age,label,split"))
    data = validated(divide(load(path, missing="mean", normalise=False), Natural(), 2, source="separate"))
    assert data.x[:, 0].tolist() == [4, 2, 100, 6, 4]  # (2 + 6) / 2
    scaled = validated(divide(load(path, missing="mean"), Natural(), 2, source="separate"))
    assert scaled.x[:, 0].tolist() == [0, -1, 48, 1, 0]  # mean 4, standard deviation 2


def test_rows_with_missing_values_can_be_left_out(tmp_path):
    made = [list(row) for row in GOOD]
    made[4][1] = ""
    raw = load(write(tmp_path / "data.csv", csv(made)), missing="drop")
    assert len(raw.x) == 29
    np.testing.assert_allclose(raw.x[:, 0], [row[1] for i, row in enumerate(GOOD) if i != 4])


def test_a_constant_column_stays_finite(tmp_path):
    made = [(row[0], 0.1, row[3]) for row in GOOD]
    data = validated(divide(load(write(tmp_path / "data.csv", csv(made, "client,age,label"))), Natural(), 3))
    assert float(data.x.abs().max()) < 1e-12


LAYOUTS = {
    "csv": lambda d: write(d / "data.csv", csv(GOOD)),
    "semicolons": lambda d: write(d / "data.csv", csv(GOOD).replace(",", ";")),
    "tabs, byte order mark, Windows lines": lambda d: write(
        d / "data.tsv", b"\xef\xbb\xbf" + csv(GOOD).replace(",", "\t").replace("\n", "\r\n").encode()
    ),
    "an index without a name": lambda d: write(
        d / "data.csv", csv([(i, *r) for i, r in enumerate(GOOD)], ",client,age,sex,label")
    ),
    "blank lines": lambda d: write(d / "data.csv", csv(GOOD).replace("\n", "\n\n", 3) + "\n\n"),
    "parquet": lambda d: _parquet(d),
    "a file per client": lambda d: _per_site(d, "data/{}.csv"),
    "a folder per client": lambda d: _per_site(d, "data/{}/visits.csv"),
    "columns in another order": lambda d: _per_site(d, "data/{}.csv", reversed_columns="Paris"),
}


def _parquet(d):
    columns = zip(*GOOD, strict=True)
    pq.write_table(
        pa.table(dict(zip(("client", "age", "sex", "label"), map(list, columns), strict=True))), d / "d.parquet"
    )
    return d / "d.parquet"


def _per_site(d, name, reversed_columns=""):
    for site in ("Berlin", "Paris", "Rome"):
        mine = [row[1:] for row in GOOD if row[0] == site]
        text = (
            csv([row[::-1] for row in mine], "label,sex,age")
            if site == reversed_columns
            else csv(mine, "age,sex,label")
        )
        write(d / name.format(site), text)
    return d / "data"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_a_table_gives_the_same_samples(layout, tmp_path):
    raw = load(LAYOUTS[layout](tmp_path), normalise=False)
    found = sorted(zip(client_of_each_sample(raw), raw.x[:, 0].tolist(), raw.y.tolist(), strict=True))
    assert found == sorted((site, float(np.float32(age)), int(label == "well")) for site, age, _, label in GOOD)
    assert raw.client_names == ("Berlin", "Paris", "Rome")


# -- parts


def test_clients_are_trained_validated_and_tested_on_what_the_data_say(tmp_path):
    parts = ["train", "train", "val", "test", "test"] * 6
    made = [(*row, part) for row, part in zip(GOOD, parts, strict=True)]
    config = configure("fedavg", write(tmp_path / "data.csv", csv(made, "client,age,sex,label,split")))
    assert config.settings.pool == "separate"
    data = make_data(config)
    for name, part in (("train", "train"), ("val", "val"), ("test", "test")):
        for i, site in enumerate(data.client_names):
            wanted = [at for at, row in enumerate(made) if row[0] == site and row[4] == part]
            assert sorted(data.splits[name][i].tolist()) == wanted


def test_folders_for_training_and_test_are_parts_too(tmp_path):
    for part, n in (("train", 5), ("test", 2)):
        pictures(tmp_path / "data" / part, each=n)
    raw = load(tmp_path / "data")
    assert raw.client_names == ("a", "b")
    assert len(raw.official_test) == 2 * 2 * 2
    for name in ("train", "test"):
        write(tmp_path / f"tables/{name}.csv", csv(GOOD))
    raw = load(tmp_path / "tables")
    assert sorted(raw.official_test) == list(range(30)) or sorted(raw.official_test) == list(range(30, 60))
    assert raw.client_names == ("Berlin", "Paris", "Rome")


def test_clients_without_test_samples_are_left_out_and_names_stay_with_clients(tmp_path):
    made = [(*row, "train" if row[0] == "Paris" or i % 2 else "test") for i, row in enumerate(GOOD)]
    raw = load(write(tmp_path / "data.csv", csv(made, "client,age,sex,label,split")))
    data = divide(raw, Natural(), 3, source="separate")
    assert data.client_names == ("Berlin", "Rome")
    assert set(data.splits["train"][1].tolist()) == {i for i, row in enumerate(made) if row[0] == "Rome" and i % 2}
    data = divide(raw, Natural(), 3, subset=1, seed=3)
    (name,) = data.client_names
    assert {made[i][0] for i in data.splits["train"][0].tolist()} == {name}


def test_data_without_clients_are_divided_by_a_partition(tmp_path):
    path = write(tmp_path / "data.csv", csv([row[1:] for row in rows(400)], "age,sex,label"))
    config = configure("fedavg", path, values={"clients": 5})
    assert isinstance(config.partition, DirichletClass)
    data = make_data(config)
    assert (data.clients, data.client_names) == (5, ())
    assert data.class_names == ("ill", "well")


def test_a_client_column_can_be_disregarded(tmp_path):
    raw = load(write(tmp_path / "data.csv", csv(GOOD)), client="none")
    assert raw.natural is None
    assert raw.x.shape == (30, 3)  # age, two sexes


# -- pictures


def test_pixels_are_kept_and_folders_name_clients_and_classes(tmp_path):
    folder = pictures(tmp_path / "data", clients=("b", "a"), classes=("dog", "cat"), each=3, size=(6, 9))
    write(folder / "a/cat/notes.txt", "not a picture")
    raw = load(folder)
    assert (raw.x.dtype, raw.x.shape) == (np.uint8, (12, 3, 9, 6))
    assert (raw.class_names, raw.client_names) == (("cat", "dog"), ("a", "b"))
    first = np.asarray(Image.open(folder / "a/cat/0.png"))
    at = next(i for i in raw.natural[0] if raw.y[i] == 0)
    np.testing.assert_array_equal(raw.x[at], first.transpose(2, 0, 1))


def test_grey_and_coloured_pictures_mix_and_sizes_are_made_equal_when_asked(tmp_path):
    folder = pictures(tmp_path / "data", clients=(), each=2, size=(8, 8))
    assert load(folder).natural is None
    write(folder / "dog/grey.png", png((12, 10), 5, "L"))
    with user_error("2 sizes", "12x10", "resize=8"):
        load(folder)
    raw = load(folder, resize=8)
    assert raw.x.shape == (5, 3, 8, 8)
    assert (raw.x[4] == raw.x[4][:1]).all()  # grey: three equal channels
    for file in folder.rglob("*.png"):
        Image.open(file).convert("L").resize((4, 4)).save(file)
    assert load(folder).x.shape == (5, 1, 4, 4)


# -- arrays


def test_arrays_are_tables_pictures_or_sequences_by_their_shape(tmp_path):
    draw = np.random.default_rng(0)
    y, client = np.array(["no", "yes"] * 6), np.repeat([10, 9, 2], 4)
    cases = {
        "table": (draw.normal(size=(12, 5)), {}, (12, 5), "mlp"),
        "grey": (draw.integers(0, 256, (12, 28, 28), dtype=np.uint8), {}, (12, 1, 28, 28), "cnn4"),
        "channels last": (draw.integers(0, 256, (12, 10, 10, 3), dtype=np.uint8), {}, (12, 3, 10, 10), "cnn8"),
        "sequence": (draw.normal(size=(12, 7, 3)), {}, (12, 7, 3), "mlp"),
        "tokens": (draw.integers(0, 50, (12, 7)), {"kind": "sequence"}, (12, 7), "fasttext"),
    }
    for name, (x, settings, shape, model) in cases.items():
        path = arrays(tmp_path / f"{name}.npz", x=x, y=y, client=client)
        raw = load(path, **settings)
        assert raw.x.shape == shape, name
        assert raw.client_names == ("2", "9", "10")
        assert raw.class_names == ("no", "yes")
        assert configure("fedavg", path, values=settings).model.name == model
        assert raw.vocab == (x.max() + 1 if name == "tokens" else None)
        expected = np.stack([x[..., c] for c in range(3)], 1) if name == "channels last" else x.reshape(shape)
        np.testing.assert_array_equal(raw.x, expected)


def test_a_file_of_arrays_per_client(tmp_path):
    for i, name in enumerate(("b", "a")):
        arrays(tmp_path / f"data/{name}.npz", x=np.full((4, 2), i), y=[0, 1, 1, 0])
    raw = load(tmp_path / "data", normalise=False)
    assert raw.client_names == ("a", "b")
    assert [raw.x[mine].mean() for mine in raw.natural] == [1, 0]


def test_a_federation_from_arrays_in_one_call():
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 4)), np.array(["no", "yes"] * 30)
    data = fedloom.federation(x, y, np.repeat(["b", "a", "c"], 20))
    assert (data.client_names, data.class_names) == (("a", "b", "c"), ("no", "yes"))
    assert sorted(torch.cat([rows[0] for rows in data.splits.values()]).tolist()) == list(range(20, 40))
    assert data.x.dtype == torch.float32
    assert fedloom.run("local", data, rounds=1).last()["round"] == 1
    divided = fedloom.federation(x, y, partition="iid", count=6)
    assert divided.clients == 6
    tokens = fedloom.federation(draw.integers(0, 9, (60, 4)), y, vocab=9, count=3)
    assert (tokens.x.dtype, tokens.vocab) == (torch.int64, 9)
    for bad, words in (
        ((x, y[:-1]), ["60 samples in x, but 59 in y"]),
        ((np.where(np.arange(60)[:, None] == 7, np.nan, x), y), ["Sample 7", "not a finite number"]),
        ((x, y, ["a "] + ["a"] * 59), ["Sample 0", "alike"]),
    ):
        with user_error(*words):
            fedloom.federation(*bad, count=3)


# -- Hugging Face


def test_a_hugging_face_data_set_on_disk(tmp_path):
    table = texts(24)
    folder = hugging_face(tmp_path / "data", [table.slice(0, 10), table.slice(10)], TEXT_FEATURES)
    raw = load(folder)
    assert raw.class_names == ("bad", "good")
    assert raw.y.tolist() == [0, 1] * 12
    assert raw.client_names == ("Berlin", "Paris", "Rome")
    # words by frequency, of equals in alphabetical order: <pad> <unk> a(24) bad day good night number such ...
    assert raw.x[0].tolist() == [8, 2, 3, 6, 9]  # such a bad night 0
    assert raw.x[1][:4].tolist() == [2, 5, 4, 7]  # a good day number
    assert raw.vocab == 2 + 7 + 24
    assert configure("fedavg", folder).model.name == "fasttext"


def test_splits_and_pictures_of_a_hugging_face_data_set(tmp_path):
    def table(n, seed):
        images = [{"bytes": png((5, 4), seed + i), "path": None} for i in range(n)]
        return pa.table({"image": images, "label": [i % 2 for i in range(n)]})

    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    write(tmp_path / "data/dataset_dict.json", '{"splits": ["train", "test", "unsupervised"]}')
    hugging_face(tmp_path / "data/train", [table(6, 0)], features)
    hugging_face(tmp_path / "data/test", [table(4, 50)], features)
    raw = load(tmp_path / "data")
    assert (raw.x.dtype, raw.x.shape) == (np.uint8, (10, 3, 4, 5))
    assert raw.official_test.tolist() == [6, 7, 8, 9]
    np.testing.assert_array_equal(raw.x[6], np.asarray(Image.open(io.BytesIO(png((5, 4), 50)))).transpose(2, 0, 1))


# -- as a data set among others


def test_a_path_is_absolute_in_a_configuration_and_resolves_again(tmp_path, monkeypatch):
    write(tmp_path / "data.csv", csv(GOOD))
    monkeypatch.chdir(tmp_path)
    config = configure("fedavg", "data.csv", values={"ignore": "sex"})
    described = describe(config)
    assert described["dataset"]["path"] == str(tmp_path / "data.csv")
    assert described["dataset"]["ignore"] == ["sex"]
    assert described["partition"]["name"] == "natural"
    monkeypatch.chdir("/")
    assert describe(resolve(described)) == described
    assert resolve({"dataset": str(tmp_path / "data.csv")}).dataset == OwnData(str(tmp_path / "data.csv"))


def test_a_name_is_a_name_even_where_a_folder_has_it(tmp_path, monkeypatch):
    write(tmp_path / "digits/data.csv", csv(GOOD))
    monkeypatch.chdir(tmp_path)
    assert configure(dataset="digits").dataset.name == "digits"
    assert configure(dataset="./digits").dataset == OwnData(str(tmp_path / "digits"))
    with user_error("Unknown data set 'hospital'"):
        configure(dataset="hospital")


def test_files_that_change_are_read_again(tmp_path):
    path = write(tmp_path / "data.csv", csv(GOOD))
    assert len(load(path).y) == 30
    write(path, csv([*GOOD, GOOD[0]]))
    assert len(load(path).y) == 31


def test_results_of_runs_beside_the_data_are_not_read(tmp_path):
    write(tmp_path / "data.csv", csv(GOOD))
    for folder, files in {
        "finished": ("config.yaml", "partition.parquet"), "unfinished": ("config.yaml", "checkpoints/1.safetensors"),
        "compared": ("compare.yaml", "leaderboard.csv"), "swept": ("sweep.yaml", "sweep.csv"),
    }.items():  # fmt: skip
        for name in (*files, "rounds.parquet"):
            write(tmp_path / "runs" / folder / name, "")
    assert len(load(tmp_path).y) == 30


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_run_starts_on_values_that_are_not_finite(value):
    data = fedloom.federation(np.zeros((20, 3)), [0, 1] * 10, ["a", "b"] * 10)
    data.x[13, 1] = value
    with user_error("Sample 13", "not a finite number"):
        fedloom.run("fedavg", data, rounds=1)


def test_no_run_starts_on_labels_out_of_range():
    data = fedloom.federation(np.zeros((20, 3)), [0, 1] * 10, ["a", "b"] * 10)
    data.y[4] = 2
    with user_error("Sample 4", "label outside 0 to 1"):
        fedloom.run("fedavg", data, rounds=1)
