"""Targets of user data that are no classes: numbers and labels, from every form that they have."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from owndata import arrays, csv, hugging_face, pictures, png, write
from rich.console import Console
from sentences import user_error

import fedloom
from fedloom.cli.check_report import print_check
from fedloom.config.resolve import configure
from fedloom.core.targets import Labels, Number
from fedloom.data.divide import validated
from fedloom.data.sets.own import OwnData
from fedloom.data.user_data.check import check
from fedloom.data.user_data.leaks import CopyDetector, LeakDetector
from fedloom.data.user_data.new_samples import encode, read_new_samples

NAN = float("nan")
SITES = ["Rome", "Paris"]
PRICES = [1.5, 2, -3.25, 4, 5, 6.5, 7, 8, 9, 1e3, 11, 12]
TAGS = [["sun"], [], ["sun", "rain"], ["wind"], ["rain"], [], ["sun", "wind"], ["rain"]]
MATRIX = [[int(word in tags) for word in ("rain", "sun", "wind")] for tags in TAGS]  # in alphabetical order
X = np.random.default_rng(0).normal(size=(12, 3))


def houses(prices=PRICES, name="price"):
    """A table with a client, two features and a number."""
    made = [(SITES[i % 2], 20 + i * i % 7, "fm"[i % 3 % 2], price) for i, price in enumerate(prices)]
    return csv(made, f"client,age,sex,{name}")


def weather(cells, name="tags"):
    """A table with a client, a feature and a cell of labels."""
    made = [(SITES[i % 2], 20 + i * i % 7, cell) for i, cell in enumerate(cells)]
    return csv(made, f"client,age,{name}")


def flags(rows, names="edema,effusion"):
    """A table with a client, a feature and columns of labels."""
    return csv([(SITES[i % 2], 20 + i * i % 7, *row) for i, row in enumerate(rows)], f"client,age,{names}")


def parquet(path, lists, kind=None, name="tags"):
    columns = {"age": [20 + i * i % 7 for i in range(len(lists))], name: pa.array(lists, kind)}
    pq.write_table(pa.table(columns), path)
    return path


def load(path, **settings):
    return OwnData(str(path), **settings).load(None, 20, 1)


def remarks(path, **settings):
    return [remark["text"] for remark in check(OwnData(str(path), **settings))["remarks"]]


# -- numbers


def test_a_column_with_fractions_is_a_number(tmp_path):
    path = write(tmp_path / "data.csv", houses())
    raw = load(path, label="price")
    assert (raw.target, raw.classes, raw.class_names) == ("number", 1, ("price",))
    assert raw.y.dtype == np.float64
    assert raw.y.tolist() == PRICES
    assert (raw.preprocessing.target, raw.preprocessing.label) == ("number", "price")
    assert [column.name for column in raw.preprocessing.columns] == ["age", "sex"]
    assert (
        f"{path}, row 2: the label 'price' is 1.5, so it is predicted as a number; to predict classes, turn it into a "
        "few, such as low and high." in remarks(path, label="price")
    )


def test_whole_numbers_are_classes_unless_a_number_is_wanted(tmp_path):
    path = write(tmp_path / "data.csv", houses([3, 1, 3, 1, 2, 2, 1, 3], "label"))
    assert load(path).class_names == ("1", "2", "3")
    raw = load(path, target="number")
    assert (raw.target, raw.class_names) == ("number", ("label",))
    assert raw.y.tolist() == [3, 1, 3, 1, 2, 2, 1, 3]
    with user_error("the label 'label' is 0.5, a number with a fraction, but there must be classes; turn it into"):
        load(write(path, houses([0.5, 1, 2, 1], "label")), target="class")


def test_many_classes_that_are_numbers_may_be_a_measurement(tmp_path):
    path = write(tmp_path / "data.csv", houses(range(30), "label"))
    with user_error("30 classes for 30 samples", "set target=number to predict a number, or say which is the class"):
        load(path)
    assert load(path, target="number").y.tolist() == list(range(30))
    with user_error("measurement; say which is the class"):
        load(write(path, houses([f"p{i}" for i in range(30)], "label")))
    write(path, houses([i % 25 for i in range(75)], "label"))
    sentence = "The 25 classes are whole numbers; set target=number if they are a measurement."
    assert sentence in remarks(path)
    assert sentence not in remarks(path, target="number")


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.decimal128(8, 2), pa.string()])
def test_numbers_of_any_type(kind, tmp_path):
    given = [None, "1.5", "2.5", "-4.25", "7"] if kind == pa.string() else [None, 1.5, 2.5, -4.25, 7]
    path = parquet(tmp_path / "data.parquet", pa.array(given[1:]).cast(kind), name="y")
    assert load(path).y.tolist() == [1.5, 2.5, -4.25, 7]
    parquet(path, pa.array(given).cast(kind), name="y")
    with user_error("data.parquet, row 1: the label 'y' is empty; fill it in, or leave the row out."):
        load(path)
    assert check(OwnData(str(path)))["number"]["min"] == -4.25  # of the others


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("", ["row 3: the label 'price' is empty; fill it in, or leave the row out."]),
        ("NA", ["row 3: the label 'price' is empty; fill it in, or leave the row out."]),
        ("dear", ["row 3: the label 'price' is 'dear', not a finite number; correct it, or leave the row out."]),
        ("inf", ["row 3: the label 'price' is 'inf', not a finite number; correct it"]),
        ('"3,14"', ["row 3: the label 'price' is '3,14', not a finite number; write a point instead of the comma"]),
        ("1e16", ["Numbers are as large as 1e+16 in the label 'price'; give them in a larger unit."]),
    ],
)
def test_what_is_no_number_is_named(cell, words, tmp_path):
    path = write(tmp_path / "data.csv", houses([1.5, cell, *PRICES[2:]]))
    with user_error(*words):
        load(path, label="price", target="number")
    found = check(OwnData(str(path), label="price", target="number"))
    (problem,) = found["problems"]
    assert words[0] in problem["text"]


def test_a_number_that_is_always_the_same_is_refused(tmp_path):
    path = write(tmp_path / "data.csv", houses([2.5] * 12))
    with user_error("There is nothing to learn, because the label 'price' is 2.5 in all samples."):
        load(path, label="price")


def test_arrays_of_numbers(tmp_path):
    y = np.arange(12) / 4
    raw = load(arrays(tmp_path / "data.npz", x=X, y=y, client=np.arange(12) % 3))
    assert (raw.target, raw.classes, raw.class_names) == ("number", 1, ("y",))
    assert raw.y.tolist() == y.tolist()
    assert raw.preprocessing.target == "number"
    y[4] = NAN
    with user_error("data.npz, row 4: the label in 'y' is empty"):
        load(arrays(tmp_path / "data.npz", x=X, y=y))
    y[4] = -np.inf
    with user_error("data.npz, row 4: the label in 'y' is '-inf', not a finite number"):
        load(arrays(tmp_path / "data.npz", x=X, y=y), target="number")
    assert load(arrays(tmp_path / "data.npz", x=X, y=np.arange(12) % 5), target="number").target == "number"


# -- labels in several columns


@pytest.mark.parametrize("words", [("0", "1"), ("false", "True"), ("NO", "yes"), ("0.0", " 1 ")])
def test_columns_of_labels(words, tmp_path):
    given = [(1, 0), (0, 0), (1, 1), (0, 1)]
    path = write(tmp_path / "data.csv", flags([[words[v] for v in row] for row in given]))
    for label in ("edema,effusion", "edema, effusion", "edema,edema,effusion,"):
        raw = load(path, label=label)
        assert (raw.target, raw.classes, raw.class_names) == ("labels", 2, ("edema", "effusion"))
        assert raw.y.dtype == np.float32
        assert raw.y.tolist() == [list(row) for row in given]
        assert (raw.preprocessing.target, raw.preprocessing.label) == ("labels", None)
        assert [column.name for column in raw.preprocessing.columns] == ["age"]
    assert load(path, label="effusion,edema").class_names == ("effusion", "edema")


def test_columns_of_labels_of_any_type(tmp_path):
    columns = {"age": [1, 2, 3, 5], "a": [True, False, True, True], "b": [1, 0, 0, 1], "c": [0.0, 1.0, 0.0, 1.0]}
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    assert load(tmp_path / "data.parquet", label="a,b,c").y.T.tolist() == [[1, 0, 1, 1], [1, 0, 0, 1], [0, 1, 0, 1]]


def test_a_column_whose_name_has_a_comma(tmp_path):
    path = write(tmp_path / "data.csv", flags([("ill", 1), ("well", 2)] * 4, '"a,b",c'))
    assert load(path, label="a,b").class_names == ("ill", "well")


def test_wrong_columns_of_labels_are_refused(tmp_path):
    path = tmp_path / "data.csv"
    good = [(1, 0), (0, 0), (1, 1), (0, 1)]
    for rows, settings, words in (
        (good, {"label": "edema,efusion"}, ["has no column 'efusion' (label=efusion)", "did you mean 'effusion'?"]),
        (good, {"target": "number"}, ["label names 2 columns, but target=number needs one; name one."]),
        (good, {"target": "class"}, ["label names 2 columns, but target=class needs one; name one."]),
        ([*good, (2, 0), (0, 7)], {}, ["row 6: the label 'edema' is '2', not 0 or 1, true or false, yes or no; corr"]),
        ([*good, (1, "maybe")], {}, ["row 6: the label 'effusion' is 'maybe', not 0 or 1"]),
        ([*good, (1, "?")], {}, ["row 6: the label 'effusion' is empty; fill it in, or leave the row out."]),
        ([(1, 0)] * 5, {}, ["There is nothing to learn, because all samples have the same labels."]),
        (good, {"label": "edema", "target": "labels"}, ["exactly one word as the label 'edema'", "set target=class."]),
    ):
        write(path, flags(rows))
        with user_error(*words):
            load(path, **{"label": "edema,effusion", **settings})
    write(path, flags([*good, ("", 1), (3, 1), (1, 0)]))
    found = check(OwnData(str(path), label="edema,effusion"))
    assert (found["samples"], len(found["problems"])) == (5, 2)


# -- labels in one column


@pytest.mark.parametrize(
    "join",
    [";".join, "|".join, " ; ".join, lambda tags: f'"{", ".join(tags)}"', lambda tags: ";".join([*tags, *tags, ""])],
)
def test_words_in_a_cell(join, tmp_path):
    path = write(tmp_path / "data.csv", weather([join(tags) for tags in TAGS]))
    raw = load(path, label="tags", target="labels")
    assert (raw.target, raw.classes, raw.class_names) == ("labels", 3, ("rain", "sun", "wind"))
    assert raw.y.tolist() == MATRIX
    assert (raw.preprocessing.target, raw.preprocessing.label) == ("labels", "tags")


def test_words_are_labels_only_if_that_is_said(tmp_path):
    path = write(tmp_path / "data.csv", weather(["sun;rain", "sun", "none", "sun;rain"] * 3, "label"))
    assert load(path).class_names == ("none", "sun", "sun;rain")
    raw = load(path, target="labels")
    assert raw.class_names == ("rain", "sun")
    assert raw.y[:3].tolist() == [[1, 1], [0, 1], [0, 0]]


LISTS = {
    "strings": (TAGS, pa.list_(pa.string()), ("rain", "sun", "wind"), MATRIX),
    "large": (TAGS, pa.large_list(pa.large_string()), ("rain", "sun", "wind"), MATRIX),
    "whole numbers": ([[10, 9], [9], [], [2]], pa.list_(pa.int8()), ("2", "9", "10"),
                      [[0, 1, 1], [0, 1, 0], [0, 0, 0], [1, 0, 0]]),
    "of one size": ([[5, 6], [6, 7], [7, 5]], pa.list_(pa.int64(), 2), ("5", "6", "7"),
                    [[1, 1, 0], [0, 1, 1], [1, 0, 1]]),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_labels(name, tmp_path):
    lists, kind, names, matrix = LISTS[name]
    for settings in ({}, {"target": "labels"}):
        raw = load(parquet(tmp_path / "data.parquet", lists, kind), label="tags", **settings)
        assert (raw.target, raw.class_names) == ("labels", names)
        assert raw.y.tolist() == matrix


def test_lists_in_the_files_of_clients(tmp_path):
    (tmp_path / "data").mkdir()
    for i, site in enumerate(SITES):
        parquet(tmp_path / f"data/{site}.parquet", TAGS[4 * i : 4 * i + 4])
    raw = load(tmp_path / "data", label="tags")
    assert raw.client_names == ("Paris", "Rome")
    assert raw.y.tolist() == MATRIX[4:] + MATRIX[:4]


CLASS_LABEL = {"names": ["cat", "dog", "cow"], "_type": "ClassLabel"}
SEQUENCES = [{"feature": CLASS_LABEL, "length": -1, "_type": "Sequence"}, {"feature": CLASS_LABEL, "_type": "List"},
             [CLASS_LABEL]]  # fmt: skip


@pytest.mark.parametrize("about", SEQUENCES)
def test_hugging_face_names_labels(about, tmp_path):
    images = [{"bytes": png((5, 4), i), "path": None} for i in range(4)]
    table = pa.table({"image": images, "animals": [[0, 1], [], [1], [0]]})
    features = {"image": {"_type": "Image"}, "animals": about}
    raw = load(hugging_face(tmp_path / "data", [table], features))
    assert (raw.target, raw.class_names) == ("labels", ("cat", "dog", "cow"))
    assert raw.y.tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0]]
    assert "No sample has label cow." in remarks(tmp_path / "data")
    wrong = pa.table({"image": images, "animals": [[0, 1], [3], [1], [0]]})
    with user_error("row 2: the label 'animals' names no class (0 to 2)"):
        load(hugging_face(tmp_path / "data", [wrong], features))
    about = json.loads(json.dumps(about).replace('["cat", "dog", "cow"]', "5"))
    with user_error("is damaged (a label has no names of classes)"):
        load(hugging_face(tmp_path / "data", [table], {"animals": about}))


def test_wrong_lists_and_words_are_refused(tmp_path):
    for lists, words in (
        ([["a"], ["b"], None, []], ["row 3: the label 'tags' is missing", "none of the labels); fill it in"]),
        ([["a"], ["b", None], []], ["row 2: the label 'tags' is empty"]),
        ([[1.5], [2.5]], ["the label 'tags' holds list<element: double>, not lists of words or of whole numbers."]),
        ([[], []], ["not lists of words"]),
        ([["a"], ["a"], []], ["two labels or more, but the label 'tags' has only 'a'"]),
        ([["a\nb"], ["c"]], ["row 1: the label 'tags' is 'a b', a name with a line break"]),
        ([[f"w{i}", f"v{i}"] for i in range(30)], ["There are 60 labels for 30 samples, as if the label 'tags' were"]),
        ([[0, 1, 0], [0, 0, 1], [0, 0, 0]], ["has a 0 or 1 for each label; give the names of labels, or columns."]),
        ([["a", "b"]] * 4, ["nothing to learn, because all samples have the same labels."]),
    ):
        with user_error(*words):
            load(parquet(tmp_path / "data.parquet", lists), label="tags")
    for wanted in ("class", "number"):
        parquet(tmp_path / "data.parquet", TAGS)
        with user_error("the label column 'tags' holds list<element: string>, not one value per row."):
            load(tmp_path / "data.parquet", label="tags", target=wanted)
    for cells, words in (
        (["a;b", "NA", "b", "a"], ["data.csv, row 3: the label 'tags' is missing"]),
        (["a", "b", "c", "a"], ["Every sample has exactly one word as the label 'tags'", "set target=class"]),
        (["a", "", "", "a"], ["two labels or more", "only 'a'"]),
        ([" ", "", "", ""], ["two labels or more", "none"]),
        (
            ["1.5;2", "2", "", ""],
            ["row 2: the label 'tags' is 1.5, a number with a fraction, but there must be labels"],
        ),
    ):
        with user_error(*words):
            load(write(tmp_path / "data.csv", weather(cells)), label="tags", target="labels")


def test_labels_that_differ_in_capitals_are_warned_of(tmp_path):
    raw = load(parquet(tmp_path / "data.parquet", [["Sun"], ["sun"], ["rain", "sun"], []]), label="tags")
    (note,) = raw.notes
    assert note.startswith("Labels that differ in capitals only count as different ones: 'Sun' and 'sun'")


# -- labels in arrays


def test_arrays_with_two_axes_are_labels(tmp_path):
    y = np.array(MATRIX)
    for given in (y, y.astype(bool), y.astype(np.float32)):
        raw = load(arrays(tmp_path / "data.npz", x=X[:8], y=given))
        assert (raw.target, raw.class_names) == ("labels", ("0", "1", "2"))
        assert raw.y.dtype == np.float32
        assert raw.y.tolist() == MATRIX
        assert raw.preprocessing.target == "labels"


def test_wrong_arrays_of_labels_are_refused(tmp_path):
    y = np.array(MATRIX, dtype=float)
    two = np.where(np.arange(8)[:, None] == 5, [0, 2, 0], y)
    for given, wanted, words in (
        (two, "auto", ["data.npz, row 5: label 1 in 'y' is '2.0', not 0 or 1"]),
        (np.where(y == 1, NAN, y), "auto", ["data.npz, row 2: label 0 in 'y' is empty (3 such rows)"]),
        (y, "number", ["y has the shape (8, 3), but target=number needs one value per sample."]),
        (y, "class", ["y has the shape (8, 3), but target=class"]),
        (y[:, :1], "auto", ["y has the shape (8, 1), but labels are 0 or 1 in two columns or more"]),
        (y[:, 0], "labels", ["y has the shape (8,), but labels are"]),
        (y[None].repeat(8, 0), "auto", ["data.npz: y must have one value per sample"]),
    ):
        with user_error(*words):
            load(arrays(tmp_path / "data.npz", x=X[:8], y=given), target=wanted)
    for name, given in (("a", y), ("b", y[:, :2])):
        arrays(tmp_path / f"data/{name}.npz", x=X[:8], y=given)
    with user_error("b.npz: targets in y have the shape (2,), but (3,) in"):
        load(tmp_path / "data")


# -- pictures, federations and defaults


@pytest.mark.parametrize("target", ["number", "labels"])
def test_pictures_in_folders_have_classes(target, tmp_path):
    with user_error("holds pictures in folders of their classes", f"target={target} is impossible", "Hugging Face"):
        load(pictures(tmp_path / "data"), target=target)
    assert load(tmp_path / "data", target="class").target == "classes"


def test_federations_of_numbers_and_labels():
    draw = np.random.default_rng(0)
    x, y, owner = draw.normal(size=(60, 4)), draw.normal(40, 9, 60), ["a", "b", "c"] * 20
    data = fedloom.federation(x, y, owner)
    assert (data.kind, data.classes, data.class_names) == ("number", 1, ("y",))
    assert data.preprocessing_or_default().target == "number"
    scaled = validated(data)
    known = y[data.splits["train"].flat.numpy()]
    assert isinstance(scaled.targets, Number)
    assert scaled.targets.mean == pytest.approx(known.mean())
    assert scaled.preprocessing_or_default().target_scale == (scaled.targets.mean, scaled.targets.std)
    assert fedloom.federation(x, np.round(y), owner, target="number").kind == "number"
    labels = draw.integers(0, 2, (60, 3))
    data = fedloom.federation(x, labels, count=3)
    assert (data.kind, data.classes, data.class_names) == ("labels", 3, ("0", "1", "2"))
    assert isinstance(data.targets, Labels)
    np.testing.assert_array_equal(data.y, labels)
    for given, target, words in (
        (y, "class", ["y is", "a number with a fraction"]),
        (np.where(np.arange(60) == 7, NAN, y), "auto", ["Sample 7: y is empty"]),
        (np.ones(60) / 2, "auto", ["There is nothing to learn, because y is 0.5 in all samples."]),
        (["x"] * 60, "number", ["Sample 0: y is 'x', not a finite number (60 such rows)"]),
        (labels * 2, "auto", ["label 0 in 'y' is '2', not 0 or 1"]),
        (y, "labels", ["y has the shape (60,), but labels are 0 or 1 in two columns"]),
        (labels, "number", ["y has the shape (60, 3), but target=number"]),
        ([[1], [1, 2]] * 30, "auto", ["y is not an array of numbers or words"]),
        (np.arange(60), "auto", ["60 classes for 60 samples", "target=number"]),
        (y, "regression", ["Unknown target 'regression'"]),
    ):
        with user_error(*words):
            fedloom.federation(x, given, owner, target=target)


def test_the_default_metric_suits_the_target(tmp_path):
    number = OwnData(str(write(tmp_path / "a.csv", houses())), label="price")
    labels = OwnData(str(write(tmp_path / "b.csv", flags(np.eye(2, dtype=int).tolist() * 6))), label="edema,effusion")
    assert number.defaults()[2]["metric"] == "rmse"
    assert labels.defaults()[2]["metric"] == "auprc"
    assert configure("fedavg", number).settings.metric == "rmse"
    assert OwnData(number.path, label="price", client="none").defaults()[1] == "dirichlet_class"
    classes = OwnData(str(write(tmp_path / "c.csv", houses(["a", "b"] * 6, "label"))))
    assert "metric" not in classes.defaults()[2]


# -- leaks


def test_a_linear_copy_of_a_number_leaks_it(tmp_path):
    draw = np.random.default_rng(0)
    y = draw.normal(1e6, 3, 40)
    detector = CopyDetector(y)
    assert detector.determines(y)
    assert detector.determines(-3e-3 * y + 1e2)
    assert detector.determines(np.where(np.arange(40) == 3, NAN, y))
    assert not detector.determines(y + draw.normal(0, 1e-2, 40))
    assert not detector.determines(np.where(np.arange(40) == 3, 1e6, y))
    assert not detector.determines(np.full(40, 0.1))
    assert not detector.determines(np.full(40, NAN))
    assert not CopyDetector(y[:2]).determines(y[:2] ** 2)  # two points lie on a line
    assert CopyDetector(1e300 * y / 1e7).determines(y)
    made = [(i * i % 7, value, 1.2 * value + 3, value) for i, value in enumerate(y)]
    raw = load(write(tmp_path / "data.csv", csv(made, "age,net,gross,label")))
    assert raw.notes == (
        "Up to unit and offset, columns net, gross are a copy of the label, so they may leak the label; unless they "
        "are known before the label, leave them out with --set ignore=net,gross",
    )


def test_a_column_that_determines_one_label_leaks_it(tmp_path):
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, (40, 3)).astype(float)
    assert LeakDetector(y, 3).determines(y[:, 2])
    assert not LeakDetector(y, 3).determines(draw.integers(0, 2, 40))
    y[7] = NAN
    assert LeakDetector(y, 3).determines(np.where(np.arange(40) == 7, 0, y[:, 1]))
    y = np.nan_to_num(y).astype(int)
    made = [(i * i % 7, "xz"[row[1]], *row) for i, row in enumerate(y.tolist())]
    raw = load(write(tmp_path / "data.csv", csv(made, "age,code,a,b,c")), label="a,b,c")
    assert raw.notes == (
        "Every value of column code comes with a label always or never, so it may leak the label; unless it is known "
        "before the label, leave it out with --set ignore=code",
    )


# -- new samples


def test_new_numbers_are_read_and_others_warned_of(tmp_path):
    trained = load(write(tmp_path / "train.csv", houses()), label="price").preprocessing
    path = write(tmp_path / "new.csv", houses(["7", "", "3.5", "dear", "NA", "inf"]))
    new = read_new_samples(trained, path)
    np.testing.assert_array_equal(new.y, [7, NAN, 3.5, NAN, NAN, NAN])
    assert new.known().tolist() == [0, 2]
    assert new.warnings == (
        f"{path}, row 5: the label 'price' is 'dear', not a finite number (2 such rows); it counts as unknown.",
    )
    bare = read_new_samples(trained, write(path, houses(name="tall")))
    assert (bare.y, bare.known().tolist()) == (None, [])
    assert bare.remarks == ("Columns that the model does not use: tall.",)
    assert read_new_samples(trained, path, label="tall").y.tolist() == PRICES
    assert encode(trained, {"age": 3, "sex": "f", "price": 4}).shape == (1, 3)


def test_new_columns_of_labels(tmp_path):
    trained = load(write(tmp_path / "train.csv", flags([(1, 0), (0, 1), (1, 1)] * 3)), label="edema,effusion")
    path = tmp_path / "new.csv"
    write(path, flags([("yes", 0), ("", 1), (1, "maybe"), (0, "no")]))
    new = read_new_samples(trained.preprocessing, path)
    np.testing.assert_array_equal(new.y, [[1, 0], [NAN, NAN], [NAN, NAN], [0, 0]])
    assert new.known().tolist() == [0, 3]
    assert new.warnings == (
        f"{path}, row 4: the label 'effusion' is 'maybe', not 0 or 1, true or false, yes or no; it counts as unknown.",
    )
    write(path, flags([(1, 0)] * 3, "edema,other"))
    new = read_new_samples(trained.preprocessing, path)
    assert new.y is None  # one of the labels is not there
    assert new.remarks == ("Columns that the model does not use: other.",)
    assert read_new_samples(trained.preprocessing, write(path, csv([("a", 3)], "client,age"))).y is None


@pytest.mark.parametrize("form", ["words", "lists"])
def test_new_words_of_labels(form, tmp_path):
    given = [["wind", "rain"], [], ["snow", "sun"], None, ["hail"]]
    if form == "words":
        cells = ["NA" if tags is None else "; ".join(tags) for tags in given]
        train, path = (
            write(tmp_path / "train.csv", weather(map(";".join, TAGS))),
            write(tmp_path / "new.csv", weather(cells)),
        )
    else:
        train, path = parquet(tmp_path / "train.parquet", TAGS), parquet(tmp_path / "new.parquet", given)
    trained = load(train, label="tags", target="labels").preprocessing
    new = read_new_samples(trained, path)
    np.testing.assert_array_equal(new.y, [[1, 0, 1], [0, 0, 0], [0, 1, 0], [NAN] * 3, [0, 0, 0]])
    assert new.y.dtype == np.float32
    row = {"words": 4, "lists": 3}[form]
    assert new.warnings == (
        f"{path}, row {row}: the label 'tags' is none of the model's labels, rain, sun, wind, but snow, hail.",
    )


def test_new_labels_that_hugging_face_names(tmp_path):
    def folder(name, names, lists):
        images = [{"bytes": png((5, 4), i), "path": None} for i in range(len(lists))]
        about = {"feature": {"names": names, "_type": "ClassLabel"}, "_type": "List"}
        features = {"image": {"_type": "Image"}, "labels": about}
        return hugging_face(tmp_path / name, [pa.table({"image": images, "labels": lists})], features)

    trained = load(folder("train", ["cat", "dog"], [[0], [0, 1], []])).preprocessing
    new = read_new_samples(trained, folder("new", ["dog", "cat"], [[0], [1], []]))
    assert new.y.tolist() == [[0, 1], [1, 0], [0, 0]]  # labels have other numbers there
    folders = read_new_samples(trained, pictures(tmp_path / "folders", size=(5, 4)))
    assert folders.y is None  # folders name classes, which the model does not predict
    assert set(folders.client.tolist()) == {"a", "b"}


def test_new_arrays(tmp_path):
    number = load(arrays(tmp_path / "number.npz", x=X, y=np.arange(12) / 4)).preprocessing
    labels = load(arrays(tmp_path / "labels.npz", x=X[:8], y=np.array(MATRIX))).preprocessing
    path = arrays(tmp_path / "new.npz", x=X[:3], y=np.array([1.0, NAN, np.inf]))
    new = read_new_samples(number, path)
    np.testing.assert_array_equal(new.y, [1, NAN, NAN])
    assert new.warnings == (f"{path}, row 2: the label in 'y' is 'inf', not a finite number; it counts as unknown.",)
    with user_error("new.npz: y has the shape (3,), but the model was trained with 3 labels, each 0 or 1, per sample."):
        read_new_samples(labels, path)
    arrays(path, x=X[:3], y=np.array([[1, 0, 1], [NAN, 0, 0], [5, 0, 0]]))
    new = read_new_samples(labels, path)
    np.testing.assert_array_equal(new.y, [[1, 0, 1], [NAN] * 3, [NAN] * 3])
    assert new.warnings == (
        f"{path}, row 2: label 0 in 'y' is '5.0', not 0 or 1, true or false, yes or no; it counts as unknown.",
    )
    with user_error("y has the shape (3, 3), but the model was trained with one value per sample."):
        read_new_samples(number, path)
    classes = load(arrays(tmp_path / "classes.npz", x=X, y=np.arange(12) % 2)).preprocessing
    with user_error("y has the shape (3, 3), but the model was trained with one value per sample."):
        read_new_samples(classes, path)


# -- the check


def printed(report):
    console = Console(file=io.StringIO(), width=120)
    print_check(console, json.loads(json.dumps(report)), [], as_json=False)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_the_check_of_a_number(tmp_path):
    prices = [1.5, 2.5, 2.5, 2.5] * 6
    path = write(tmp_path / "data.csv", houses(prices))
    report = check(OwnData(str(path), label="price"))
    assert report["ready"]
    assert (report["target"], report["classes"]) == ("number", None)
    std = 3**0.5 / 4  # of 1.5 and three times 2.5
    assert report["number"] == {"name": "price", "min": 1.5, "max": 2.5, "mean": 2.25, "std": pytest.approx(std)}
    assert report["clients"] == [
        {"client": "Paris", "samples": 12, "mean": 2.5, "std": 0},
        {"client": "Rome", "samples": 12, "mean": 2, "std": 0.5},
    ]
    texts = [remark["text"] for remark in report["remarks"]]
    assert "1 client with one value of the label only: Paris." in texts
    assert not any("class " in text for text in texts)
    lines = printed(report)
    assert "24 samples, a number to predict, 2 clients; 3 numbers each" in lines
    assert "price: 1.5 to 2.5, mean 2.25, standard deviation 0.433013" in lines
    assert "client samples mean std" in lines
    assert "Rome 12 2 0.5" in lines
    assert "all 24 2.25 0.433013" in lines
    report = check(OwnData(str(path), label="price", client="none"))
    assert report["clients"] is None
    assert "24 samples, a number to predict, no clients; 3 numbers each" in printed(report)


def test_the_check_of_labels(tmp_path):
    rows = [(1, 0, 0, 1), (0, 0, 0, 1), (1, 1, 0, 1), (0, 0, 0, 1)] * 6
    path = write(tmp_path / "data.csv", flags(rows, "edema,effusion,fracture,scan"))
    report = check(OwnData(str(path), label="edema,effusion,fracture,scan"))
    assert report["ready"]
    assert (report["target"], report["number"]) == ("labels", None)
    assert [(one["class"], one["samples"], one["clients"]) for one in report["classes"]] == [
        ("edema", 12, 1), ("effusion", 6, 1), ("fracture", 0, 0), ("scan", 24, 2),
    ]  # fmt: skip
    assert report["clients"] == [
        {"client": "Paris", "samples": 12, "classes": 1, "labels": [0, 0, 0, 12]},
        {"client": "Rome", "samples": 12, "classes": 3, "labels": [12, 6, 0, 12]},
    ]
    texts = [remark["text"] for remark in report["remarks"]]
    assert "No sample has label fracture." in texts
    assert "All samples have label scan." in texts
    assert "Only one client has label edema, effusion." in texts
    lines = printed(report)
    assert "24 samples, 4 labels, 2 clients; 1 numbers each" in lines
    assert "client samples edema effusion scan" in lines
    assert "all 24 12 6 24" in lines
    report = check(OwnData(str(path), label="edema,effusion", client="none", ignore=("fracture", "scan")))
    assert "label samples" in printed(report)
    assert "12 samples without any label." in [remark["text"] for remark in report["remarks"]]
    many = [[int(c == i % 9) for c in range(9)] for i in range(27)]
    write(path, flags(many, ",".join("abcdefghi")))
    report = check(OwnData(str(path), label=",".join("abcdefghi")))
    assert "client samples labels" in printed(report)
    assert any("Every sample has exactly one label" in remark["text"] for remark in report["remarks"])


def test_the_check_of_classes_has_the_same_keys_as_ever(tmp_path):
    report = check(OwnData(str(write(tmp_path / "data.csv", houses(["a", "b", "b"] * 4, "label")))))
    assert (report["target"], report["number"]) == ("classes", None)
    assert report["classes"][0] == {"class": "a", "samples": 4, "clients": 2}
    assert report["clients"][0] == {"client": "Paris", "samples": 6, "classes": 2, "labels": [2, 4]}
