"""The text data sets: small files of every layout, broken ones, and the real ones where $FEDLOOM_DATA has them."""

import json
import lzma
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from sentences import user_error
from torch import nn

import fedloom
from fedloom.config.resolve import configure
from fedloom.data.divide import divide
from fedloom.data.partitions import DirichletClass, Iid, Natural
from fedloom.data.sets.agnews import AgNews
from fedloom.data.sets.shakespeare import CHARACTERS, Shakespeare
from fedloom.data.sets.stackexchange import StackExchange
from fedloom.data.sets.stackoverflow import StackOverflow
from fedloom.report.partition import describe


def real(name):
    folder = Path(os.environ.get("FEDLOOM_DATA", "nowhere")) / name
    return pytest.mark.skipif(not folder.is_dir(), reason=f"$FEDLOOM_DATA has no folder {name}")


def pack(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text if isinstance(text, bytes) else text.encode()))


# -- AG News

TRAIN = [(2, "Wall St. Bears", "Claw\\back"), (0, "Oil", "and, oil")]
TEST = [(3, "Bears", 'in "space"')]
TOKENS = [["wall", "st", ".", "bears", "claw\\back"], ["oil", "and", ",", "oil"], ["bears", "in", "space"]]


def write_agnews(folder, layout, train=TRAIN, test=TEST):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        if layout == "csv":
            cells = [(topic + 1, title, text.replace('"', '""')) for topic, title, text in rows]
            lines = ['"{}","{}","{}"\n'.format(*row) for row in cells]
            (folder / f"{name}.csv").write_text("".join(lines), encoding="utf-8")
        elif layout == "tsv":
            pack(folder / f"{name}.tsv.xz", "".join(f"{topic}\t{title} {text}\n" for topic, title, text in rows))
        else:
            table = pa.table({"text": [f"{a} {b}" for _, a, b in rows], "label": [topic for topic, _, _ in rows]})
            path = folder / layout.removesuffix("parquet") / f"{name}-00000-of-00001.parquet"
            path.parent.mkdir(exist_ok=True)
            parquet.write_table(table, path)
    return folder


@pytest.mark.parametrize("inner", ["", "agnews", "ag_news"])
@pytest.mark.parametrize("layout", ["csv", "parquet", "data/parquet", "tsv"])
def test_agnews_reads_every_layout(tmp_path, layout, inner):
    write_agnews(tmp_path / inner, layout)
    raw = AgNews(length=5).load(tmp_path, 20, 1)
    # pad 0, cls 1, unk 2, eos 3; bears and oil twice; then , . and claw\back in space st wall in the order of codes
    words = dict(
        zip(["bears", "oil", ",", ".", "and", "claw\\back", "in", "space", "st", "wall"], range(4, 14), strict=True)
    )
    expected = [([1] + [words[word] for word in one])[:5] for one in TOKENS]
    expected[2] += [0]
    assert raw.x.tolist() == expected
    assert raw.y.tolist() == [2, 0, 3]
    assert (raw.classes, raw.vocab, raw.official_test.tolist()) == (4, 14, [2])
    assert [note.split(",")[0] for note in raw.notes] == [
        "AG News here has 2 of 120", "AG News here has 1 of 7",
    ]  # fmt: skip


