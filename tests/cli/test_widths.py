"""Tables fit a terminal of 80 columns, and no word is broken over lines."""

import io
import re

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import fedloom
from fedloom.cli import display
from fedloom.cli.catalog import catalog
from fedloom.cli.check_report import print_check
from fedloom.cli.tables import Column, number_column, print_table, wrap_words
from fedloom.config.resolve import resolve
from fedloom.data.sets.own import OwnData
from fedloom.data.user_data.check import check
from fedloom.report.partition import describe
from fedloom.studies.build import make_data

WIDTH = 80
TINY = {"rounds": 2, "clients": 5, "plan": "per-client", "device": "cpu"}
LONG = [
    "fedavg",
    "ditto:lam=0.5,personal_epochs=2",
    "plgu-grep:rho=0.06,head_epochs=7",
    "per-fedavg",
    "pfedkt:mu=0.125,local_momentum=0.75",
]


def printed(function, *args, width=WIDTH, **options):
    console = Console(width=width, file=io.StringIO())
    function(console, *args, **options)
    return console.file.getvalue()


def tables(text):
    """The lines of all tables in an output: those around a rule, up to an empty line."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if line.strip() and set(line.strip()) == {"─"}:
            first, last = i, i
            while lines[first - 1].strip():
                first -= 1
            while last + 1 < len(lines) and lines[last + 1].strip():
                last += 1
            yield [line for line in lines[first : last + 1] if set(line.strip()) != {"─"}]


def whole(words):
    """Words, and what is left of them on a line if they are divided behind ':', ',' or '/'."""
    found = set()
    for word in words:
        pieces = re.split(r"(?<=[:,/])(?=.)", word)
        found |= {"".join(pieces[i:j]) for i in range(len(pieces)) for j in range(i + 1, len(pieces) + 1)}
    return found


def check_tables(function, *args, cells=(), count=1, **options):
    """Print to 80 columns: there are `count` tables, no line is too long, and no word of a table is broken, as which
    words there are is seen where nothing is wrapped. All words of `cells` are there."""
    narrow, wide = (printed(function, *args, width=width, **options) for width in (WIDTH, 1000))
    lines = [line for line in narrow.splitlines() if ": fedloom run" not in line]  # which are to be copied
    assert max(map(len, lines)) <= WIDTH, narrow
    found, full = list(tables(narrow)), list(tables(wide))
    assert len(found) == len(full) == count
    for lines, all_lines in zip(found, full, strict=True):
        fragments = {word for line in lines for word in line.split()} - whole(" ".join(all_lines).split())
        assert not fragments, narrow
    words = {word for lines in found for line in lines for word in line.split()}
    for word in (word for cell in cells for word in cell.split()):
        pieces = re.split(r"(?<=[:,/])(?=.)", word)
        assert all(any(piece in other for other in words) for piece in pieces), f"{word} is not in\n{narrow}"
    return narrow


def test_a_broken_word_would_be_noticed():
    def broken(console):
        word = "prototypes" if console.width > WIDTH else "prototy\n pes"
        console.print(f"\n method\n ──────\n {word}\n")

    with pytest.raises(AssertionError, match="prototy"):
        check_tables(broken)


# -- lists


@pytest.mark.parametrize("kind", ["algorithms", "datasets", "models", "partitions", "presets", "settings"])
def test_lists(kind):
    rows = catalog(kind)
    shown = {"algorithms": ("name", "source", "shared", "private"), "datasets": ("name", "about", "size")}
    columns = shown.get(kind, ("name", "takes", "about", "source"))
    cells = [str(row[column]) for row in rows for column in columns if row.get(column)]
    check_tables(display.print_catalog, kind, rows, False, details=False, cells=cells)


@pytest.mark.parametrize("kind", ["algorithms", "datasets", "models", "partitions", "presets"])
def test_details_of_all_entries(kind):
    for name in [row["name"] for row in catalog(kind)]:
        rows = catalog(kind, name)
        cells = [text for setting, about in rows[0]["settings"].items() for text in (setting, about["about"])]
        count = 1 if rows[0]["settings"] else 0
        check_tables(display.print_catalog, kind, rows, False, details=True, cells=cells, count=count)


def test_wide_terminals_show_more_of_methods():
    rows = catalog("algorithms")
    titles = [next(tables(printed(display.print_catalog, "algorithms", rows, False, details=False, width=width)))[0]
              for width in (80, 140)]  # fmt: skip
    assert [title.split() for title in titles] == [
        ["name", "source", "shared", "private"],
        ["name", "source", "shared", "private", "personal", "global", "targets"],
    ]


# -- results


@pytest.fixture(scope="module")
def comparison():
    return fedloom.compare(LONG, seeds=2, holdout_clients=1, **TINY)


@pytest.fixture(scope="module")
def result():
    return fedloom.run("ditto", holdout_clients=1, server_share=0.1, **TINY)


def test_run(result):
    cells = ["last round", "best on validation", "personal, trained", "unseen, on arrival", "lowest 5 %", "log loss"]
    check_tables(display.print_result, result, count=2, cells=cells)


def test_run_with_numbers_as_targets():
    found = fedloom.run("fedavg", "regions", **TINY)
    check_tables(display.print_result, found, count=2, cells=["RMSE", "worst 5 %", "personal, trained"])


def test_compare(comparison):
    labels = [row["method"] for row in comparison.board]
    assert any(len(label) > 30 for label in labels)
    titles = ["lowest 5 %", "gain", "harmed %", "last", "participating", "on arrival", "evaluation, s"]
    count = len(list(tables(printed(display.print_comparison, comparison, width=1000))))
    assert count >= 3
    check_tables(display.print_comparison, comparison, count=count, cells=[*labels, *titles])


def test_labels_are_divided_only_behind_colons_and_commas(comparison):
    text = printed(display.print_comparison, comparison)
    for piece in ("ditto:", "lam=0.5,", "personal_epochs=2", "local_momentum=0.75"):
        assert re.search(rf"(^|[\s:,]){re.escape(piece)}", text, re.MULTILINE)


def test_a_comparison_of_short_names_has_all_columns():
    found = fedloom.compare(["fedavg", "ditto"], seeds=1, **TINY)
    first = next(tables(printed(display.print_comparison, found)))
    title = " ".join(" ".join(first[:2]).split())
    for word in ("lowest", "top", "worst", "std", "gain", "harmed", "last"):
        assert word in title


def test_sweep():
    grid = {"lr": [0.01, 0.1], "personal_epochs": [1, 2], "weight_decay": [0, 0.0001]}
    found = fedloom.sweep("ditto", grid=grid, **TINY)
    check_tables(display.print_sweep, found, cells=["lr", "personal_epochs", "weight_decay", "0.0001", "validation"])


def test_predictions():
    where = [f"patients-of-the-university-hospital.csv, row {i}" for i in range(3)]
    names = ("tuberculosis", "pneumonia", "healthy", "bronchitis")
    columns = {"sample": where, "client": ["Saint-Petersburg", "Rome", "Rio de Janeiro"], "predicted": list(names[:3])}
    table = pa.table(columns | {f"p({name})": [0.25, 0.5, 0.125] for name in names})
    text = check_tables(display.print_predictions, table, [], complete=False, cells=[*where, *columns["client"]])
    assert "too narrow for all probabilities" in text


METRICS = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "auprc", "log_loss", "calibration_error")


def test_evaluation():
    clients = ["Saint-Petersburg", "Rome", "Rio de Janeiro", "Frankfurt (Oder), Klinik 3"]
    rows = [{"client": client, "samples": 12345, **dict.fromkeys(METRICS, 98.7654)} for client in clients]
    over = {name: {"mean": 98.7654, "worst": 1.2345} for name in METRICS}
    evaluation = {"clients": rows, "over_clients": over, "recall": {"ill": 76.8, "well": 83.3}, "confusion": []}
    check_tables(display.print_evaluation, evaluation, False, cells=[*clients, "accuracy", "worst", "98.77"])


# -- data


def test_data_show():
    for dataset, config in {"digits": {"holdout_clients": 2}, "synthetic": {}, "regions": {}}.items():
        data = make_data(resolve({"device": "cpu", "clients": 12, "dataset": dataset, **config}))
        check_tables(display.print_partition, describe(data), False, cells=["client", "samples", "train", "val"])


def test_data_show_with_long_names_of_clients():
    names = ["university_hospital_of_freiburg", "st_mary", "clinic/north/ward_3"]
    counts = [{"samples": 1234, "train": 900, "val": 123, "test": 211, "classes": 25, "labels": [50] * 25}] * 3
    clients = [{"client": i, "name": name, **c} for i, (name, c) in enumerate(zip(names, counts, strict=True))]
    statistics = {"clients": clients, "target": "classes", "samples": 3702, "classes": 25, "server": 0, "skew": 0.5}
    check_tables(display.print_partition, statistics, False, cells=["client", "clinic/north/ward_3"])


CLASSES = ["tuberculosis", "pneumonia", "bronchitis", "sarcoidosis", "pneumothorax", "emphysema"]
CLINICS = ["north_clinic", "south_clinic", "east_clinic", "university_hospital"]


@pytest.mark.parametrize("count", [2, 6])
def test_data_check(count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{i % 7 + i / 100},{CLINICS[i % 4]},{CLASSES[i // 4 % count]}" for i in range(96)]
    (tmp_path / "lungs.csv").write_text("\n".join(["age,client,label", *rows]))
    report = check(OwnData(path="lungs.csv"))
    text = printed(print_check, report, [], False)
    found = list(tables(text))
    assert len(found) == (1 if count == 2 else 2)  # a column for each class, or a row
    words = {word for lines in found for line in lines for word in line.split()}
    assert {*CLINICS, *CLASSES[:count], "96" if count == 2 else "24"} <= words
    assert max(len(line) for lines in found for line in lines) <= WIDTH


# -- the table itself

words = st.text("abcdefgh_=.0", min_size=1, max_size=14)
labels = st.lists(words, min_size=1, max_size=4).map(":".join)
texts = st.lists(labels, min_size=0, max_size=6).map(" ".join)


@given(st.lists(st.tuples(texts, texts, st.integers(0, 10**6).map(str)), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_any_table_of_words_that_fit_is_intact(rows):
    columns = [
        Column("label"),
        Column("a title of four words"),
        number_column("a number"),
        Column("more", optional=True),
    ]

    def show(console):
        print_table(console, columns, [[*row, "something that is left out first"] for row in rows])

    check_tables(show, cells=[text for row in rows for text in row])


def test_a_word_that_does_not_fit_at_all_is_cut_and_the_table_is_no_wider():
    def show(console):
        print_table(console, [Column("label"), number_column("number")], [["x" * 200, "1"]])

    lines = printed(show).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "".join(lines).count("x") == 200


def test_words_are_wrapped_with_their_indent_and_numbers_are_whole():
    assert wrap_words("  personal, trained", 11) == ["  personal,", "  trained"]
    assert wrap_words("127,600 texts", 8) == ["127,600", "texts"]
    assert wrap_words("ditto:lam=0.5,personal_epochs=2", 17) == ["ditto:lam=0.5,", "personal_epochs=2"]
