"""New samples are encoded as the training data were: the same rows give the same bits, and mistakes one sentence."""

import json
import lzma
import os
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from owndata import TEXT_FEATURES, arrays, csv, hugging_face, pictures, png, rows, texts, write
from PIL import Image
from sentences import user_error

import fedloom
from fedloom.core.errors import UserError
from fedloom.core.preprocessing import Preprocessing
from fedloom.data.divide import divide, hold_out, validated
from fedloom.data.partitions import Iid, Natural
from fedloom.data.sets.agnews import AgNews
from fedloom.data.sets.own import OwnData
from fedloom.data.sets.shakespeare import Shakespeare
from fedloom.data.text import next_words
from fedloom.data.user_data.issues import Issues
from fedloom.data.user_data.new_samples import encode, read_new_samples

HEADER = "client,age,sex,pressure,smoker,label"
NAN = float("nan")


def patients(n=40, seed=0):
    """Rows of HEADER without gaps."""
    draw = np.random.default_rng(seed)
    return [
        [*row[:3], round(float(draw.normal(130, 20)), 2), ("True", "False")[int(draw.integers(2))], row[3]]
        for row in rows(n, seed)
    ]


def with_gaps(made):
    """Numbers and words are missing here and there."""
    made = [list(row) for row in made]
    for i in (3, 8, 20):
        made[i][1] = ("", "NA", "?")[i % 3]
    made[5][2] = made[11][4] = ""
    return made


def dictionaries(made):
    return [dict(zip(HEADER.split(","), row, strict=True)) for row in made]


def train(path, dtype=torch.float32, held_out=0, **settings):
    """The federation of a run on this data, before its device is chosen, and its preprocessing after a round trip."""
    raw = OwnData(str(path), **settings).load(None, 20, 1)
    data = divide(raw, Iid() if raw.natural is None else Natural(), 3)
    data = validated(hold_out(data, held_out, 1) if held_out else data).to(torch.device("cpu"), dtype)
    saved = json.loads(json.dumps(data.preprocessing_or_default().to_json()))
    return data, Preprocessing.from_json(saved)


def scaled(preprocessing, x, dtype=torch.float32):
    return preprocessing.scale(torch.from_numpy(x), dtype)


def assert_same(data, x):
    """Encoded samples become what the network receives in training, bit for bit."""
    preprocessing = data.preprocessing_or_default()
    assert x.shape[1:] == preprocessing.shape
    assert str(x.dtype) == preprocessing.dtype
    made, expected = scaled(preprocessing, x, data.dtype), data.prepare(data.x)
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)


def warnings_of(preprocessing, values):
    issues = Issues()
    encode(preprocessing, values, issues)
    return [sentence for _, sentence in issues.warnings]


@pytest.fixture
def model(tmp_path):
    """The preprocessing of a model for patients."""
    return train(write(tmp_path / "train.csv", csv(patients(), HEADER)))[1]


# -- the training data again


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("missing", ["refuse", "mean", "zero", "drop"])
def test_rows_of_the_training_table_give_its_samples(missing, normalise, dtype, tmp_path):
    made = patients() if missing == "refuse" else with_gaps(patients())
    path = write(tmp_path / "data.csv", csv(made, HEADER))
    data, preprocessing = train(path, dtype, held_out=1, missing=missing, normalise=normalise)
    kept = [row for row in made if missing != "drop" or ("" not in row and row[1] not in ("NA", "?"))]
    assert_same(data, encode(preprocessing, dictionaries(kept)))
    again = write(tmp_path / "new.csv", csv([row[::-1] for row in kept], ",".join(HEADER.split(",")[::-1])))
    new = read_new_samples(preprocessing, again)  # with columns in another order
    assert_same(data, new.x)
    assert new.y.tolist() == data.y.tolist()
    assert new.client.tolist() == [row[0] for row in kept]
    assert new.where(4) == f"{again}, row 6"
    assert new.remarks == new.warnings


@pytest.mark.parametrize(
    ("mode", "size", "settings"), [("L", (8, 8), {}), ("RGB", (6, 9), {}), ("RGB", (12, 10), {"resize": 5})]
)
def test_pictures_of_the_training_folder_give_its_samples(mode, size, settings, tmp_path):
    for i in range(12):
        write(tmp_path / f"data/{'ab'[i % 2]}/{('cat', 'dog')[i // 6]}/{i:02}.png", png(size, i, mode))
    data, preprocessing = train(tmp_path / "data", **settings)
    new = read_new_samples(preprocessing, tmp_path / "data")
    assert_same(data, new.x)
    assert new.y.tolist() == data.y.tolist()
    assert new.client.tolist() == ["a"] * 6 + ["b"] * 6
    assert new.warnings == ()
    paths = [new.where(i) for i in range(12)]
    assert_same(data, encode(preprocessing, paths))
    opened = [Image.open(path) for path in paths]
    assert_same(data, encode(preprocessing, opened))
    assert_same(data, encode(preprocessing, [np.asarray(image) for image in opened]))  # channels last
    assert_same(data, encode(preprocessing, np.stack([np.asarray(image) for image in opened])))
    np.testing.assert_array_equal(encode(preprocessing, paths[0]), new.x[:1])


