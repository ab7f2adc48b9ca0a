"""User data through the command line: every mistake in them gets a sentence that says where it is."""

import gzip
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import make_unfinished, run_cli
from owndata import TEXT_FEATURES, arrays, csv, hugging_face, pictures, png, rows, stream, texts, write

from fedloom.data import limits

GOOD = rows()
X = np.random.default_rng(0).normal(size=(12, 3))
Y = np.arange(12) % 2
C = np.repeat(["a", "b", "c"], 4)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(limits, "INFLATED", 10 << 20)  # a smaller bomb is enough


def changed(row, column, value):
    """The table with one cell changed; row 2 is the first below the header, as in a spreadsheet."""
    made = [list(r) for r in GOOD]
    made[row - 2][column] = value
    return csv(made)


def parquet(path, columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def data(content, name="data.csv"):
    return lambda d: write(d / name, content)


def sites(**other):
    """A table for each of two sites, and the given contents for others."""

    def make(d):
        for name in ("berlin", "paris"):
            write(d / f"data/{name}.csv", csv([r[1:] for r in GOOD], "age,sex,label"))
        for name, content in other.items():
            write(d / f"data/{name}.csv", content)
        return d / "data"

    return make


def also(make, path, content=""):
    """`make`, with one more file."""

    def both(d):
        write(d / path, content)
        return make(d)

    return both


def linked(make, path, target):
    """`make`, with one more symbolic link."""

    def both(d):
        made = make(d)
        (d / path).parent.mkdir(parents=True, exist_ok=True)
        (d / path).symlink_to(target)
        return made

    return both


def piped(make, path):
    """`make`, with one more named pipe."""

    def both(d):
        made = make(d)
        os.mkfifo(d / path)
        return made

    return both


def broken_description(path):
    pq.write_table(texts().replace_schema_metadata({b"huggingface": b'{"info": [}'}), path)
    return path


def saved(**given):
    return lambda d: arrays(d / "data.npz", **given)


def cut(path, keep):
    """The file's first bytes only."""
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])
    return path


def truncated_parquet(d):
    parquet(d / "data.parquet", {"age": [1.0, 2.0], "label": ["a", "b"]})
    return cut(d / "data.parquet", 0.7)


def truncated_picture(d):
    folder = pictures(d / "data")
    cut(folder / "a/cat/2.png", 0.6)
    return folder


def truncated_stream(d):
    folder = hugging_face(d / "data", [texts(12), texts(12)], TEXT_FEATURES)
    (folder / "data-00001-of-00002.arrow").write_bytes(stream(texts(12))[:-8])
    return folder


def without(name, d):
    folder = hugging_face(d / "data", [texts()], TEXT_FEATURES)
    (folder / name).unlink()
    return folder


def nested(d):
    parquet(d / "data.parquet", {"age": [1.0, 2.0, 3.0], "scan": [[1, 2], [3], [4]], "label": ["a", "b", "a"]})
    return d / "data.parquet"


