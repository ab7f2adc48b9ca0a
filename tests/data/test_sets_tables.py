"""Motion signals and word counts: in their publishers' layouts, made up and small; and the real files."""

import numpy as np
import pytest
from sentences import user_error

from fedloom.data.divide import divide
from fedloom.data.partitions import Natural
from fedloom.data.sets.amazon import DOMAINS, Amazon
from fedloom.data.sets.har import SIGNALS, Har


def load(cls, folder, **settings):
    return cls(**settings).load(folder, 20, 1)


# -- UCI HAR

HAR = {"train": ([1, 6, 2], [3, 1, 3]), "test": ([5, 5], [2, 24])}  # activities, people


def har_value(part, signal, window, step):
    """A number that says where it belongs."""
    return (part == "test") * 4000 + signal * 400 + window * 130 + step


def write_har(folder, **changes):
    """`changes` are texts instead of files, by the name without its ending (None: no file)."""
    for part, (activities, people) in HAR.items():
        (folder / part / "Inertial Signals").mkdir(parents=True)
        texts = {f"{part}/y_{part}": "\n".join(map(str, activities)) + "\n"}
        texts[f"{part}/subject_{part}"] = "\n".join(map(str, people)) + "\n"
        for s, name in enumerate(SIGNALS):
            rows = ([har_value(part, s, w, t) for t in range(128)] for w in range(len(people)))
            lines = ("".join(f"  {value: .7e}" for value in row) for row in rows)
            texts[f"{part}/Inertial Signals/{name}_{part}"] = "\n".join(lines) + "\n"
        for name, text in texts.items():
            text = changes.get(name.rsplit("/")[-1], text)
            if text is not None:
                (folder / f"{name}.txt").write_text(text)


@pytest.mark.parametrize("inner", ["", "UCI HAR Dataset", "har/UCI HAR Dataset"])
def test_har_has_a_channel_for_each_signal_and_a_client_for_each_person(tmp_path, inner):
    write_har(tmp_path / inner)
    raw = load(Har, tmp_path)
    assert SIGNALS[0] == "body_acc_x"
    assert SIGNALS[4] == "body_gyro_y"
    assert SIGNALS[8] == "total_acc_z"
    assert raw.x.shape == (5, 9, 1, 128)
    assert raw.x.dtype == np.float32
    for row, (part, window) in enumerate([("train", 0), ("train", 1), ("train", 2), ("test", 0), ("test", 1)]):
        for signal in range(9):
            expected = [har_value(part, signal, window, t) for t in range(128)]
            assert raw.x[row, signal, 0].tolist() == expected
    assert raw.y.tolist() == [0, 5, 1, 4, 4]
    assert [rows.tolist() for rows in raw.natural] == [[1], [3], [0, 2], [4]]  # persons 1, 2, 3, 24
    assert raw.official_test.tolist() == [3, 4]
    assert raw.classes == 6
    assert Har.partition == "natural"


def test_har_scrambled_is_time_and_signals_reshaped_without_exchanging_them(tmp_path):
    write_har(tmp_path)
    raw = load(Har, tmp_path, scrambled=True)
    # entry k of the flat (128, 9) array is signal k % 9 at step k // 9; in (9, 1, 128) it is in row k // 128
    for k in (0, 1, 8, 9, 127, 128, 1000, 1151):
        assert raw.x[0, k // 128, 0, k % 128] == har_value("train", k % 9, 0, k // 9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y_train": None}, ["has no", "y_train.txt"]),
        ({"total_acc_z_test": None}, ["has no", "total_acc_z_test.txt"]),
        ({"y_train": "1\n7\n2\n"}, ["y_train.txt", "0..5"]),
        ({"y_train": "0\n1\n2\n"}, ["y_train.txt", "0..5"]),
        ({"y_train": "1\nx\n2\n"}, ["y_train.txt", "could not convert"]),
        ({"y_train": "1\n2\n"}, ["subject_train.txt", "3 labels of 2 samples"]),
        ({"subject_test": "2\n31\n"}, ["subject_test.txt", "0..29"]),
        ({"body_acc_x_train": "1 2 3\n" * 3}, ["body_acc_x_train.txt", "(3, 3) values, not (3, 128)"]),
        ({"body_acc_x_train": "1 2\n1\n3 4\n"}, ["body_acc_x_train.txt", "row 2"]),
        ({"body_gyro_y_test": (" nan" * 128 + "\n") * 2}, ["body_gyro_y_test.txt", "not finite"]),
    ],
)
def test_har_names_the_file_that_is_wrong(tmp_path, changes, words):
    write_har(tmp_path, **changes)
    with user_error(str(tmp_path), *words):
        load(Har, tmp_path)


