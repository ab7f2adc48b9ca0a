"""Mistakes with folders and files: one sentence, exit code 2, and what was there is still there, byte for byte."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from helpers import Crash, crash_after, run_cli

import fedloom
from fedloom.cli import commands
from fedloom.cli import main as cli
from fedloom.runs.folders import exclusive_lock
from fedloom.storage import files

SMALL = ["--rounds", "2", "--clients", "4", "--plan", "stacked-eager", "--batch-size", "400"]


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A finished run, one that stopped after round 1, and a comparison."""
    folder = tmp_path_factory.mktemp("example")
    settings = {"rounds": 2, "clients": 4, "plan": "stacked-eager", "batch_size": 400}
    fedloom.run("fedavg", out=folder / "done", **settings)
    fedloom.compare(["fedavg"], seeds=1, out=folder / "compared", **settings)
    with pytest.raises(Crash):
        fedloom.run("fedavg", out=folder / "stopped", on_round=crash_after(2), checkpoint_every=1, **settings)
    return folder


@pytest.fixture
def folder(example, tmp_path, monkeypatch):
    for one in example.iterdir():
        shutil.copytree(one, tmp_path / one.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spoil(path, data=b"\x00\xff nonsense"):
    def prepare(folder):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)

    return prepare


def edit(path, **changes):
    def prepare(folder):
        found = yaml.safe_load((folder / path).read_text())
        (folder / path).write_text(yaml.safe_dump({**found, **changes}))

    return prepare


def older(prepare):
    """The same in the folder of a run that was written by a FedLoom without manifests."""

    def prepare_older(folder):
        for name in ("stopped/config.yaml", "compared/compare.yaml"):
            edit(name, fedloom={"format": 1})(folder)
            (folder / name).with_name("manifest.json").unlink()
        prepare(folder)

    return prepare_older


def nothing(folder):
    pass


def remove(path):
    return lambda folder: (folder / path).unlink()