def test_agnews_words_beyond_the_limit_are_unknown(tmp_path):
    raw = AgNews(length=6, words=2).load(write_agnews(tmp_path, "tsv"), 20, 1)
    assert raw.x.tolist() == [[1, 2, 2, 2, 4, 2], [1, 5, 2, 2, 5, 0], [1, 4, 2, 2, 0, 0]]
    assert raw.vocab == 6


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"2\tgood\nno tab\n", ["row 2", "tab"]),
        (b"2\tgood\n4\tbad\n", ["row 2", "0 to 3", "'4'"]),
        (b"2\tgood\n\n", ["row 2", "tab"]),
        (b"x\tbad\n", ["row 1", "'x'"]),
        (b"1\tcaf\xe9\n", ["row 1", "UTF-8"]),
        (b"", ["row 1", "tab"]),
    ],
)
def test_broken_tsv_files_are_named_with_the_row(tmp_path, raw, words):
    write_agnews(tmp_path, "tsv")
    pack(tmp_path / "train.tsv.xz", raw)
    with user_error("train.tsv.xz", *words):
        AgNews().load(tmp_path, 20, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"1","a","b"\n"0","a","b"\n', ["row 2", "1 to 4", "'0'"]),
        ('"1","a","b"\n"2"\n', ["row 2", "1 cells"]),
        ('"1","a","b"\n"2","a', ["row 2", "not CSV"]),
        ("", ["no texts"]),
    ],
)
def test_broken_csv_files_are_named_with_the_row(tmp_path, text, words):
    write_agnews(tmp_path, "csv")
    (tmp_path / "test.csv").write_text(text)
    with user_error("test.csv", *words):
        AgNews().load(tmp_path, 20, 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PAR1", ["no Parquet file"]),
        ({"text": ["a"]}, ["text and label"]),
        ({"text": ["a", None], "label": [0, 1]}, ["row 2", "no text"]),
        ({"text": ["a", "b"], "label": [0, 7]}, ["row 2", "'7'"]),
        ({"text": ["a", "b"], "label": [0, None]}, ["row 2", "0 to 3"]),
    ],
    ids=str,
)
def test_broken_parquet_files_are_named_with_the_row(tmp_path, content, words):
    path = write_agnews(tmp_path, "parquet") / "train-00000-of-00001.parquet"
    path.write_bytes(content) if isinstance(content, bytes) else parquet.write_table(pa.table(content), path)
    with user_error(path.name, *words):
        AgNews().load(tmp_path, 20, 1)


def test_agnews_that_is_absent_says_what_to_do(tmp_path):
    with user_error("agnews", "fedloom data download agnews", "train.csv"):
        AgNews().load(tmp_path, 20, 1)


def test_agnews_is_divided_with_beta_1_unless_told_otherwise():
    def partition(*which, **values):
        return configure("fedavg", "agnews", *which, model="mlp", values=values).partition

    assert partition() == partition("dirichlet_class") == DirichletClass(beta=1.0)
    assert partition(beta=0.3) == DirichletClass(beta=0.3)
    assert partition("iid") == Iid()


# -- Shakespeare


def role(name, text, play="Play"):
    return {"play": play, "role": name, "speeches": text if isinstance(text, list) else [text]}


def write_roles(folder, roles):
    pack(folder / "roles.json.xz", json.dumps(roles))
    return folder


def decode(codes):
    return "".join(CHARACTERS[c] for c in codes)


SMALL = {"windows": 6, "server_windows": 0, "min_windows": 0, "stride": 1, "length": 4}


def test_there_are_80_characters_in_leafs_order():
    assert len(CHARACTERS) == 80
    assert [CHARACTERS.index(c) for c in "\n aZ}"] == [0, 1, 53, 50, 79]


def test_a_roles_windows_run_over_its_speeches(tmp_path):
    write_roles(tmp_path, [role("A", ["To be,\nor  not", "to be ü?"])])
    raw = Shakespeare(**{**SMALL, "windows": None}).load(tmp_path, 1, 1)
    text = "To be, or not to be }?"  # line ends and runs of spaces are one space; an unknown character is the last one
    assert [decode(row) for row in raw.x] == [text[i : i + 4] for i in range(len(text) - 4)]
    assert decode(raw.y) == text[4:]
    assert (raw.classes, raw.vocab, raw.server) == (80, 80, None)
    assert len(raw.notes) == 1  # the edition


def starts(text, part, stride):
    """Positions at which every `stride`-th character of a text gives this part."""
    return [s for s in range(len(text)) if text[s : s + stride * (len(part) - 1) + 1 : stride] == part]