def test_an_empty_har_file_is_named(tmp_path):
    write_har(tmp_path, subject_train="")
    with user_error(str(tmp_path / "train/subject_train.txt"), "damaged"):
        load(Har, tmp_path)


def compact_har(**changes):
    arrays = {
        "signal": np.arange(200 * 9).reshape(200, 9).astype(np.int16),
        "scale": np.array([1, 1, 1, 1, 1, 1, 1, 1, 0.5], np.float32),
        "start": np.array([0, 72], np.int32),
        "label": np.array([0, 5], np.uint8),
        "subject": np.array([30, 2], np.uint8),
    }
    return {**arrays, **changes}


def test_compact_har_is_windows_of_scaled_recordings(tmp_path):
    np.savez(tmp_path / "har.npz", **compact_har())
    raw = load(Har, tmp_path)
    assert raw.x[1, 0, 0].tolist() == [9 * t for t in range(72, 200)]  # channel 0 of row t is 9t
    assert raw.x[1, 8, 0].tolist() == [0.5 * (9 * t + 8) for t in range(72, 200)]
    assert [rows.tolist() for rows in raw.natural] == [[1], [0]]
    assert raw.official_test.tolist() == [1]  # person 2 is one of the publishers' test persons, 30 is not


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start": np.array([0, 73])}, "a window ends behind the recording"),
        ({"start": np.array([-1, 0])}, "a window ends behind"),
        ({"label": np.array([0, 6])}, "0..5"),
        ({"subject": np.array([0, 1], np.uint8)}, "0..29"),
        ({"signal": np.zeros((200, 6), np.int16)}, "not a recording of nine signals"),
        ({"scale": np.ones(4)}, "har.npz"),
    ],
)
def test_compact_har_names_what_is_wrong(tmp_path, changes, words):
    np.savez(tmp_path / "har.npz", **compact_har(**changes))
    with user_error(str(tmp_path / "har.npz"), words):
        load(Har, tmp_path)


def test_real_har_has_10411_windows_of_30_people(real):
    raw = load(Har, real("uci_har"))
    assert raw.x.shape == (10_411, 9, 1, 128)
    assert np.bincount(raw.y).tolist() == [1722, 1544, 1407, 1801, 1979, 1958]  # README beside the file
    sizes = [len(rows) for rows in raw.natural]
    assert (len(sizes), min(sizes), max(sizes)) == (30, 284, 413)
    people = {i + 1 for i, rows in enumerate(raw.natural) if np.isin(rows, raw.official_test).all()}
    assert people == {2, 4, 9, 10, 12, 13, 18, 20, 24}
    assert len(raw.official_test) == sum(sizes[i - 1] for i in people)
    assert "10,411 windows" in raw.notes[0]
    # total acceleration is body acceleration and gravity, which is 1 g and slow; body acceleration swings around 0
    gravity = raw.x[:, 6:9, 0] - raw.x[:, 0:3, 0]
    assert np.median(np.linalg.norm(gravity, axis=1)) == pytest.approx(1, abs=0.05)
    still, moving = raw.y >= 3, raw.y < 3
    assert raw.x[still, :3].std() < 0.05 < 0.2 < raw.x[moving, :3].std()
    data = divide(raw, Natural(), 20)
    assert data.clients == 30


