"""Random input: whatever is typed, written into a file, or damaged, ends in a result or in one sentence.

`make test` tries the same examples every time, for about a minute in all; `make fuzz` tries new ones for hours.
`$FEDLOOM_FUZZ` is the number of times as many examples.
"""

import io
import os
import shutil
import tarfile
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from helpers import Crash, crash_after
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kills import assert_same_files

import fedloom
from fedloom import UserError
from fedloom.cli.commands import run_command
from fedloom.config.files import parse_config
from fedloom.config.resolve import configure, resolve
from fedloom.data.archives import ArchiveError, extract
from fedloom.data.sets.own import OwnData
from fedloom.data.user_data.check import check

FUZZ = int(os.environ.get("FEDLOOM_FUZZ", "1"))


def fuzz(examples):
    """A test with so many random examples, more with `make fuzz`."""
    return settings(
        max_examples=examples * FUZZ,
        deadline=None,
        derandomize=FUZZ == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def assert_one_sentence(error: Exception) -> None:
    text = str(error)
    assert text.strip()
    assert len(text.splitlines()) == 1, text


NUMBERS = st.one_of(
    st.integers(-5, 20), st.integers(), st.floats(), st.sampled_from([10**30, -1, 0, 1e39, 1e-60, 2**63])
)
WORDS = st.sampled_from(
    [
        "fedavg",
        "ditto",
        "local",
        "digits",
        "synthetic",
        "mlp",
        "cnn4",
        "iid",
        "true",
        "none",
        "auto",
        "lr",
        "0.1",
        "1/2",
        "",
    ]
)
KEYS = st.sampled_from(
    [
        "lr", "rounds", "clients", "seed", "batch_size", "participation", "split", "model", "dataset", "algorithm",
        "partition", "lam", "width", "beta", "per_method", "clip", "dtype", "device", "eval_every", "holdout_clients",
        "x", "model.width",
    ]
)  # fmt: skip
TEXT = st.text(max_size=20)
VALUES = st.one_of(NUMBERS, WORDS, TEXT, st.none(), st.booleans(), st.lists(NUMBERS, max_size=3))


# -- settings -------------------------------------------------------------------------------------------------------


@fuzz(400)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
@example({"lr": "\x85"})  # a line break
def test_settings_from_python(values):
    try:
        configure("ditto", values=values)
    except UserError as error:
        assert_one_sentence(error)


SCALARS = VALUES.map(str)
LINES = st.one_of(
    st.builds("{}: {}".format, st.one_of(KEYS, TEXT), SCALARS),
    st.builds("{}:\n  {}: {}".format, KEYS, KEYS, SCALARS),
    st.builds("{}: [{}, {}]".format, KEYS, SCALARS, SCALARS),
    st.builds("{}: &a {}\nx: *a".format, KEYS, SCALARS),
    st.builds("{}: !!{} {}".format, KEYS, st.sampled_from(["int", "timestamp", "python/name:os.system"]), SCALARS),
    TEXT,
)


@fuzz(400)
@given(st.lists(LINES, max_size=5).map("\n".join))
def test_configuration_files(text):
    try:
        resolve(parse_config(text, "x.yaml"))
    except UserError as error:
        assert_one_sentence(error)


# -- the command line -----------------------------------------------------------------------------------------------


OPTIONS = st.sampled_from(
    ["--lr", "--rounds", "--clients", "--set", "--seeds", "--grid", "--model", "--dataset", "--partition", "--preset",
     "--config", "--data-dir", "--json", "--dtype", "--participation", "-v", "--help", "--", "--out"]
)  # fmt: skip
PAIRS = st.builds("{}={}".format, KEYS, SCALARS)
COMMANDS = st.sampled_from(
    ["run", "compare", "sweep", "list", "data", "data check", "data show", "data list", "help", ""]
)


@fuzz(150)
@given(COMMANDS, st.lists(st.one_of(OPTIONS, WORDS, SCALARS, PAIRS), max_size=6))
def test_command_lines(tmp_path_factory, command, words):
    """Nothing is trained: the last setting is none of FedLoom's."""
    folder = tmp_path_factory.mktemp("fuzz")
    stop = ["--set", "no_such_setting=1"] if command in ("run", "compare", "sweep") else []
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr("sys.argv", ["fedloom", *command.split(), *words, *stop])
        with pytest.raises(SystemExit) as exit_:
            run_command()
    assert exit_.value.code in (0, None, 1, 2)
    assert not list(folder.glob("runs"))
    if exit_.value.code == 2:
        assert "Traceback" not in err.getvalue()


# -- data ------------------------------------------------------------------------------------------------------------


CELLS = st.one_of(SCALARS, st.sampled_from(["a", "b", "1", "2.5", "", "NA", '"', "x,y", "2,5", "\t", "\x00"]))
HEADERS = st.lists(st.sampled_from(["client", "label", "age", "split", "text", "", "age", "1"]), min_size=1, max_size=4)


@st.composite
def tables(draw):
    header = draw(HEADERS)
    rows = draw(st.lists(st.lists(CELLS, min_size=1, max_size=5), max_size=8))
    separator = draw(st.sampled_from([",", ";", "\t", "|"]))
    text = "\n".join(separator.join(row) for row in [header, *rows])
    return text.encode("utf-8", "surrogatepass") + draw(st.binary(max_size=3))


@fuzz(400)
@given(tables())
def test_tables(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("fuzz") / "data.csv"
    path.write_bytes(content)
    try:
        check(OwnData(path=str(path)))
    except UserError as error:
        assert_one_sentence(error)


# -- archives ---------------------------------------------------------------------------------------------------------


def archive(kind) -> bytes:
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
            made.writestr("folder/a.txt", "a" * 100)
            made.writestr("b.txt", "b")
    else:
        with tarfile.open(fileobj=file, mode=f"w:{kind}") as made:
            for name in ("folder/a.txt", "b" * 120):
                info = tarfile.TarInfo(name)
                info.size = 100
                made.addfile(info, io.BytesIO(b"a" * 100))
    return file.getvalue()


@fuzz(150)
@given(
    st.sampled_from(["zip", "", "gz", "xz"]),
    st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=4),
    st.data(),
)
def test_archives(tmp_path_factory, kind, changes, data):
    folder = tmp_path_factory.mktemp("fuzz")
    content = bytearray(archive(kind))
    for place, value in changes:
        content[place % len(content)] = value
    content = content[: data.draw(st.integers(0, len(content)))]
    (folder / "archive").write_bytes(content)
    (folder / "into").mkdir()
    try:
        extract(folder / "archive", folder / "into", 10**6)
    except (ArchiveError, UserError) as error:
        assert_one_sentence(error)
    assert sorted(path.name for path in folder.iterdir()) == ["archive", "into"]


# -- run directories --------------------------------------------------------------------------------------------------


SMALL = {
    "clients": 6, "participation": 0.34, "rounds": 6, "plan": "stacked-eager", "batch_size": 200, "checkpoint_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """For each kind of store, a finished run and one that was stopped."""
    made = {}
    for store in ("memory", "disk"):
        folder = made[store] = tmp_path_factory.mktemp(store)
        fedloom.run("ditto", out=folder / "whole", store=store, **SMALL)
        with pytest.raises(Crash):
            fedloom.run("ditto", out=folder / "stopped", on_round=crash_after(5), store=store, **SMALL)
    return made


def damage(path: Path, how: str, place: int, other: Path) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip" and data:
        data[place // 8 % len(data)] ^= 1 << place % 8
        path.write_bytes(data)
    elif how == "truncate":
        path.write_bytes(data[: place % (len(data) + 1)])
    elif how == "append":
        path.write_bytes(data + b"x" * (1 + place % 9))
    elif how == "replace":
        path.write_bytes(other.read_bytes())
    elif how in ("remove", "folder", "pipe"):
        path.unlink()
        if how == "folder":
            path.mkdir()
        if how == "pipe":
            os.mkfifo(path)


@fuzz(60)
@given(
    st.sampled_from(["memory", "disk"]),
    st.sampled_from(["whole", "stopped"]),
    st.integers(0, 10**9),
    st.sampled_from(["flip", "flip", "flip", "truncate", "append", "remove", "replace", "folder", "pipe"]),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
)
def test_run_directories(runs, tmp_path_factory, store, name, file, how, place, other):
    """What was damaged is reported, or the run ends with the same bytes."""
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    shutil.copytree(runs[store] / name, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "run.log")
    damage(files[file % len(files)], how, place, files[other % len(files)])
    try:
        result = fedloom.run("ditto", out=folder, resume=True, store=store, **SMALL)
        _ = result.server, result.store
        assert_same_files(folder, runs[store] / "whole")
    except UserError as error:
        assert_one_sentence(error)
    shutil.rmtree(folder)