@pytest.mark.parametrize("stride", [1, 4])
def test_a_role_has_consecutive_windows_and_the_server_some_behind_them(tmp_path, stride):
    """A has 100 windows: its own are among the first 80, the server's 12 among those from 80 + 3 on. C has 204: 163."""
    draw = random.Random(1)
    texts = {"a": "".join(draw.choices("abcdefgh", k=104)), "C": "".join(draw.choices("ABCDEFGH", k=208))}
    write_roles(tmp_path, [role("A", texts["a"]), role("B", "b" * 103), role("C", texts["C"])])
    made = Shakespeare(windows=60, server_windows=12, min_windows=99, stride=stride, length=4)
    raw = made.load(tmp_path, 2, 1)  # B has 99 windows, too few
    assert [len(rows) for rows in raw.natural] == [60 // stride] * 2
    assert len(raw.server) == 2 * 12 // stride
    for mine, behind in zip(raw.natural, np.split(raw.server, 2), strict=True):
        first, second = ("".join(decode(row)[0] for row in raw.x[rows]) for rows in (mine, behind))
        text, train, n = (texts["a"], 80, 100) if first.islower() else (texts["C"], 163, 204)
        assert any(s + 60 <= train for s in starts(text, first, stride))
        assert any(train + 3 <= s and s + 12 <= n for s in starts(text, second, stride))
    assert not np.array_equal(raw.x, made.load(tmp_path, 2, 2).x)  # another seed, other blocks
    with user_error("2 of 3 roles"):
        made.load(tmp_path, 3, 1)
    with user_error("1 of 3 roles"):  # A has 100 - 83 windows for the server, and must have more than it gives
        Shakespeare(windows=60, server_windows=17, min_windows=99, stride=stride, length=4).load(tmp_path, 2, 1)


def test_roles_are_taken_in_an_order_of_their_own(tmp_path):
    """Sorted by name, then shuffled with seed 0: the first k of any number of clients are the same."""
    names = list("dacbe")
    write_roles(tmp_path, [role(name, name * 20) for name in names])
    order = sorted(names)
    random.Random(0).shuffle(order)
    for clients in (2, 5):
        raw = Shakespeare(**SMALL).load(tmp_path, clients, 1)
        assert [decode(raw.y[rows])[0] for rows in raw.natural] == order[:clients]


def test_too_few_roles_are_refused(tmp_path):
    write_roles(tmp_path, [role("A", "a" * 20), role("B", "b" * 5)])
    with user_error("1 of 2 roles", "2 clients", "min_windows"):
        Shakespeare(**SMALL).load(tmp_path, 2, 1)


XML = """<?xml version="1.0"?>
<!DOCTYPE PLAY SYSTEM "play.dtd">
<PLAY><TITLE>The Play</TITLE><ACT><TITLE>ACT I</TITLE><SCENE><TITLE>SCENE I</TITLE>
<SPEECH><SPEAKER>A</SPEAKER><LINE>Who's <STAGEDIR>Aside</STAGEDIR>there?</LINE><STAGEDIR>Exit</STAGEDIR>
<LINE>Nay</LINE></SPEECH>
<SPEECH><SPEAKER>B</SPEAKER><SPEAKER>A</SPEAKER><LINE>Both of us &amp; all</LINE></SPEECH>
<SPEECH><SPEAKER>A</SPEAKER><LINE><STAGEDIR>Nods</STAGEDIR></LINE></SPEECH>
</SCENE></ACT></PLAY>
"""


@pytest.mark.parametrize("inner", ["", "shaks200"])
def test_the_xml_edition_is_the_same_as_roles_cut_from_it(tmp_path, inner):
    (tmp_path / inner).mkdir(exist_ok=True)
    for name in ("hamlet", "macbeth"):
        (tmp_path / inner / f"{name}.xml").write_text(XML.replace("The Play", name))
    said = {"A": "Who's there?\nNay", "B": "Both of us & all"}
    write_roles(tmp_path / "cut", [role(n, text, play) for play in ("hamlet", "macbeth") for n, text in said.items()])
    both = [Shakespeare(**SMALL).load(folder, 4, 1) for folder in (tmp_path, tmp_path / "cut")]
    assert np.array_equal(both[0].x, both[1].x)
    assert len(both[0].natural) == 4


def leaf(**users):
    data = {
        name: {"x": [text[i : i + 80] for i in range(len(text) - 80)], "y": list(text[80:])}
        for name, text in users.items()
    }
    return {"users": list(users), "num_samples": [len(d["y"]) for d in data.values()], "user_data": data}


def test_leafs_output_is_read(tmp_path):
    text = "".join(random.Random(1).choices("abcdefgh", k=100))
    (tmp_path / "all_data.json").write_text(json.dumps(leaf(PLAY_A=text)))
    raw = Shakespeare(**{**SMALL, "windows": None, "length": 80}).load(tmp_path, 1, 1)
    assert [decode(row) for row in raw.x] == [text[i : i + 80] for i in range(20)]
    assert decode(raw.y) == text[80:]
    assert raw.notes == ()
    short = Shakespeare(**{**SMALL, "windows": None}).load(tmp_path, 1, 1)
    assert [decode(row) for row in short.x] == [text[i + 76 : i + 80] for i in range(20)]
    with user_error("80 characters", "length=81"):
        Shakespeare(**{**SMALL, "length": 81}).load(tmp_path, 1, 1)


def test_a_leaf_user_in_two_files_is_refused(tmp_path):
    for name in ("all_data.json", "all_data_test.json"):
        (tmp_path / name).write_text(json.dumps(leaf(PLAY_A="a" * 90)))
    with user_error("all_data_test.json", "'PLAY_A'", "all_data.json only"):
        Shakespeare(**SMALL).load(tmp_path, 1, 1)


BAD_LEAF = [
    ([], ["user_data"]),
    ({"user_data": {"A": []}}, ["user 'A'", "'x' and 'y'"]),
    ({"user_data": {"A": {"x": [], "y": []}}}, ["user 'A'", "not empty"]),
    ({"user_data": {"A": {"x": ["a" * 80], "y": ["a", "b"]}}}, ["user 'A'", "same length"]),
    ({"user_data": {"A": {"x": ["a" * 80, "a" * 79], "y": ["a", "b"]}}}, ["user 'A', row 2", "80 characters"]),
    ({"user_data": {"A": {"x": ["a" * 80], "y": [7]}}}, ["user 'A', row 1", "1 characters"]),
]


@pytest.mark.parametrize(("content", "words"), BAD_LEAF, ids=[" ".join(words) for _, words in BAD_LEAF])
def test_broken_leaf_files_are_named(tmp_path, content, words):
    (tmp_path / "all_data.json").write_text(json.dumps(content))
    with user_error("all_data.json", *words):
        Shakespeare(**SMALL).load(tmp_path, 1, 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"roles": []}, ["list of roles", "dict"]),
        ([role("A", "a"), {"play": "P"}], ["entry 2", "speeches"]),
        ([{"play": "P", "role": "A", "speeches": "a"}], ["entry 1", "speeches"]),
        ([{"play": "P", "role": "A", "speeches": ["a", 1]}], ["entry 1", "speeches"]),
        ([role("A", "a"), role("B", [])], ["entry 2", "'B'", "says nothing"]),
        (["A"], ["entry 1"]),
    ],
    ids=str,
)
def test_broken_roles_are_named_with_the_entry(tmp_path, content, words):
    with user_error("roles.json.xz", *words):
        Shakespeare(**SMALL).load(write_roles(tmp_path, content), 1, 1)