# -- Amazon reviews


def review(bag, mood):
    return " ".join([*(f"{word}:{count}" for word, count in bag.items()), f"#label#:{mood}"]) + "\n"


def write_reviews(folder, **changes):
    """Each kind of product has a bad and a good review; `changes` are texts, such as `dvd_positive`."""
    for domain in DOMAINS:
        (folder / domain).mkdir(parents=True)
        bags = {"negative": {"bad": 2, domain: 1, "a:b": 3}, "positive": {"good": 1, "bad": 1, "able": 5}}
        for mood, bag in bags.items():
            text = changes.get(f"{domain}_{mood}", review(bag, mood))
            if text is not None:
                (folder / domain / f"{mood}.review").write_text(text)


@pytest.mark.parametrize("inner", ["", "processed_acl", "amazon/processed_acl"])
def test_amazon_counts_the_words_that_most_reviews_have(tmp_path, inner):
    write_reviews(tmp_path / inner)
    raw = load(Amazon, tmp_path)
    assert raw.x.shape == (8, 5000)
    assert raw.x.dtype == np.float32
    # by the number of reviews: bad 8; a:b, able and good 4, in the order of the alphabet; then the kinds, one each
    columns = ["bad", "a:b", "able", "good", *DOMAINS]
    for row in range(8):
        domain, positive = DOMAINS[row // 2], row % 2
        bag = {"good": 1, "bad": 1, "able": 5} if positive else {"bad": 2, domain: 1, "a:b": 3}
        assert raw.x[row, :8].tolist() == [bag.get(word, 0) for word in columns]
    assert not raw.x[:, 8:].any()
    assert raw.y.tolist() == [0, 1] * 4
    assert [rows.tolist() for rows in raw.natural] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert raw.classes == 2
    assert Amazon.partition == "natural"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dvd_positive": None}, ["has no", "dvd/positive.review"]),
        ({"dvd_positive": ""}, ["dvd/positive.review", "line 1"]),
        ({"dvd_positive": review({"a": 1}, "negative")}, ["dvd/positive.review", "line 1", "#label#:positive"]),
        ({"dvd_positive": review({"a": 1}, "positive") + "b:2\n"}, ["dvd/positive.review", "line 2"]),
        ({"dvd_positive": "word #label#:positive\n"}, ["line 1 has a word without a count"]),
        ({"dvd_positive": "word:x #label#:positive\n"}, ["line 1 has a word without a count"]),
    ],
)
def test_amazon_names_the_file_and_the_line_that_is_wrong(tmp_path, changes, words):
    write_reviews(tmp_path, **changes)
    with user_error(str(tmp_path), *words):
        load(Amazon, tmp_path)


def mdan(**changes):
    """Six reviews of 6,000 words: the matrix lies on its side, so that its rows are words."""
    arrays = {
        "xx_data": np.array([1.0, 2.0, 3.0, 4.0]),
        "xx_row": np.array([0, 4999, 5000, 7]),
        "xx_col": np.array([0, 1, 2, 5]),
        "xx_shape": np.array([6000, 6]),
        "yy": np.array([[-1], [1], [1], [-1], [1], [-1]]),
        "offset": np.array([[0], [2], [3], [4], [6]]),
    }
    return {**arrays, **changes}