MISTAKES = {
    "no such file": (data(csv(GOOD)), "dta.csv", ["dta.csv does not exist", "did you mean 'data.csv'?"]),
    "no such folder": (data(csv(GOOD)), "nowhere/dta.csv", ["does not exist, nor does nowhere"]),
    "unknown kind of file": (data("x", "./data.docx"), None, ["data.docx is not a file that FedLoom reads", ".csv"]),
    "label missing": (data(csv(GOOD, "client,age,sex,outcome")), None, ["no column 'label'", "outcome", "label=NAME"]),
    "label misspelt": (data(csv(GOOD)), "label=lable", ["no column 'lable'", "did you mean 'label'?"]),
    "client misspelt": (data(csv(GOOD)), "client=clinet", ["no column 'clinet'", "did you mean 'client'?"]),
    "ignored column misspelt": (data(csv(GOOD)), "ignore=sexx", ["no column 'sexx'", "did you mean 'sex'?"]),
    "empty label": (data(changed(5, 3, "")), None, ["data.csv, row 5: the label 'label' is empty"]),
    "empty client": (data(changed(9, 0, " ")), None, ["data.csv, row 9: the client 'client' is empty"]),
    "missing value": (
        data(changed(7, 1, "NA")), None,
        ["Column 'age' has no value in 1 row, first in data.csv, row 7", "missing=mean"],
    ),
    "missing word": (data(changed(4, 2, "")), None, ["Column 'sex' has no value in 1 row, first in data.csv, row 4"]),
    "NaN": (data(changed(3, 1, "nan")), None, ["Column 'age' has no value", "data.csv, row 3"]),
    "infinite": (data(changed(8, 1, "inf")), None, ["data.csv, row 8: column 'age' has inf"]),
    "too large": (data(changed(8, 1, "1e60")), None, ["data.csv, row 8: column 'age' has 1e+60"]),
    "a word among numbers": (data(changed(6, 1, "old")), None, ["data.csv, row 6: column 'age' has 'old'"]),
    "ragged row": (
        data(csv(GOOD).replace("\n", "\nx,y\n", 1)), None, ["data.csv, row 2 has 2 values, but there are 4 columns"]
    ),
    "row too long": (data(csv([*GOOD, (*GOOD[0], 1)])), None, ["data.csv, row 32 has 5 values"]),
    "empty file": (data(""), None, ["data.csv is empty"]),
    "header only": (data("client,age,label\n"), None, ["data.csv has a header but no rows"]),
    "bad encoding": (
        data(csv(GOOD).encode() + b"Rome,30,f,gro\xdf\n"), None,
        [f"data.csv, row 32: byte {len(csv(GOOD)) + len('Rome,30,f,gro')} is not UTF-8"],
    ),
    "UTF-16": (data(csv(GOOD).encode("utf-16")), None, ["data.csv, row 1: byte 0 is not UTF-8"]),
    "column twice": (data(csv(GOOD, "client,age,age,label")), None, ["data.csv has two columns 'age'"]),
    "wrong delimiter": (data(csv(GOOD)), "delimiter=semicolon", ["no column 'label'", "client,age,sex,label"]),
    "damaged gzip": (
        data(gzip.compress(csv(GOOD).encode())[:40], "data.csv.gz"), None,
        ["data.csv.gz", "cannot be read"],
    ),
    "a fraction as class": (data(changed(5, 3, "0.5").replace("ill", "1").replace("well", "0")), "target=class",
                            ["data.csv, row 5: the label 'label' is 0.5", "classes"]),
    "a word as number": (data(csv([(*r[:3], "?!" if i == 4 else i) for i, r in enumerate(GOOD)])),
                         "target=number", ["the label 'label' is '?!', not a finite number"]),
    "one class": (data(csv([(*r[:3], "ill") for r in GOOD])), None, ["one class, 'ill'"]),
    "an id as label": (data(csv([(*r[:3], f"p{i}") for i, r in enumerate(GOOD)])), None, ["30 classes for 30 samples"]),
    "one client": (data(csv([("Rome", *r[1:]) for r in GOOD])), None, ["one client, 'Rome'", "client=none"]),
    "a client per row": (data(csv([(i, *r[1:]) for i, r in enumerate(GOOD)])), None, ["No client has two samples"]),
    "clients alike": (
        data(changed(5, 0, "berlin ")), None, ["'Berlin' (data.csv, row 2)", "'berlin' (data.csv, row 5)", "alike"]
    ),
    "classes alike": (data(changed(5, 3, "ill ")), None, ["classes", "alike", "data.csv, row 5"]),
    "unknown part": (
        data(csv([(*r, "train" if i else "tests") for i, r in enumerate(GOOD)], "client,age,sex,label,split")), None,
        ["data.csv, row 2: 'split' is 'tests'", "did you mean 'test'?"],
    ),
    "an id as column": (
        data(csv([(r[0], f"{r[1]}-{i}", *r[2:]) for i, r in enumerate(rows(80))])), None,
        ["Column 'age' has 80 different words", "ignore=age"],
    ),
    "nothing but labels": (
        data(csv([(r[0], r[3]) for r in GOOD], "client,label")), None,
        ["no column beside client, label"],
    ),
    "other columns at a client": (
        sites(rome=csv([r[1:] for r in GOOD], "aeg,sex,label")), None,
        ["data/rome.csv has no column 'age', which data/berlin.csv has"],
    ),
    "one column more at a client": (
        sites(rome=csv(GOOD, "weight,age,sex,label")), None, ["data/rome.csv has a column 'weight'"]
    ),
    "an empty table among others": (sites(rome=""), None, ["data/rome.csv is empty"]),
    "client in two files": (
        also(sites(), "data/paris/more.csv", csv([r[1:] for r in GOOD], "age,sex,label")), None,
        ["Client 'paris' is there twice", "data/paris.csv", "data/paris"],
    ),
    "empty client folder": (also(sites(), "data/rome/.keep"), None, ["data/rome is an empty folder"]),
    "link in a circle": (
        linked(sites(), "data/rome/all", "../../data"), None,
        ["data/rome/all is a link that leads back"],
    ),
    "link to nowhere": (
        linked(sites(), "data/rome.csv", "absent.csv"), None,
        ["data/rome.csv is a link that leads nowhere"],
    ),
    "pipe": (piped(sites(), "data/rome.csv"), None, ["data/rome.csv is a pipe, a socket or a device"]),
    "device": (linked(sites(), "data/rome.csv", "/dev/zero"), None, ["data/rome.csv is a pipe, a socket or a device"]),
    "a pipe alone": (piped(sites(), "pipe.csv"), "./pipe.csv", ["pipe.csv is a pipe, a socket or a device"]),
    "folder by two links": (
        linked(linked(also(sites(), "more/x.csv"), "data/a", "../more"), "data/b", "../more"), None,
        ["data/a and data/b are the same folder, by a link"],
    ),
    "name with a line break": (also(sites(), "data/a\nb.csv", "x"), None, [r"data/a\nb.csv has a line break"]),
    "name in another encoding": (also(sites(), "data/gro\udcdf.csv", "x"), None, [r"data/gro\udcdf.csv has", "UTF-8"]),
    "client of 5000 digits": (
        data(changed(5, 0, "1" * 5000)), None, ["data.csv, row 5: the client 'client' is '111", "of 5000 characters"]
    ),
    "label of 5000 digits": (
        data(changed(5, 3, "1" * 5000).replace("ill", "1").replace("well", "0")), None,
        ["data.csv, row 5: the label 'label' is '111", "of 5000 characters"],
    ),
    "client with a line break": (
        data(changed(5, 0, '"Ber\nlin"')), None, ["the client 'client' is 'Ber lin', a name with a line break"]
    ),
    "column with a long name": (data(csv(GOOD, f"client,{'a' * 5000},sex,label")), None, ["a name of 5000 characters"]),
    "numbers with decimal commas": (
        data(csv(rows(80)).replace(",", ";").replace(".", ",")), None,
        ["Column 'age' is read as words", "decimal comma", "write them with a point"],
    ),
    "nothing but a number with a decimal comma": (
        data(csv([(r[1], r[3]) for r in rows(80)], "age,label").replace(",", ";").replace(".", ",")), None,
        ["Column 'age' is read as words", "decimal comma"],
    ),
    "some numbers with decimal commas": (
        data(changed(6, 1, '"3,5"')), None, ["data.csv, row 6: column 'age' has '3,5'", "a point instead of the comma"]
    ),
    "description of columns": (
        lambda d: broken_description(d / "data.parquet"), None,
        ["data.parquet has a damaged description of its columns"],
    ),
    "arrays: token ids": (
        saved(x=np.arange(36).reshape(12, 3) * 10**7, y=Y), "kind=sequence",
        ["data.npz, row 11: a token id is 350000000", "number the V words"],
    ),
    "bomb": (
        lambda d: write(
            d / "data.csv.gz", gzip.compress(b"client,age,label\n") + gzip.compress(b"a,1,x\n" * 170_000, 9) * 20
        ), None,
        ["data.csv.gz inflates to more than 200 times its size", "unpack it first"],
    ),
    "nothing readable": (data("x", "data/notes.docx"), "./data", ["data has nothing that FedLoom reads", "notes.docx"]),
    "empty folder": (also(data(""), "data/.keep"), "./data", ["data has nothing that FedLoom reads; it reads CSV"]),
    "tables and pictures": (also(sites(), "data/x/y.png", png()), None, ["files of different kinds", "x/y.png"]),
    "truncated Parquet": (truncated_parquet, None, ["data.parquet is not a complete Parquet file"]),
    "nested column": (nested, None, ["data.parquet: column 'scan' is nested", "ignore=scan"]),
    "arrays: no y": (saved(x=X, Y=Y), None, ["data.npz has no array 'y'", "known: Y, x"]),
    "arrays: lengths": (saved(x=X, y=Y[:-1]), None, ["data.npz has 12 samples in x, but 11 in y"]),
    "arrays: objects": (saved(x=X, y=np.array([{}] * 12)), None, ["data.npz holds Python objects"]),
    "arrays: regression": (saved(x=X, y=Y + 0.5), "target=class", ["data.npz, row 0: the label in 'y' is 0.5"]),
    "arrays: NaN": (saved(x=np.where(np.arange(12)[:, None] == 4, np.nan, X), y=Y), None, ["data.npz, row 4: x has"]),
    "arrays: a label per step": (
        saved(x=X, y=np.stack([Y, Y], 1)), "target=class",
        ["y has the shape (12, 2), but target=class needs one value per sample"],
    ),
    "arrays: flat": (saved(x=X[:, 0], y=Y), None, ["data.npz: x must hold numbers"]),
    "arrays: truncated": (lambda d: cut(saved(x=X, y=Y)(d), 0.5), None, ["data.npz is not a complete .npz file"]),
    "arrays: no samples": (saved(x=X[:0], y=Y[:0]), None, ["data.npz has no samples"]),
    "arrays: negative token": (
        saved(x=np.arange(-3, 33).reshape(12, 3), y=Y, client=C), "kind=sequence", ["data.npz, row 0: a token id is -3"]
    ),
    "pictures: sizes": (
        also(lambda d: pictures(d / "data"), "data/b/dog/9.png", png((5, 7))), None,
        ["Pictures have 2 sizes", "8x8", "5x7 (data/b/dog/9.png)", "resize=8"],
    ),
    "pictures: truncated": (truncated_picture, None, ["data/a/cat/2.png is damaged"]),
    "pictures: not a picture": (
        also(lambda d: pictures(d / "data"), "data/a/dog/9.png", "hello"), None, ["data/a/dog/9.png is not a picture"]
    ),
    "pictures: empty file": (
        also(lambda d: pictures(d / "data"), "data/a/dog/9.jpg"), None,
        ["data/a/dog/9.jpg is empty"],
    ),
    "pictures: no class folder": (
        also(lambda d: pictures(d / "data"), "data/a/9.png", png()), None,
        ["data/a/9.png does not lie in a folder CLIENT/CLASS"],
    ),
    "pictures: no folders": (
        lambda d: write(d / "data/a.png", png()).parent, None,
        ["folders CLIENT/CLASS or CLASS", "a.png"],
    ),
    "pictures: one alone": (
        lambda d: write(d / "data.png", png()), None,
        ["data.png is not a file that FedLoom reads"],
    ),
    "Arrow without notes": (
        lambda d: write(d / "data/x.arrow", b"").parent, None,
        ["no state.json and no dataset_info.json"],
    ),
    "no dataset_info": (lambda d: without("dataset_info.json", d), None, ["data has no dataset_info.json"]),
    "no state": (lambda d: without("state.json", d), None, ["data has no state.json"]),
    "Arrow file missing": (
        lambda d: without("data-00000-of-00001.arrow", d), None, ["data-00000-of-00001.arrow is missing", "state.json"]
    ),
    "truncated Arrow": (truncated_stream, None, ["data-00001-of-00002.arrow is not a complete Arrow file"]),
    "no bytes of a picture": (
        lambda d: hugging_face(
            d / "data",
            [pa.table({"image": [{"bytes": png(), "path": "a"}, {"bytes": None, "path": "b"}], "label": [0, 1]})],
            {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}},
        ), None,
        ["data-00000-of-00001.arrow, row 2: the picture in 'image' is empty"],
    ),
    "unlabelled": (
        lambda d: hugging_face(d / "data", [texts().set_column(1, "label", [[-1] * 24])], TEXT_FEATURES), None,
        ["row 1: the label 'label' names no class"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_data_gets_one_sentence_that_says_where_it_is(mistake, tmp_path, monkeypatch, capsys):
    make, more, words = MISTAKES[mistake]
    path = os.path.relpath(make(tmp_path), tmp_path)
    settings = ["--set", more] if more and "=" in more else []
    path = more if more and "=" not in more else os.path.join(".", path)
    before = sorted(tmp_path.rglob("*"))

    code, out, err = run_cli(monkeypatch, capsys, "run", "--dataset", path, *settings)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1, err
    for word in words:
        assert word in err
    assert err.strip().endswith((".", "?"))
    assert sorted(tmp_path.rglob("*")) == before  # no folder of a run that never began

    code, out, err = run_cli(monkeypatch, capsys, "data", "check", path, *settings, "--json")
    assert (code, err) == (2, "")
    found = json.loads(out)
    assert not found["ready"]
    assert any(all(word in problem["text"] for word in words) for problem in found["problems"]), found["problems"]
    code, out, err = run_cli(monkeypatch, capsys, "data", "check", path, *settings)
    assert (code, err) == (2, "")
    assert "not ready" in out


def test_a_file_that_must_not_be_read_is_named(tmp_path, monkeypatch, capsys):
    folder = sites(rome=csv(GOOD))(tmp_path)
    opened = type(folder).open

    def refuse(self, *args, **kwargs):
        if self.name == "paris.csv":
            raise PermissionError(13, "Permission denied")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(type(folder), "open", refuse)  # root, as which tests may run, may read everything
    code, out, err = run_cli(monkeypatch, capsys, "run", "--dataset", folder)
    assert (code, out) == (2, "")
    assert "data/paris.csv cannot be read (permission denied)" in err


WARNINGS = {
    "capitals": (
        csv([(*r[:3], {"ill": ["Yes", "yes"], "well": ["no", "No"]}[r[3]][i % 2]) for i, r in enumerate(rows(60))]),
        "Classes that differ in capitals only count as different ones: 'No' and 'no', 'Yes' and 'yes'; write them "
        "alike if they are the same.",
    ),
    "a code of the label": (
        csv([(*r, "I21" if r[3] == "ill" else "Z00") for r in GOOD], "client,age,sex,label,code"),
        "Every value of column code comes with one class only, so it may leak the label; unless it is known before the "
        "label, leave it out with --set ignore=code.",
    ),
    "copies of the label": (
        csv([(*r, r[3], int(r[3] == "ill")) for r in GOOD], "client,age,sex,label,outcome,ill"),
        "Every value of columns outcome, ill comes with one class only, so they may leak the label; unless they are "
        "known before the label, leave them out with --set ignore=outcome,ill.",
    ),
    "decimal commas": (
        csv([(*r[:3], f'"{i % 5},5"', r[3]) for i, r in enumerate(GOOD)], "client,age,sex,dose,label"),
        "Column 'dose' is read as words, but '0,5' and others look like numbers with a decimal comma; write them with "
        "a point (3.14).",
    ),
}  # fmt: skip


@pytest.fixture
def warned(caplog):
    """A function that returns what FedLoom has warned of."""
    return lambda: [record.getMessage() for record in caplog.records if record.name == "fedloom"]


SHORT = ("--rounds", "1", "--no-save", "--plan", "stacked-eager")


@pytest.mark.parametrize("kind", WARNINGS)
def test_data_that_are_not_what_they_seem_get_a_warning(kind, tmp_path, monkeypatch, capsys, warned):
    text, sentence = WARNINGS[kind]
    write(tmp_path / "data.csv", text)
    code, out, _ = run_cli(monkeypatch, capsys, "data", "check", "data.csv", "--json")
    assert code == 0
    assert [remark["text"] for remark in json.loads(out)["remarks"]].count(sentence) == 1
    assert warned() == []  # once is enough
    write(tmp_path / "data.csv", text + "\n")  # a change, so that the run reads it again
    code, _, _ = run_cli(monkeypatch, capsys, "run", "fedavg", "--dataset", "data.csv", *SHORT)
    assert code == 0
    assert [text for text in warned() if "most frequent class" not in text] == [sentence]


def test_of_many_warnings_a_run_prints_a_few(tmp_path, monkeypatch, capsys, warned):
    made = [(r[0], r[1], *[f'"{i % 5},5"'] * 9, r[3]) for i, r in enumerate(GOOD)]
    write(tmp_path / "data.csv", csv(made, ",".join(["client,age", *(f"c{k}" for k in range(9)), "label"])))
    run_cli(monkeypatch, capsys, "run", "fedavg", "--dataset", "data.csv", *SHORT)
    assert len([text for text in warned() if "most frequent class" not in text]) == 4
    assert warned()[3] == "There are 6 more warnings like this one; 'fedloom data check' prints them."


def test_a_run_records_the_number_of_clients_that_the_data_have(tmp_path, monkeypatch, capsys):
    write(tmp_path / "data.csv", csv([(f"hospital {i % 8}", *r[1:]) for i, r in enumerate(rows(160))]))
    run_cli(monkeypatch, capsys, "run", "fedavg", "--dataset", "data.csv", "--out", "r", *SHORT[:2])
    assert "\nclients: 8\n" in (tmp_path / "r/config.yaml").read_text()


def test_a_check_collects_what_is_wrong_and_says_what_is_there(tmp_path, monkeypatch, capsys):
    made = [[*r, 1] for r in GOOD]
    made[3][1], made[5][1], made[8][1], made[11][3] = "", "", "old", ""
    made += [made[0], ["Paris", *made[0][1:]]]
    lines = csv(made, "client,age,sex,label,consent").splitlines()
    write(tmp_path / "data.csv", "\n".join([*lines[:3], "one,two", "", *lines[3:]]))  # two more rows before row 4
    code, out, _ = run_cli(monkeypatch, capsys, "data", "check", "data.csv", "--json")
    found = json.loads(out)
    assert code == 2
    texts = [problem["text"] for problem in found["problems"]]
    assert len(texts) == 4
    assert any("row 4 has 2 values, but there are 5 columns" in text for text in texts)
    assert any("row 15: the label 'label' is empty" in text for text in texts)
    assert any("'age' has no value in 2 rows, first in data.csv, row 7" in text for text in texts)
    assert any("row 12: column 'age' has 'old'" in text for text in texts)
    remarks = " ".join(remark["text"] for remark in found["remarks"])
    assert "'consent' is 1 everywhere" in remarks
    assert "Samples at two clients: 1, such as data.csv, row 2 and data.csv, row 35" in remarks
    assert "Copies: 1, such as data.csv, row 2 and data.csv, row 34" in remarks
    assert found["samples"] == 31  # of 32, one has no label
    assert {one["client"]: one["samples"] for one in found["clients"]} == {"Berlin": 11, "Paris": 11, "Rome": 9}


def test_a_check_of_good_data_ends_with_the_command_that_trains_on_them(tmp_path, monkeypatch, capsys):
    write(tmp_path / "data.csv", csv([(i, *r) for i, r in enumerate(GOOD)], "patient,site,age,sex,outcome"))
    settings = ["--set", "label=outcome", "--set", "client=site"]
    code, out, err = run_cli(monkeypatch, capsys, "data", "check", "data.csv", *settings)
    assert (code, err) == (0, "")
    ill = sum(row[3] == "ill" for row in GOOD)
    assert "30 samples, 2 classes, 3 clients" in out
    assert [line.split() for line in out.splitlines() if line.split()[:1] == ["all"]] == [
        ["all", "30", str(ill), str(30 - ill)]
    ]
    assert "'patient' is different in every row" in out
    last = out.strip().splitlines()[-1]
    assert last == "ready: fedloom run --dataset ./data.csv --set label=outcome --set client=site"
    code, out, _ = run_cli(monkeypatch, capsys, *last.split()[2:], "--rounds", "2", "--plan", "stacked-eager")
    assert code == 0
    assert "on data.csv: 3 clients, natural, mlp" in out
    assert json.loads((tmp_path / "runs/ditto-data-1/names.json").read_text()) == {
        "clients": ["Berlin", "Paris", "Rome"],
        "classes": ["ill", "well"],
    }
    code, out, _ = run_cli(monkeypatch, capsys, "data", "check", ".", *settings)  # what the run left is not data
    assert code == 0
    assert "30 samples, 2 classes, 3 clients" in out


def test_a_run_on_user_data_resumes_from_another_folder_and_notices_other_data(tmp_path, monkeypatch, capsys):
    write(tmp_path / "data.csv", csv(GOOD))
    small = ["--rounds", "2", "--plan", "stacked-eager"]
    code, _, _ = run_cli(monkeypatch, capsys, "run", "fedavg", "--dataset", "./data.csv", "--out", "r", *small)
    assert code == 0
    make_unfinished(tmp_path / "r")
    (tmp_path / "moved").mkdir()
    (tmp_path / "data.csv").rename(tmp_path / "moved/data.csv")
    monkeypatch.chdir(tmp_path / "moved")
    code, _, err = run_cli(monkeypatch, capsys, "run", "--resume", "../r")
    assert code == 2
    assert f"{tmp_path}/data.csv does not exist" in err
    code, out, _ = run_cli(monkeypatch, capsys, "run", "--resume", "../r", "--dataset", "data.csv")
    assert code == 0
    assert "fedavg on data.csv" in out
    make_unfinished(tmp_path / "r")
    write(tmp_path / "moved/data.csv", changed(4, 1, "33"))
    code, _, err = run_cli(monkeypatch, capsys, "run", "--resume", "../r", "--dataset", "data.csv")
    assert code == 2
    assert "The data of ../r is not what the run was started with" in err