def test_a_broken_play_is_named(tmp_path):
    for name in ("hamlet", "macbeth"):
        (tmp_path / f"{name}.xml").write_text(XML if name == "hamlet" else XML[:-20])
    with user_error("macbeth.xml", "no XML"):
        Shakespeare(**SMALL).load(tmp_path, 1, 1)


# -- Stack Exchange and Stack Overflow


def user(number, texts, site="beer"):
    messages = [{"post": k, "kind": "q", "date": f"2015-01-{10 + k}", "text": text} for k, text in enumerate(texts)]
    return {"site": site, "user": number, "messages": messages}


def write_users(folder, users):
    pack(folder / "users.json.xz", json.dumps(users))
    return folder


def test_stackexchange_takes_users_by_number_and_their_sentences_in_time_order(tmp_path):
    third = user(3, ["Late. Very late", "z"])
    third["messages"].reverse()
    users = [user(7, ["Hops? Malt!"]), user(3, ["One", "two.\nThree, four"], "ai"), third, user(1, ["alone ;"])]
    made = StackExchange(min_sentences=2, words=50, length=4)
    raw = made.load(write_users(tmp_path, users), 3, 1)
    # 3 of ai, 3 of beer, 7; user 1 has one sentence. Training parts: one, two . | late . , very late | hops ?
    ranks = dict(zip([".", "late", "?", "hops", "one", "two", "very"], range(4, 11), strict=True))
    assert raw.vocab == raw.classes == 11
    assert [len(rows) for rows in raw.natural] == [3, 3, 2]
    written = [
        ["one"],
        ["two", "."],
        ["three", ",", "four"],
        ["late", "."],
        ["very", "late"],
        ["z"],
        ["hops", "?"],
        ["malt", "!"],
    ]
    x, y = ([[ranks.get(word, 3) for word in one] for one in written] for _ in range(2))
    assert raw.x.tolist() == [([1, *row] + [0] * 4)[:4] for row in x]
    assert raw.y.tolist() == [([*row, 2] + [-1] * 4)[:4] for row in y]
    with user_error("3 users", "at least 2 sentences", "4 clients", "min_sentences"):
        made.load(tmp_path, 4, 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, ["list of users", "dict"]),
        ([user(1, ["a"]), {"user": 2}], ["entry 2", "messages"]),
        ([user(1, ["a"]), user(2, [])], ["entry 2", "user 2 of beer", "no messages"]),
        ([user("x", ["a"])], ["entry 1", "'x'"]),
        ([{**user(1, []), "messages": [{"date": "2015"}]}], ["entry 1, message 1", "text"]),
        ([{**user(1, []), "messages": [{"text": "a"}]}], ["entry 1, message 1", "date"]),
        ([{**user(1, ["a"]), "site": None}], ["entry 1", "site"]),
    ],
    ids=str,
)
def test_broken_users_are_named_with_the_entry(tmp_path, content, words):
    with user_error("users.json.xz", *words):
        StackExchange().load(write_users(tmp_path, content), 1, 1)