def test_amazon_in_the_file_of_the_literature(tmp_path):
    np.savez(tmp_path / "amazon.npz", **mdan())
    raw = load(Amazon, tmp_path)
    assert raw.x.shape == (6, 5000)
    assert [(i, j, raw.x[i, j]) for i, j in np.argwhere(raw.x)] == [(0, 0, 1), (1, 4999, 2), (5, 7, 4)]
    assert raw.y.tolist() == [0, 1, 1, 0, 1, 0]  # (y + 1) / 2
    assert [rows.tolist() for rows in raw.natural] == [[0, 1], [2], [3], [4, 5]]
    assert "6,465, 5,586, 7,681, 7,945" in raw.notes[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offset": np.array([0, 2, 3, 6])}, "its offsets are not of 4 kinds"),
        ({"offset": np.array([0, 2, 2, 4, 6])}, "its offsets are not of 4 kinds"),
        ({"yy": np.array([0, 1, 1, 0, 1, 0])}, "neither -1 nor 1"),
        ({"yy": np.array([1, 1])}, "2 labels of 6 reviews"),
        ({"xx_row": np.array([1])}, "4 values, 4 rows, 1 columns"),
    ],
)
def test_the_file_of_the_literature_names_what_is_wrong(tmp_path, changes, words):
    np.savez(tmp_path / "amazon.npz", **mdan(**changes))
    with user_error(str(tmp_path / "amazon.npz"), words):
        load(Amazon, tmp_path)


def compact_amazon(**changes):
    arrays = {
        "indptr": np.array([0, 2, 2, 3, 4], np.int32),
        "indices": np.array([0, 4999, 7, 8], np.uint16),
        "counts": np.array([1, 200, 3, 4], np.uint8),
        "label": np.array([0, 1, 0, 1], np.uint8),
        "domain": np.array([0, 1, 2, 3], np.uint8),
    }
    return {**arrays, **changes}


def test_compact_amazon_is_a_sparse_matrix(tmp_path):
    np.savez(tmp_path / "amazon.npz", **compact_amazon())
    raw = load(Amazon, tmp_path)
    cells = [(int(i), int(j), float(raw.x[i, j])) for i, j in np.argwhere(raw.x)]
    assert cells == [(0, 0, 1), (0, 4999, 200), (2, 7, 3), (3, 8, 4)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"indices": np.array([0, 5000, 7, 8])}, "a word is not in 0..4999"),
        ({"indptr": np.array([0, 2, 1, 3, 4])}, "do not ascend"),
        ({"indptr": np.array([0, 2, 2, 3, 5])}, "4 counts of 5 words"),
        ({"counts": np.array([1, 2, 3])}, "3 counts of 4 words"),
        ({"label": np.array([0, 2, 0, 1])}, "0..1"),
        ({"domain": np.array([0, 1, 2, 4])}, "0..3"),
    ],
)
def test_compact_amazon_names_what_is_wrong(tmp_path, changes, words):
    np.savez(tmp_path / "amazon.npz", **compact_amazon(**changes))
    with user_error(str(tmp_path / "amazon.npz"), words):
        load(Amazon, tmp_path)


def test_real_amazon_has_2000_reviews_of_each_kind(real, tmp_path):
    raw = load(Amazon, real("amazon_reviews"))
    assert raw.x.shape == (8000, 5000)
    assert [len(rows) for rows in raw.natural] == [2000] * 4
    assert [raw.y[rows].sum() for rows in raw.natural] == [1000] * 4
    assert raw.x.any(1).all()  # no review without a word
    assert "2,000, 2,000, 2,000, 2,000 reviews" in raw.notes[0]
    # written as the publishers did, the same reviews give the same table: the vocabulary is chosen in the same way
    stored = np.load(real("amazon_reviews") / "amazon_reviews/amazon.npz")
    words = stored["vocab"].item().decode().split("\n")
    for d, domain in enumerate(DOMAINS):
        (tmp_path / domain).mkdir()
        for label, mood in enumerate(("negative", "positive")):
            rows = np.flatnonzero((stored["domain"] == d) & (stored["label"] == label))
            bags = ({words[j]: int(raw.x[i, j]) for j in np.flatnonzero(raw.x[i])} for i in rows)
            text = "".join(review(bag, mood) for bag in bags)
            (tmp_path / domain / f"{mood}.review").write_text(text, encoding="utf-8")
    again = load(Amazon, tmp_path)
    assert np.array_equal(again.x, raw.x)
    assert np.array_equal(again.y, raw.y)