RUN, COMPARE, RESUME = ("run", "fedavg", *SMALL), ("compare", "fedavg", *SMALL), ("run", "--resume", "stopped")
MISTAKES = {
    # where a run is to go
    "out holds a run": (nothing, (*RUN, "--out", "done"), "--resume done"),
    "out holds a comparison": (nothing, (*RUN, "--out", "compared"), "--resume compared"),
    "out is a file": (spoil("x"), (*RUN, "--out", "x"), "x is a file"),
    "out is foreign": (spoil("x/notes.txt"), (*RUN, "--out", "x"), "x is not empty"),
    "out below a file": (spoil("x"), (*RUN, "--out", "x/y"), "x/y could not be written (not a directory)"),
    "out and resume": (nothing, ("run", "--out", "x", "--resume", "stopped"), "exclude each other"),
    "resume and no-save": (nothing, ("run", "--no-save", "--resume", "stopped"), "exclude each other"),
    "disk store without a folder": (nothing, (*RUN, "--no-save", "--store", "disk"), "store=disk"),
    # what is to be resumed
    "resume nothing": (nothing, ("run", "--resume", "x"), "There is no run directory x"),
    "resume a file": (spoil("x"), ("run", "--resume", "x"), "There is no run directory x"),
    "resume a foreign folder": (spoil("x/notes.txt"), ("run", "--resume", "x"), "it has no config.yaml"),
    "resume a comparison as a run": (nothing, ("run", "--resume", "compared"), "fedloom compare --resume compared"),
    "resume a run as a comparison": (nothing, ("compare", "--resume", "done"), "fedloom run --resume done"),
    "resume no comparison": (nothing, ("compare", "--resume", "x"), "There is no comparison x"),
    "resume with other rounds": (nothing, (*RESUME, "--rounds", "1"), "started with rounds=2, not 1"),
    "resume with another method": (nothing, ("run", "ditto", "--resume", "stopped"), "started with algorithm=fedavg"),
    "resume with a setting": (nothing, (*RESUME, "--set", "width=9"), "started with model.width=64, not 9"),
    "resume with another preset": (nothing, (*RESUME, "--preset", "page/synthetic"), "was started with"),
    "resume compare with others": (nothing, ("compare", "ditto", "--resume", "compared"), "was started with methods="),
    "resume compare other seeds": (nothing, ("compare", "--resume", "compared", "--seeds", "2"), "seeds=[0], not"),
    # damage
    "config binary": (spoil("stopped/config.yaml"), RESUME, "stopped is damaged: config.yaml was changed"),
    "config of a newer format": (edit("stopped/config.yaml", fedloom={"format": 9}), RESUME, "newer FedLoom (format 9"),
    "config edited": (edit("stopped/config.yaml", lr=0.2), RESUME, "stopped is damaged: config.yaml was changed"),
    "manifest missing": (remove("stopped/manifest.json"), RESUME, "stopped is damaged: manifest.json is missing"),
    "manifest broken": (spoil("stopped/manifest.json"), RESUME, "stopped is damaged: manifest.json cannot be read"),
    "manifest edited": (
        spoil("stopped/manifest.json", b'{"files": {}, "checksum": ""}'), RESUME, "manifest.json was changed after",
    ),
    "manifest deep": (spoil("stopped/manifest.json", b"[" * 100_000), RESUME, "manifest.json cannot be read"),
    "older config edited": (older(edit("stopped/config.yaml", lr=-1)), RESUME, "lr must be greater than 0, not -1"),
    "older config of an unknown method": (
        older(edit("stopped/config.yaml", algorithm="fedavgg")), RESUME, "did you mean 'fedavg'?",
    ),
    "older plan of something else": (older(spoil("stopped/plan.json", b'{"a": 1}')), RESUME, "not an execution plan"),
    "older partition changed": (
        older(edit("stopped/config.yaml", partition_seed=7)), RESUME, "partition of stopped is not what the run was",
    ),
    "older compare.yaml without methods": (
        older(edit("compared/compare.yaml", methods=3)), ("compare", "--resume", "compared"), "does not list methods",
    ),
    "plan broken": (spoil("stopped/plan.json"), RESUME, "stopped is damaged: plan.json"),
    "plan missing": (remove("stopped/plan.json"), RESUME, "stopped is damaged: plan.json is missing"),
    "partition broken": (spoil("stopped/partition.parquet"), RESUME, "stopped is damaged: partition.parquet"),
    "records broken": (spoil("stopped/rounds.parquet"), RESUME, "stopped is damaged: rounds.parquet"),
    "records missing": (remove("stopped/clients.parquet"), RESUME, "stopped is damaged: clients.parquet"),
    "environment broken": (spoil("stopped/environment.json"), RESUME, "stopped is damaged: environment.json"),
    "compare.yaml without methods": (
        spoil("compared/compare.yaml", b"lr: 1"), ("compare", "--resume", "compared"), "compare.yaml was changed",
    ),
    # files with settings
    "config file missing": (nothing, (*RUN, "--config", "x.yaml"), "x.yaml cannot be read"),
    "config file is a folder": (nothing, (*RUN, "--config", "done"), "done is not a file"),
    "config file binary": (spoil("x.yaml"), (*RUN, "--config", "x.yaml"), "x.yaml is not a text file"),
    "config file broken": (spoil("x.yaml", b"a: 1\nb: {"), (*RUN, "--config", "x.yaml"), "not valid YAML, line"),
    "config file a list": (spoil("x.yaml", b"- 1"), (*RUN, "--config", "x.yaml"), "not a list"),
    "config file a word": (spoil("x.yaml", b"rounds"), (*RUN, "--config", "x.yaml"), "not a word"),
    "config file unknown key": (spoil("x.yaml", b"learning_rat: 1"), (*RUN, "--config", "x.yaml"), "Unknown setting"),
    "config file wrong type": (spoil("x.yaml", b"lr: fast"), (*RUN, "--config", "x.yaml"), "lr must be a number"),
    "config file unknown section": (
        spoil("x.yaml", b"modle: {name: mlp}"), (*RUN, "--config", "x.yaml"), "did you mean 'model'?",
    ),
    "config file section a list": (spoil("x.yaml", b"model: [mlp]"), (*RUN, "--config", "x.yaml"), "model as a name"),
    "config file number as word": (spoil("x.yaml", b"model: {name: 3}"), (*RUN, "--config", "x.yaml"), "a word"),
    "methods for a single run": (spoil("x.yaml", b"methods: [ditto]"), (*RUN, "--config", "x.yaml"), "'methods'"),
    "algorithm for a comparison": (
        spoil("x.yaml", b"algorithm: ditto"), (*COMPARE, "--config", "x.yaml"), "methods instead of an algorithm",
    ),
    "own model": (
        older(edit("stopped/config.yaml", model={"name": "Net", "own": True})), RESUME, "'Net' was made in Python",
    ),
    # pictures
    "picture of another kind": (nothing, ("data", "show", "--picture", "x.gif"), "png, svg or pdf"),
    "picture in no folder": (nothing, ("data", "show", "--picture", "x/y.png"), "x/y.png could not be written"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_sentence_exit_code_2_and_nothing_written_or_lost(mistake, folder, monkeypatch, capsys):
    prepare, args, words = MISTAKES[mistake]
    prepare(folder)
    before = contents(folder)
    code, out, err = run_cli(monkeypatch, capsys, *args)
    assert code == 2, err
    assert words in err
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
    if args[0] != "data":
        assert out == ""
    after = contents(folder)
    logs = ("run.log", ".lock")  # a refusal is noted there
    kept = {name: data for name, data in after.items() if not name.endswith(logs)}
    assert kept == {name: data for name, data in before.items() if not name.endswith(logs)}


def test_a_directory_in_use_is_refused(folder, monkeypatch, capsys):
    with exclusive_lock(folder / "stopped"):
        code, _, err = run_cli(monkeypatch, capsys, *RESUME)
    assert code == 2
    assert "stopped is in use by another process" in err
    with exclusive_lock(folder / "compared"):
        code, _, err = run_cli(monkeypatch, capsys, "compare", "--resume", "compared")
    assert code == 2
    assert "compared is in use by another process" in err


class Disk:
    """Takes a number of writes; then it is full."""

    def __init__(self, capacity) -> None:
        self.capacity, self.writes = capacity, 0

    def __call__(self, original):
        def write(*given):
            self.writes += 1
            if self.writes > self.capacity:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*given)

        return write

    def install(self, patch):
        patch.setattr(os, "pwrite", self(os.pwrite))
        patch.setattr(os, "fsync", self(os.fsync))


@pytest.fixture(scope="module", params=["memory", "disk"])
def whole(request, tmp_path_factory):
    """A run on a disk that is never full: its command, its folder, and how often it writes until it is finished, when
    its report follows. Clients take one step per round."""
    args = ("run", "ditto", *SMALL, "--set", "checkpoint_every=1", "--store", request.param)
    out, disk = tmp_path_factory.mktemp("whole") / "run", Disk(10**6)
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        patch.setattr(commands, "_write_report", lambda folder: None)
        patch.setattr(sys, "argv", ["fedloom", *args, "--out", str(out)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert stop.value.code == 0
    assert disk.writes > 30
    return args, out, disk.writes


@pytest.mark.parametrize("place", range(10))
def test_a_full_disk_is_reported_and_the_run_can_be_resumed_when_there_is_space(
    place, whole, tmp_path, monkeypatch, capsys
):
    """Wherever it is full, from the first write to the last: a first file, a checkpoint, the client store, the end."""
    monkeypatch.chdir(tmp_path)
    args, undisturbed, writes = whole
    with monkeypatch.context() as patch:
        Disk(place * (writes - 1) // 9).install(patch)
        code, _, err = run_cli(monkeypatch, capsys, *args, "--out", "run")
    assert code == 2
    assert "The disk is full" in err
    assert len(err.strip().splitlines()) == 1
    assert not list(Path("run").rglob("*.partial"))
    again = ("run", "--resume", "run") if Path("run/config.yaml").exists() else (*args, "--out", "run")
    code, _, err = run_cli(monkeypatch, capsys, *again)
    assert code == 0, err
    for name in ("final/server.safetensors", "final/clients.safetensors", "rounds.parquet"):
        assert Path("run", name).read_bytes() == (undisturbed / name).read_bytes()


def test_a_disk_that_is_full_when_the_report_is_written_costs_the_report_only(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args, undisturbed, writes = whole
    with monkeypatch.context() as patch:
        Disk(writes).install(patch)
        code, _, err = run_cli(monkeypatch, capsys, *args, "--out", "run")
    assert code == 0
    assert "The report of run was not written" in err
    assert not Path("run/report.html").exists()
    assert Path("run/rounds.parquet").read_bytes() == (undisturbed / "rounds.parquet").read_bytes()


def test_a_missing_permission_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def refused(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(files.os, "replace", refused)
    code, _, err = run_cli(monkeypatch, capsys, *RUN, "--out", "run")
    assert code == 2
    assert "no permission" in err


def test_commands_make_their_folders_below_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        code, out, _ = run_cli(monkeypatch, capsys, *RUN)
        assert code == 0
        assert f"runs/fedavg-digits-{number}" in out
    code, out, _ = run_cli(monkeypatch, capsys, "run", "--resume", "runs/fedavg-digits-2")
    assert code == 0
    assert "fedavg on digits" in out
    code, out, _ = run_cli(monkeypatch, capsys, *RUN, "--no-save")
    assert code == 0
    assert len(list(Path("runs").iterdir())) == 2


def test_a_comparison_prints_and_keeps_a_leaderboard(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    args = ("compare", "fedavg", "ditto:lam=0.5", "--seeds", "2", *SMALL, "--out", "c")
    code, out, err = run_cli(monkeypatch, capsys, *args)
    assert (code, err) == (0, "")
    for words in ("local", "ditto:la", "lowest", "harmed", "gain", "Cost of a round", "2 seeds"):
        assert words in out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert {p.name for p in Path("c").iterdir()} >= {"leaderboard.csv", "leaderboard.md", "leaderboard.tex", "runs"}
    again = run_cli(monkeypatch, capsys, "compare", "--resume", "c")
    assert (again[0], again[1]) == (0, out)


def test_data_shows_a_partition_without_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_cli(
        monkeypatch, capsys, "data", "show", "--clients", "6", "--set", "beta=0.3", "--picture", "p.png"
    )
    assert code == 0
    assert "1797 samples of 10 classes at 6 clients" in out
    assert "p.png" in err
    assert Path("p.png").read_bytes()[:4] == b"\x89PNG"
    _, text, _ = run_cli(monkeypatch, capsys, "data", "show", "--clients", "6", "--set", "beta=0.3", "--json")
    found = json.loads(text)
    assert sum(one["samples"] for one in found["clients"]) == 1797
    assert all(
        sum(one["labels"]) == one["samples"] == one["train"] + one["val"] + one["test"] for one in found["clients"]
    )
    assert {p.name for p in tmp_path.iterdir()} == {"p.png"}


def test_a_file_and_options_add_up(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("algorithm: {name: ditto, lam: 0.3}\nclients: 5\nrounds: 9\nplan: stacked-eager\n")
    code, _, err = run_cli(
        monkeypatch, capsys, "run", "--config", "x.yaml", "--rounds", "1", "--set", "lr=0.2", "--out", "r"
    )
    assert code == 0, err
    found = yaml.safe_load(Path("r/config.yaml").read_text())
    assert (found["algorithm"]["lam"], found["clients"], found["rounds"], found["lr"]) == (0.3, 5, 1, 0.2)