def write_h5(path, users):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(path, "w") as file:
        for name, rows in users.items():
            for key, values in zip(("creation_date", "tokens"), zip(*rows, strict=True), strict=True):
                file.create_dataset(f"examples/{name}/{key}", data=list(values), dtype=h5py.string_dtype())


def test_stackoverflow_takes_the_first_users_with_enough_sentences_in_time_order(tmp_path):
    users = {
        "00000009": [("2009-01-02", "c"), ("2009-01-01", "a b")],
        "00000001": [("2008-01-01", "only one")],
        "00000012": [("2009-01-02", "d"), ("2009-01-03", "d")],
    }
    write_h5(tmp_path / "stackoverflow_train.h5", users)
    made = StackOverflow(min_sentences=2, length=3)
    raw = made.load(tmp_path, 1, 1)
    assert raw.x.tolist() == [[1, 4, 5], [1, 3, 0]]  # a 4, b 5; c comes in the test part only
    assert raw.y.tolist() == [[4, 5, 2], [3, 2, -1]]
    with user_error("2 users", "3 clients"):
        made.load(tmp_path, 3, 1)


def test_broken_hdf5_files_are_named(tmp_path):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    path = tmp_path / "stackoverflow_train.h5"
    path.write_bytes(b"no HDF5")
    with user_error(str(path), "damaged"):
        StackOverflow().load(tmp_path, 1, 1)
    with h5py.File(path, "w") as file:
        file.create_dataset("examples/1/snippets", data=[1])
    with user_error(str(path), "not TFF's"):
        StackOverflow().load(tmp_path, 1, 1)