def test_texts_of_the_training_table_give_its_samples(tmp_path):
    table = texts(24)
    for settings in ({}, {"words": 5, "length": 3}):
        data, preprocessing = train(hugging_face(tmp_path / "data", [table], TEXT_FEATURES), **settings)
        given = table["text"].to_pylist()
        for values in (given, np.array(given), table, [{"text": text} for text in given]):
            assert_same(data, encode(preprocessing, values))
        new = read_new_samples(preprocessing, tmp_path / "data")
        assert_same(data, new.x)
        assert new.y.tolist() == data.y.tolist()
        assert new.client.tolist() == table["client"].to_pylist()
        lines = read_new_samples(preprocessing, write(tmp_path / "new.txt", "\ufeff" + "\r\n\n".join(given)))
        assert_same(data, lines.x)
        assert (lines.y, lines.client) == (None, None)
        assert lines.where(1) == f"{tmp_path / 'new.txt'}, row 3"


ARRAYS = {
    "table": (lambda draw: draw.normal(5, 3, (12, 4)), {}),
    "sequence": (lambda draw: draw.normal(5, 3, (12, 7, 3)), {}),
    "numbers as they are": (lambda draw: draw.normal(5, 3, (12, 7, 3)), {"normalise": False}),
    "grey": (lambda draw: draw.integers(0, 256, (12, 9, 8), dtype=np.uint8), {}),
    "colour": (lambda draw: draw.integers(0, 256, (12, 3, 9, 8), dtype=np.uint8), {}),
    "channels last": (lambda draw: draw.integers(0, 256, (12, 9, 8, 3), dtype=np.uint8), {}),
    "pictures of numbers": (lambda draw: draw.normal(5, 3, (12, 9, 8, 3)), {}),
    "tokens": (lambda draw: draw.integers(0, 50, (12, 7)), {"kind": "sequence"}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_the_training_data_give_its_samples(name, dtype, tmp_path):
    make, settings = ARRAYS[name]
    x, y = make(np.random.default_rng(0)), np.array(["no", "yes"] * 6)
    path = arrays(tmp_path / "data.npz", x=x, y=y, client=np.arange(12) % 3)
    data, preprocessing = train(path, dtype, **settings)
    for values in (x, torch.from_numpy(x), list(x)):
        assert_same(data, encode(preprocessing, values))
    np.testing.assert_array_equal(encode(preprocessing, x[3]), encode(preprocessing, x)[3:4])
    new = read_new_samples(preprocessing, path)
    assert_same(data, new.x)
    assert new.y.tolist() == data.y.tolist()
    assert new.client.tolist() == [str(i % 3) for i in range(12)]
    bare = read_new_samples(preprocessing, arrays(tmp_path / "bare.npz", x=x))
    assert (bare.y, bare.client) == (None, None)
    assert_same(data, bare.x)


def test_a_federation_from_arrays_knows_its_preprocessing():
    draw = np.random.default_rng(0)
    x, y = draw.normal(9, 4, (60, 4)), ["no", "yes"] * 30
    for normalise in (True, False):
        data = validated(fedloom.federation(x, y, count=4, normalise=normalise)).to(torch.device("cpu"), torch.float32)
        assert data.preprocessing_or_default().classes == ("no", "yes")
        assert_same(data, encode(data.preprocessing_or_default(), x))


def test_statistics_are_those_of_the_participants_training_samples(tmp_path):
    data, preprocessing = train(write(tmp_path / "data.csv", csv(patients(), HEADER)), held_out=1)
    ages = np.array([row[1] for row in patients()])[data.participants().splits["train"].flat.numpy()]
    assert preprocessing.numbers.mean[0] == preprocessing.numbers.fill[0] == ages.mean()
    assert preprocessing.numbers.std[0] == ages.std()
    assert [column.name for column in preprocessing.columns] == ["age", "sex", "pressure", "smoker"]
    assert [column.words for column in preprocessing.columns] == [None, ("f", "m"), None, ("False", "True")]
    assert (preprocessing.label, preprocessing.client, preprocessing.split) == ("label", "client", None)


# -- built-in texts


def test_the_text_of_a_news_item_gives_its_sample(tmp_path):
    train_texts, test_texts = ["Wall St. Bears", "Oil and, oil"], ['Bears in "space"']
    for name, lines in (("train", train_texts), ("test", test_texts)):
        write(tmp_path / f"{name}.csv", "".join('"1","{}"\n'.format(line.replace('"', '""')) for line in lines))
    raw = AgNews(length=4).load(tmp_path, 20, 1)
    np.testing.assert_array_equal(encode(raw.preprocessing, train_texts + test_texts), raw.x)
    assert raw.preprocessing.classes == ("World", "Sports", "Business", "Sci/Tech")


def test_a_sentence_is_the_start_of_which_the_next_words_are_predicted():
    users = [[["how", "do", "i", "sort"], ["i", "don't"], ["do", "sort"]]]
    raw = next_words(users, words=4, length=3, tokenizer="spaces")
    np.testing.assert_array_equal(encode(raw.preprocessing, [" ".join(words) for words in users[0]]), raw.x)
    assert raw.preprocessing.classes == raw.preprocessing.vocabulary.words
    assert len(raw.preprocessing.classes) == raw.classes


def test_of_a_longer_text_the_last_characters_count(tmp_path):
    text = "To be, or not to be ü?"
    content = json.dumps([{"play": "P", "role": "A", "speeches": [text]}]).encode()
    write(tmp_path / "roles.json.xz", lzma.compress(content))
    raw = Shakespeare(windows=None, server_windows=0, min_windows=0, stride=1, length=4).load(tmp_path, 1, 1)
    windows = [text[: i + 4] for i in range(len(text) - 4)]
    np.testing.assert_array_equal(encode(raw.preprocessing, windows), raw.x)
    assert [raw.preprocessing.classes[c] for c in raw.y[:3]] == list("e, ")
    with user_error("Sample 1", "3 characters", "reads the last 4", "longer"):
        encode(raw.preprocessing, ["Hark!", "Hm?"])


# -- rows of tables in all forms


class DataFrame:
    """What FedLoom uses of pandas' class of this name."""

    def __init__(self, columns):
        self.columns, self._columns = list(columns), columns

    def __getitem__(self, name):
        return self._columns[name]


def test_rows_come_in_many_forms(model):
    made = patients(6, seed=1)
    features = [row[1:5] for row in made]
    age, sex, pressure, smoker = (list(column) for column in zip(*features, strict=True))
    expected = encode(model, dictionaries(made))
    columns = {"smoker": smoker, "age": age, "sex": sex, "pressure": pressure}
    forms = {
        "rows in the order of the columns": features,
        "tuples": [tuple(row) for row in features],
        "an array of objects": np.array(features, dtype=object),
        "a data frame": DataFrame(columns),
        "a table of PyArrow": pa.table(columns),
        "true and false, as pandas reads them": DataFrame({**columns, "smoker": [word == "True" for word in smoker]}),
        "numbers as text": DataFrame({**columns, "age": [f" {value} " for value in age]}),
        "numbers of NumPy and torch": [
            {**row, "age": np.float64(row["age"]), "pressure": torch.tensor(row["pressure"], dtype=torch.float64)}
            for row in dictionaries(made)
        ],
        "spaces around names and words": DataFrame({f" {k} ": [f" {v} " for v in c] for k, c in columns.items()}),
        "encoded already": expected,
        "an encoded tensor": torch.from_numpy(expected),
    }
    for name, values in forms.items():
        np.testing.assert_array_equal(encode(model, values), expected, err_msg=name)
    for row in (dictionaries(made)[2], features[2], tuple(features[2]), np.array(features[2], dtype=object)):
        np.testing.assert_array_equal(encode(model, row), expected[2:3])
    assert warnings_of(model, dictionaries(made)) == []


def test_arrays_of_numbers_are_rows_if_all_columns_are_numbers(tmp_path):
    made = [(row[1], row[3], row[5]) for row in patients()]
    data, preprocessing = train(write(tmp_path / "data.csv", csv(made, "age,pressure,label")))
    x = np.array([row[:2] for row in made])
    for values in (x, torch.from_numpy(x), x.tolist()):
        assert_same(data, encode(preprocessing, values))
    assert encode(preprocessing, x[0]).shape == (1, 2)
    gap = encode(preprocessing, np.array([NAN, 120.0]))
    assert np.isnan(gap).tolist() == [[True, False]]
    with user_error("Sample 0", "3 values", "2 columns: age, pressure"):
        encode(preprocessing, [1, 2, 3])


def test_columns_besides_those_of_the_model_are_left_out_with_a_remark(model, tmp_path):
    made = [[*row[:5], "x"] for row in patients(4)]
    new = read_new_samples(model, write(tmp_path / "new.csv", csv(made, f"{HEADER[:-6]},ward")))
    assert new.remarks == ("Columns that the model does not use: ward.",)
    assert (new.y, new.warnings) == (None, ())


def test_files_of_clients_parquet_and_other_names_of_columns(model, tmp_path):
    made = patients(9, seed=2)
    expected = encode(model, dictionaries(made))
    for site in ("Berlin", "Paris", "Rome"):
        mine = [row[1:] for row in made if row[0] == site]
        write(tmp_path / f"sites/{site}.csv", csv(mine, HEADER[7:]))
    new = read_new_samples(model, tmp_path / "sites")
    assert new.client.tolist() == ["Berlin"] * 3 + ["Paris"] * 3 + ["Rome"] * 3
    np.testing.assert_array_equal(new.x, expected[[0, 3, 6, 1, 4, 7, 2, 5, 8]])
    names = ["site", "age", "sex", "pressure", "smoker", "outcome"]
    table = pa.table(dict(zip(names, map(list, zip(*made, strict=True)), strict=True)))
    pq.write_table(table, tmp_path / "new.parquet")
    plain = read_new_samples(model, tmp_path / "new.parquet")
    assert (plain.y, plain.client) == (None, None)
    new = read_new_samples(model, tmp_path / "new.parquet", label="outcome", client="site")
    np.testing.assert_array_equal(new.x, expected)
    assert new.client.tolist() == [row[0] for row in made]
    assert [model.classes[c] for c in new.y] == [row[5] for row in made]
    text = csv(made, HEADER).replace(",", "|")
    np.testing.assert_array_equal(read_new_samples(model, write(tmp_path / "a.csv", text), delimiter="|").x, expected)


@pytest.mark.parametrize(("names", "given", "found"), [
    (("1", "3"), ["3.0", "1", "", "03"], [1, 0, -1, 1]),  # numbers, however they are written
    (("no", "yes"), [" yes ", "no", "", "yes"], [1, 0, -1, 1]),
])  # fmt: skip
def test_classes_are_matched_by_name(model, names, given, found, tmp_path):
    made = [[*row[:5], label] for row, label in zip(patients(4), given, strict=True)]
    new = read_new_samples(replace(model, classes=names), write(tmp_path / "new.csv", csv(made, HEADER)))
    assert new.y.tolist() == found
    assert new.warnings == ()


def test_classes_and_clients_that_are_unknown(model, tmp_path):
    made = [[*row[:5], label] for row, label in zip(patients(4), ["ill", "dead", "", "gone"], strict=True)]
    made[2][0] = ""
    new = read_new_samples(model, write(tmp_path / "new.csv", csv(made, HEADER)))
    assert new.y.tolist() == [0, -1, -1, -1]
    assert new.client.tolist() == ["Berlin", "Paris", "", "Berlin"]
    assert new.warnings == (
        f"{tmp_path / 'new.csv'}, row 3: the label 'label' is none of the model's classes, ill, well, but dead, gone.",
    )


# -- gaps and words that training did not have


@pytest.mark.parametrize("missing", ["refuse", "mean", "zero", "drop"])
def test_missing_numbers_are_filled_with_the_mean_or_with_zero(missing, tmp_path):
    path = write(tmp_path / "data.csv", csv(patients(), HEADER))
    data, preprocessing = train(path, missing=missing)
    row = dictionaries(patients())[0]
    first, second = {**row, "age": None}, {**row, "age": "n/a", "pressure": NAN}
    x = encode(preprocessing, [row, first, second])
    assert np.isnan(x).tolist() == [[False] * 6, [True] + [False] * 5, [True, *[False] * 2, True, *[False] * 2]]
    filled = scaled(preprocessing, x)
    if missing == "zero":
        assert filled[1, 0] == np.float32((0 - preprocessing.numbers.mean[0]) / preprocessing.numbers.std[0])
        assert warnings_of(preprocessing, [row, first, second]) == [
            "Column 'age' has no value in 2 rows, first in Sample 1; 0 is used.",
            "Column 'pressure' has no value in 1 row, first in Sample 2; 0 is used.",
        ]
    else:
        assert filled[1:, 0].tolist() == [0, 0]
        ages = [row[1] for row in patients()]
        mean = np.mean([ages[i] for i in data.splits["train"].flat.tolist()])
        assert warnings_of(preprocessing, first) == [
            "Column 'age' has no value in 1 row, first in Sample 0; the mean of the training data, "
            f"{mean:.6g}, is used."
        ]
    assert torch.equal(filled[0], filled[1].where(torch.arange(6) != 0, filled[0]))


def test_words_that_training_did_not_have_are_none_and_named(model):
    row = dictionaries(patients())[0]
    given = [row, {**row, "sex": "x"}, {**row, "sex": "F"}, {**row, "sex": ""}, {**row, "smoker": "no"}]
    x = encode(model, given)
    assert x[1:4, 1:3].tolist() == [[0, 0]] * 3
    assert warnings_of(model, given) == [
        "Column 'sex' has no value in 1 row, first in Sample 3; it counts as none of its words.",
        "Column 'sex' has x, F in 2 rows, first in Sample 1, which counts as none of the words that it had in "
        "training, f, m.",
        "Column 'smoker' has no in 1 row, first in Sample 4, which counts as none of the words that it had in "
        "training, False, True.",
    ]
    assert warnings_of(model, {**row, "smoker": 3.0})[0].startswith("Column 'smoker' has 3 in 1 row")


def test_a_text_of_unknown_words_is_warned_of(tmp_path):
    _, preprocessing = train(hugging_face(tmp_path / "data", [texts(24)], TEXT_FEATURES))
    given = ["a good day", "qua quo", ":::"]
    assert warnings_of(preprocessing, given) == [
        "2 texts without any word of the training data, first Sample 1: 'qua quo'."
    ]
    assert encode(preprocessing, given)[1:, :3].tolist() == [[1, 1, 0], [0, 0, 0]]


def test_warnings_are_logged_unless_somebody_collects_them(model, caplog):
    encode(model, {**dictionaries(patients())[0], "age": None})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Column 'age' has no value in 1 row" in caplog.text
    caplog.clear()
    warnings_of(model, {**dictionaries(patients())[0], "age": None})
    assert not caplog.records


# -- pictures


@pytest.fixture
def grey(tmp_path):
    """The preprocessing of a model for grey pictures of 8x8 pixels."""
    for i in range(8):
        write(tmp_path / f"train/{'ab'[i % 2]}/{('cat', 'dog')[i // 4]}/{i}.png", png((8, 8), i, "L"))
    return train(tmp_path / "train")[1]


def test_pictures_of_other_sizes_and_colours_are_converted_with_a_warning(grey):
    coloured = np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(coloured).convert("L").resize((8, 8), Image.Resampling.BILINEAR))
    for values in (coloured, coloured.transpose(2, 0, 1), Image.fromarray(coloured), torch.from_numpy(coloured)):
        np.testing.assert_array_equal(encode(grey, values), expected[None, None])
        assert warnings_of(grey, values) == [
            "1 picture in colour, first Picture 0: the model was trained on grey ones, so colours are left out.",
            "1 picture of another size than those of the training data, 8x8, first Picture 0 with 10x12; it is "
            "resized.",
        ]
    assert warnings_of(replace(grey, resize=True), expected[:, :5]) == []
    np.testing.assert_array_equal(encode(grey, np.stack([expected] * 3)), [[expected]] * 3)  # not a coloured one
    assert encode(grey, np.zeros((4, 9, 9), np.uint8)).shape == (4, 1, 8, 8)
    np.testing.assert_array_equal(encode(grey, expected.astype(np.int64)), expected[None, None])


def test_pictures_lie_in_folders_of_classes_clients_both_or_none(grey, tmp_path):
    names = ["cat/0.png", "dog/1.png", "cow/2.png"]
    for i, name in enumerate(names):
        write(tmp_path / "classes" / name, png((8, 8), i, "L"))
        write(tmp_path / "both" / f"site {i}" / name, png((8, 8), i, "L"))
        write(tmp_path / "clients" / f"site {i}" / "x.png", png((8, 8), i, "L"))
        write(tmp_path / "none" / f"{i}.png", png((8, 8), i, "L"))
        write(tmp_path / "deep" / "a" / "b" / name, png((8, 8), i, "L"))
    order = {"classes": [0, 2, 1], "both": [0, 1, 2], "clients": [0, 1, 2], "none": [0, 1, 2]}
    labels = {"classes": [0, -1, 1], "both": [0, 1, -1], "clients": None, "none": None}
    clients = {"both": ["site 0", "site 1", "site 2"], "clients": ["site 0", "site 1", "site 2"]}
    pixels = np.stack([encode(grey, tmp_path / "none" / f"{i}.png")[0] for i in range(3)])
    for layout, at in order.items():
        new = read_new_samples(grey, tmp_path / layout)
        np.testing.assert_array_equal(new.x, pixels[at])
        assert (None if new.y is None else new.y.tolist()) == labels[layout]
        assert (None if new.client is None else new.client.tolist()) == clients.get(layout)
        assert len(new.warnings) == (labels[layout] is not None)  # of the cow
    single = read_new_samples(grey, tmp_path / "none/1.png")
    np.testing.assert_array_equal(single.x, pixels[1:2])
    assert single.where(0) == str(tmp_path / "none/1.png")
    with user_error("does not lie in a folder CLIENT/CLASS"):
        read_new_samples(grey, tmp_path / "deep")


def test_pictures_in_a_table_of_hugging_face(tmp_path):
    features = {"photo": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    table = pa.table({
        "photo": [{"bytes": png((5, 4), i), "path": None} for i in range(6)], "label": [i % 2 for i in range(6)],
    })  # fmt: skip
    data, preprocessing = train(hugging_face(tmp_path / "data", [table], features))
    new = read_new_samples(preprocessing, tmp_path / "data")
    assert_same(data, new.x)
    assert new.y.tolist() == [0, 1] * 3
    other = {"photo": {"_type": "Image"}, "label": {"names": ["dog", "cat"], "_type": "ClassLabel"}}
    new = read_new_samples(preprocessing, hugging_face(tmp_path / "other", [table], other))
    assert new.y.tolist() == [1, 0] * 3  # classes have other numbers there
    with user_error("new.csv has no column 'photo'", "did you mean 'photos'?"):
        read_new_samples(preprocessing, write(tmp_path / "new.csv", "photos\n1\n"))
    with user_error("Column 'photo'", "not pictures"):
        read_new_samples(preprocessing, write(tmp_path / "new.csv", "photo\n1\n"))


# -- mistakes


ROW = dictionaries(patients())[0]
WRONG_ROWS = {
    "a word": ([ROW, {**ROW, "age": "old"}], ["Sample 1: column 'age' has 'old' where others have numbers; corr"]),
    "a decimal comma": ({**ROW, "age": "3,14"}, ["column 'age' has '3,14'", "write a point instead of the comma."]),
    "infinite": ({**ROW, "age": float("inf")}, ["Sample 0: column 'age' has inf", "not finite"]),
    "too large": ({**ROW, "age": 1e39}, ["1e+39", "too large"]),
    "a large integer": ({**ROW, "age": 10**400}, ["column 'age' has"]),
    "a huge integer": ({**ROW, "age": 10**5000}, ["column 'age' has 'int too long to show'"]),
    "a list": ({**ROW, "age": [1, 2]}, ["The table: column 'age' is nested", "one number or word per row"]),
    "bytes": ({**ROW, "age": b"1"}, ["column 'age' holds neither numbers nor words"]),
    "an object": ({**ROW, "age": object()}, ["column 'age' has '<object object"]),
    "not Unicode": ({**ROW, "age": "\ud800"}, ["column 'age' has '\ufffd"]),
    "no column": ({"Age": 3}, ["The table has no column 'age' and 3 more", "did you mean 'Age'?"]),
    "no similar column": ({**{k: v for k, v in ROW.items() if k != "sex"}}, ["no column 'sex'", "known: age"]),
    "no rows": ([], ["There are no samples"]),
    "an empty frame": (DataFrame({"age": [], "sex": [], "pressure": [], "smoker": []}), ["The table has no rows."]),
    "the same column twice": ({**ROW, " age ": 3}, ["The table has two columns 'age'"]),
    "too few values": ([1, "f"], ["Sample 0 has 2 values, but the model takes 4 columns: age, sex, pressure, smoker."]),
    "rows of different lengths": ([[1, "f", 2, "True"], [1]], ["Sample 1 has 1 value, but"]),
    "rows of different kinds": ([ROW, [1, "f", 2, "True"]], ["Sample 0 is not a row but 'dict'"]),
    "a number": (3, ["Sample 0 is not a row but 'int'", "give a dictionary with age, sex, pressure, smoker"]),
    "nothing": (None, ["not a row but 'NoneType'"]),
    "a string": ("age=3", ["not a row but 'str'"]),
    "numbers that are not encoded": (np.zeros((3, 5)), ["Sample 0 has 5 values, but the model takes 4 columns"]),
    "encoded infinity": (np.full((1, 6), np.inf), ["Sample 0: x has a value that is not a finite number"]),
    "an array of arrays": (np.zeros((2, 2, 2)), ["Sample 0 has 2 values"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_wrong_rows_are_refused_in_one_sentence(model, name):
    values, words = WRONG_ROWS[name]
    with user_error(*words):
        encode(model, values)


def test_wrong_tables_are_refused_in_one_sentence(model, tmp_path):
    made = patients(4)
    made[2][1] = "old"
    header = HEADER.replace("pressure", "presure")
    cases = [
        ("a.csv", csv(made, HEADER), ["a.csv, row 4: column 'age' has 'old' where others have numbers; correct it."]),
        ("b.csv", csv(made, header), ["b.csv has no column 'pressure'", "did you mean 'presure'?"]),
        ("c.csv", csv([], HEADER), ["no rows"]),
        ("d.csv", "", ["is empty"]),
        ("e.csv", csv(patients(2), HEADER) + "1,2\n", ["row 4 has 2 values", "6 columns"]),
        ("f.parquet", "PAR1", ["not a complete Parquet file"]),
        ("g.txt", "age 3", ["not a file that FedLoom reads"]),
        ("h.png", png(), ["h.png holds pictures, but the model takes rows of a table"]),
    ]
    for name, content, words in cases:
        with user_error(*words):
            read_new_samples(model, write(tmp_path / name, content))
    with user_error("nowhere.csv does not exist"):
        read_new_samples(model, tmp_path / "nowhere.csv")
    with user_error("has no column 'out' (label=out)", "did you mean 'outcome'?"):
        read_new_samples(model, write(tmp_path / "i.csv", "outcome\n1\n"), label="out")
    with user_error("j.npz", "5 values"):
        read_new_samples(model, arrays(tmp_path / "j.npz", x=np.zeros((3, 5))))
    os.mkfifo(tmp_path / "pipe.csv")
    with user_error("pipe"):
        read_new_samples(model, tmp_path / "pipe.csv")


def test_wrong_pictures_are_refused_in_one_sentence(grey, tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    colour = replace(grey, shape=(3, 8, 8))
    cases = [
        (grey, np.zeros((8, 8), np.float32) + 0.5, ["Sample 0: a pixel is 0.5", "whole number from 0 to 255"]),
        (grey, np.full((8, 8), 256), ["a pixel is 256"]),
        (grey, np.full((8, 8), NAN), ["a pixel is nan"]),
        (grey, np.zeros((9, 9)), ["Picture 0 has pixels of the type float64", "uint8"]),
        (grey, [np.zeros((2, 9, 9), np.uint8)], ["Picture 0 has the shape 2x9x9", "1 or 3 channels"]),
        (grey, np.zeros(64, np.uint8), ["Picture 0 has the shape 64"]),
        (grey, np.zeros((0, 5), np.uint8), ["Picture 0 has the shape 0x5"]),
        (colour, np.zeros((9, 9, 4), np.uint8), ["Picture 0 has the shape 9x9x4"]),
        (grey, Image.new("I;16", (8, 8)), ["Picture 0 has pixels of a kind (I;16) other than 8 bits"]),
        (grey, "nowhere.png", ["nowhere.png cannot be read (no such file or directory)"]),
        (grey, tmp_path, ["is a folder, not a file"]),
        (grey, tmp_path / "pipe.png", ["is a pipe"]),
        (grey, "\0", ["cannot be read"]),
        (grey, b"", ["Picture 0 is empty"]),
        (grey, b"GIF89a", ["Picture 0"]),
        (grey, [], ["There are no samples"]),
        (grey, None, ["The model takes pictures, not 'NoneType'", "give a PIL image"]),
        (grey, {"a": 1}, ["The model takes pictures, not 'dict'"]),
    ]
    for preprocessing, values, words in cases:
        with user_error(*words):
            encode(preprocessing, values)
    with user_error("bad.png is not a picture"):
        read_new_samples(grey, write(tmp_path / "bad.png", "no"))
    with user_error("new.csv has 0 columns that may be the pictures", "'image'"):
        read_new_samples(grey, write(tmp_path / "new.csv", "a,b\n1,2\n"))


def test_wrong_texts_are_refused_in_one_sentence(tmp_path):
    _, preprocessing = train(hugging_face(tmp_path / "data", [texts(24)], TEXT_FEATURES))
    cases = [
        ("", ["Sample 0: the text is empty"]),
        (["good", " "], ["Sample 1: the text is empty"]),
        (["good", 3], ["The model takes texts, not 'list'", "give a string"]),
        (None, ["not 'NoneType'"]),
        ([], ["There are no samples"]),
        ([{"txt": "good"}], ["The table has no column 'text'", "did you mean 'txt'?"]),
        ([{"text": "good"}, {}], ["Sample 1: the text 'text' is empty"]),
        ([{"text": 3}], ["Column 'text' holds int64, not text"]),
        (np.zeros((2, 4), np.int64), ["The array has the shape 2x4", "shape 5"]),
        (np.full(5, 33), ["Sample 0: a token id is 33", "from 0 to 32"]),
        (np.full(5, -1), ["a token id is -1"]),
        (np.full(5, 0.5), ["a token id is 0.5"]),
    ]
    for values, words in cases:
        with user_error(*words):
            encode(preprocessing, values)
    with user_error("bad.txt, row 2", "UTF-8", "save it as text in UTF-8"):
        read_new_samples(preprocessing, write(tmp_path / "bad.txt", b"good\n\xff\n"))
    with user_error("none.txt has no texts"):
        read_new_samples(preprocessing, write(tmp_path / "none.txt", "\n \n"))
    with user_error("cannot be read"):
        read_new_samples(preprocessing, tmp_path / "nowhere.txt")
    with user_error("holds pictures, but the model takes texts"):
        read_new_samples(preprocessing, pictures(tmp_path / "pictures"))


def test_wrong_arrays_are_refused_in_one_sentence(tmp_path):
    draw = np.random.default_rng(0)
    path = arrays(tmp_path / "data.npz", x=draw.normal(size=(12, 7, 3)), y=np.arange(12) % 2)
    _, preprocessing = train(path)
    cases = [
        (np.zeros((8, 3)), ["The array has the shape 8x3, but the model takes samples of the shape 7x3"]),
        (np.zeros(()), ["a single number"]),
        (np.full((2, 7, 3), NAN), ["Sample 0: x has a value that is not a finite number"]),
        (np.full((7, 3), 1e39), ["not a finite number"]),
        (np.zeros((0, 7, 3)), ["There are no samples"]),
        ([[1, 2], [3]], ["The model takes arrays of numbers, not 'list'", "shape 7x3"]),
        (np.full((7, 3), "a"), ["The model takes arrays of numbers"]),
        ("a", ["not 'str'"]),
    ]
    for values, words in cases:
        with user_error(*words):
            encode(preprocessing, values)
    for name, given, words in (
        ("one.npz", np.zeros((7, 3)), ["one.npz: x has the shape 7x3"]),  # seven samples, not one
        ("nan.npz", np.full((1, 7, 3), NAN), ["nan.npz, row 0: x has a value that is not a finite number"]),
        ("word.npz", np.full((7, 3), "a"), ["x must hold numbers"]),
    ):
        with user_error(*words):
            read_new_samples(preprocessing, arrays(tmp_path / name, x=given))
    with user_error("has no array 'x'"):
        read_new_samples(preprocessing, arrays(tmp_path / "y.npz", y=np.zeros(3)))
    with user_error("new.csv is a table, but the model takes arrays of numbers"):
        read_new_samples(preprocessing, write(tmp_path / "new.csv", "a,b\n1,2\n"))
    arrays(tmp_path / "some/a.npz", x=np.zeros((2, 7, 3)), y=[0, 1])
    arrays(tmp_path / "some/b.npz", x=np.zeros((2, 7, 3)))
    with user_error("Some files have an array 'y' and some have not"):
        read_new_samples(preprocessing, tmp_path / "some")


ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5),
        st.sampled_from(["f", "True", "1,5", "nan", "good day", 5, 130.5, 2**70, "\0", np.float32(3), np.str_("f")]),
        st.sampled_from([np.zeros(6), np.zeros((2, 7, 3)), np.zeros((8, 8), np.uint8), np.array("a"), object(), print]),
        st.sampled_from([torch.zeros(4), torch.tensor(1), pa.table({"age": [1]}), Image.new("L", (8, 8))]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["age", "sex", "pressure", "smoker", "text", 3, None, ""]), inner, max_size=5),
        st.builds(lambda cell: DataFrame({"age": [cell], "sex": ["f"], "pressure": [1], "smoker": [cell]}), inner),
    ),
    max_leaves=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The preprocessing of models of all kinds."""
    folder = tmp_path_factory.mktemp("models")
    sequence = arrays(folder / "s.npz", x=np.ones((12, 7, 3)), y=np.arange(12) % 2)
    paths = [
        write(folder / "t.csv", csv(patients(), HEADER)), pictures(folder / "p", clients=()), sequence,
        hugging_face(folder / "h", [texts(24)], TEXT_FEATURES),
    ]  # fmt: skip
    return [train(path)[1] for path in paths]


@hypothesis.settings(
    max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(values=ANYTHING)
def test_whatever_is_given_is_encoded_or_refused_in_one_sentence(models, values):
    for preprocessing in models:
        try:
            x = encode(preprocessing, values, Issues())
        except UserError as error:
            refused = str(error)
            assert len(refused.splitlines()) == 1
        else:
            assert x.shape[1:] == preprocessing.shape
            assert len(x)
            assert str(x.dtype) == preprocessing.dtype