TEXTS = {"data": ["a b"] * 9, "dtype": "S9"}


@pytest.mark.parametrize(
    ("tokens", "dates", "words"),
    [
        (TEXTS, {"data": ["1"] * 8, "dtype": "S9"}, "user 1 has no list of texts and dates"),
        ({"data": [["a b"]] * 9, "dtype": "S9"}, TEXTS, "user 1 has no list of texts and dates"),
        ({"data": [1] * 9}, TEXTS, "string"),
        ({"shape": (10**9,), "dtype": "S9", "chunks": (9,)}, {"shape": (10**9,), "dtype": "S9"}, "more than 200 times"),
        ({"shape": (9,), "dtype": "S9", "maxshape": (None,), "chunks": (10**8,)}, TEXTS, "more than 200 times"),
    ],
)
def test_users_without_texts_or_with_too_many_are_refused(tmp_path, tokens, dates, words):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(tmp_path / "stackoverflow_train.h5", "w") as file:
        file.create_dataset("examples/1/tokens", **tokens)
        file.create_dataset("examples/1/creation_date", **dates)
    with user_error("stackoverflow_train.h5", words, "fetch it again"):
        StackOverflow(min_sentences=2).load(tmp_path, 1, 1)


def test_groups_and_circles_in_an_hdf5_file_are_refused(tmp_path):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    path = tmp_path / "stackoverflow_train.h5"
    with h5py.File(path, "w") as file:
        for name in ("tokens/1", "tokens/2", "creation_date"):
            file.create_group(f"examples/1/{name}")
    with user_error(str(path), "not TFF's"):
        StackOverflow(min_sentences=2).load(tmp_path, 1, 1)
    with h5py.File(path, "w") as file:
        file["examples"] = h5py.SoftLink("/examples")
    with user_error(str(path), "not TFF's"):
        StackOverflow().load(tmp_path, 1, 1)


def test_without_its_reader_an_hdf5_file_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    (tmp_path / "stackoverflow_train.h5").write_bytes(b"")
    with user_error("fedloom[hdf5]"):
        StackOverflow().load(tmp_path, 1, 1)


# -- end to end


class Words(nn.Module):
    """The mean of word vectors, or logits at every position."""

    def __init__(self, vocab, classes, per_position):
        super().__init__()
        self.words, self.head = nn.Embedding(vocab, 8, padding_idx=0), nn.Linear(8, classes)
        self.per_position = per_position

    def forward(self, x):
        found = self.words(x)
        return self.head(found if self.per_position else found.mean(1))


def test_topics_are_learnt_from_text(tmp_path):
    """Each topic has a word of its own, so that the model can be right about every text."""
    rows = [(c, word, "and so on") for _ in range(30) for c, word in enumerate(("war", "goal", "bank", "chip"))]
    write_agnews(tmp_path, "tsv", rows, rows[:8])
    settings = {"rounds": 8, "clients": 3, "lr": 2.0, "length": 6, "data_dir": tmp_path}
    result = fedloom.run("fedavg", "agnews", partition="iid", model=lambda: Words(11, 4, False), **settings)
    assert result.last()["pre_acc_mean"] == 100


def test_the_next_word_is_learnt_and_ends_and_unknown_words_are_not_scored(tmp_path):
    """Sentences 'a b' and 'a b rare': a follows the beginning and b follows a, but nobody can tell what follows b."""
    texts = ["\n".join(f"a b rare{k}{i}" if k % 2 else "a b" for k in range(40)) for i in range(3)]
    write_users(tmp_path, [user(i, [text]) for i, text in enumerate(texts)])
    settings = {"clients": 3, "words": 2, "min_sentences": 5, "rounds": 5, "lr": 1.0, "data_dir": tmp_path}
    result = fedloom.run("fedavg", "stackexchange", model=lambda: Words(6, 6, True), **settings)
    assert result.last()["pre_acc_mean"] == 100


def test_sequences_are_divided_by_the_natural_and_the_iid_partition_only(tmp_path):
    raw = StackExchange(min_sentences=2, length=4).load(write_users(tmp_path, [user(1, ["a b\nc d\ne"])]), 1, 1)
    with user_error("dirichlet_class", "every position", "natural", "iid"):
        divide(raw, DirichletClass(), 1)
    assert divide(raw, Iid(), 1).clients == divide(raw, Natural(), 1).clients == 1


def test_sequences_are_described_by_their_number_and_that_of_their_labels(tmp_path):
    raw = StackExchange(min_sentences=2, length=4).load(write_users(tmp_path, [user(1, ["a b\nc d\ne"])]), 1, 1)
    found = describe(divide(raw, Natural(), 1))
    assert (found["samples"], found["positions"]) == (3, 8)  # a b end, c d end, e end
    assert (found["clients"][0]["samples"], found["clients"][0]["positions"]) == (3, 8)


# -- the real files


@real("ag_news")
def test_real_agnews():
    raw = AgNews().load(Path(os.environ["FEDLOOM_DATA"]), 20, 1)
    # counts of the files' README: train 5874 5936 5939 5798, test 1900 each
    assert np.bincount(np.delete(raw.y, raw.official_test)).tolist() == [5874, 5936, 5939, 5798]
    assert np.bincount(raw.y[raw.official_test]).tolist() == [1900] * 4
    assert raw.x.shape == (31_147, 200)
    assert raw.x.dtype == raw.y.dtype == np.int64
    assert raw.x.max() == raw.vocab - 1
    assert (raw.x[:, 0] == 1).all()
    assert not (raw.x == 2).any()  # every word is in the vocabulary
    assert len(raw.notes) == 1
    assert "23,547 of 120,000 training texts" in raw.notes[0]


@real("shakespeare")
def test_real_shakespeare():
    raw = Shakespeare().load(Path(os.environ["FEDLOOM_DATA"]), 100, 1)
    assert {len(rows) for rows in raw.natural} == {700}
    assert len(raw.natural) == 100
    assert raw.x.shape == (80_000, 80)
    assert len(raw.server) == 10_000
    assert raw.x.min() > 0
    assert raw.x.max() < 79  # no line ends, and no character that LEAF does not know
    joined = decode(raw.x[0, :10]) + decode(raw.x[1, :10])
    assert joined == decode(raw.x[0, :20])  # windows that are ten characters apart
    assert (raw.x[1:700, 69] == raw.x[:699, 79]).all()
    with user_error("147 of 1364 roles", "148 clients"):
        Shakespeare().load(Path(os.environ["FEDLOOM_DATA"]), 148, 1)


@real("stackexchange")
def test_real_stackexchange():
    raw = StackExchange().load(Path(os.environ["FEDLOOM_DATA"]), 50, 1)
    assert (raw.classes, raw.vocab) == (2004, 2004)
    assert raw.x.shape == raw.y.shape
    assert raw.x.shape[1] == 20
    assert min(len(rows) for rows in raw.natural) >= 100
    assert (raw.x[:, 0] == 1).all()
    inside = raw.y[:, :-1] >= 4
    assert (raw.x[:, 1:][inside] == raw.y[:, :-1][inside]).all()  # targets are the inputs, one on
    assert raw.y.max() == raw.x.max() == 2003
    assert ((raw.x == 0) == (raw.y == -1)).all()
    data = divide(raw, Natural(), 50, split=(0.8, 0.1, 0.1))
    assert data.unscored == (2, 3)
    assert torch.equal(data.splits["train"][0], torch.arange(len(data.splits["train"][0])))
