"""Sweeps: which combinations, selected on what, folders that can be continued, and the command for the best one."""

import csv
import doctest
import shlex

import numpy as np
import pytest
import torch
from helpers import Crash, Seen, run_cli
from kills import assert_same_files
from sentences import user_error
from torch import nn

import fedloom
import fedloom.studies.sweep
from fedloom.config.resolve import configure, describe, difference
from fedloom.core.federation import Federation, Ragged
from fedloom.runs.directory import RunDirectory
from fedloom.studies.study import Study
from fedloom.studies.sweep import parse_grid, read_sweep, sweep

TASK = {
    "dataset": "synthetic", "per_client": 40, "model": "mlp", "width": 8, "clients": 5, "rounds": 2, "dtype": "float64",
    "plan": "stacked-eager", "checkpoint_every": 1,
}  # fmt: skip
GRID = {"lr": [0.01, 0.1], "lam": [0.1, 1.0]}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished sweep in a folder."""
    return sweep("ditto", grid=GRID, seeds=2, out=tmp_path_factory.mktemp("done") / "mine", **TASK)


def folders(found):
    return sorted(path.parent for path in found.folder.glob("runs/*/*/config.yaml"))


def test_the_example_in_the_docstring_is_true():
    found = doctest.testmod(fedloom.studies.sweep)
    assert found.attempted > 0
    assert found.failed == 0


def test_every_combination_is_what_separate_runs_are(done):
    assert sorted((row["lr"], row["lam"]) for row in done.table) == [(0.01, 0.1), (0.01, 1), (0.1, 0.1), (0.1, 1)]
    for row in done.table:
        singles = [fedloom.run("ditto", lr=row["lr"], lam=row["lam"], seed=seed, **TASK) for seed in (0, 1)]
        best = [result.best_on_validation() for result in singles]
        for metric in ("val_acc_mean", "acc_mean", "acc_low5", "acc_worst"):
            assert row[metric] == pytest.approx(np.mean([one[f"pre_{metric}"] for one in best]), rel=1e-9)
        assert row["round"] == np.mean([one["round"] for one in best])
    ranks = [row["val_acc_mean"] for row in done.table]
    assert ranks == sorted(ranks, reverse=True)


def test_all_runs_of_a_sweep_are_stacked(done):
    plans = [fedloom.load(folder).plan for folder in folders(done)]
    assert len(plans) == 8
    assert all(plan == plans[0] and plan["runs"] == 8 for plan in plans)


def test_a_folder_has_the_configuration_the_runs_and_the_table(done):
    names = sorted(path.name for path in done.folder.iterdir())
    assert names == ["manifest.json", "runs", "sweep.csv", "sweep.md", "sweep.yaml"]
    with (done.folder / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["val_acc_mean"]) for row in rows] == [row["val_acc_mean"] for row in done.table]
    assert "select nothing" in (done.folder / "sweep.md").read_text()
    grid, seeds, _ = read_sweep(done.folder)
    assert (grid, seeds) == ({"lr": ["0.01", "0.1"], "lam": ["0.1", "1.0"]}, [0, 1])


def test_a_sweep_selects_on_validation_data_even_if_test_data_say_otherwise():
    """Test labels are the opposite of those of training and validation data, and so is what the model starts from:
    the learning rate that learns is best on validation data and worst on test data."""
    draw = np.random.default_rng(0)
    y = torch.from_numpy(draw.integers(0, 2, 180))
    x = torch.from_numpy(draw.normal(size=(180, 4)))
    x[:, 0] += 6 * y - 3
    splits = {"train": (0, 40), "val": (40, 50), "test": (50, 60)}
    lists = {name: Ragged.of([np.arange(60 * i + a, 60 * i + b) for i in range(3)]) for name, (a, b) in splits.items()}
    y[lists["test"].flat] = 1 - y[lists["test"].flat]
    data = Federation(x, y, 2, lists)
    model = nn.Sequential(nn.Linear(4, 2))
    with torch.no_grad():
        nn.init.zeros_(model[0].weight)[:, 0] = torch.tensor([1.0, -1.0])
    settings = {"rounds": 2, "model": model, "head": "0", "plan": "stacked-eager"}
    found = sweep("fedavg", data, grid={"lr": [1e-6, 0.3]}, **settings)
    assert [row["lr"] for row in found.table] == [0.3, 1e-6]
    assert found.table[0]["acc_mean"] < 10
    assert found.table[1]["acc_mean"] > 90
    assert found.command is None  # data in memory cannot be named on a command line


def test_a_sweep_that_crashed_is_resumed_to_the_same_bytes(done, tmp_path, monkeypatch):
    """It crashes between the checkpoints of two of its runs; all resume from the last round that every run has."""
    folder, saved = tmp_path / "mine", []
    save = RunDirectory.save_round

    def crash(directory, run, plan, records):
        saved.append(run.t)
        if len(saved) == 12:  # of 8 runs: half of them have the second round, half have not
            raise Crash
        save(directory, run, plan, records)

    monkeypatch.setattr(RunDirectory, "save_round", crash)
    with pytest.raises(Crash):
        sweep("ditto", grid=GRID, seeds=2, out=folder, **TASK)
    monkeypatch.undo()
    assert len({max(path.name for path in (p / "checkpoints").iterdir()) for p in folder.glob("runs/*/*")}) == 2
    seen = Seen()
    found = sweep("ditto", grid=GRID, seeds=2, out=folder, resume=True, callbacks=[seen], **TASK)
    assert [t for *_, t in seen.of("on_start")] == [1] * 8
    assert [t for *_, t in seen.of("on_round")] == [2] * 8
    assert len(folders(found)) == 8
    for mine, whole in zip(folders(found), folders(done), strict=True):
        assert_same_files(mine, whole)
        assert (mine / "run.log").read_text().count("Finished.") == 1


def test_a_finished_sweep_is_not_trained_again(done):
    before = {path: path.stat().st_mtime_ns for path in (done.folder / "runs").rglob("*")}
    again = sweep("ditto", grid=GRID, seeds=2, out=done.folder, resume=True, **TASK)
    assert again.table == done.table
    assert {path: path.stat().st_mtime_ns for path in (done.folder / "runs").rglob("*")} == before


def test_settings_that_cannot_be_stacked_are_swept_too():
    """Numbers of epochs determine loops: runs with the same number are stacked, with their learning rates."""
    groups = []

    class Groups(fedloom.Callback):
        def on_setup(self, run):
            groups.append((run.name, run.group, run.together))

    found = sweep("fedrep", grid={"head_epochs": [1, 2], "lr": [0.1, 0.2]}, callbacks=Groups(), **{**TASK, "rounds": 1})
    assert len(found.table) == 4
    assert groups == [
        ("head_epochs=1,lr=0.1", (1, 2), 2), ("head_epochs=1,lr=0.2", (1, 2), 2),
        ("head_epochs=2,lr=0.1", (2, 2), 2), ("head_epochs=2,lr=0.2", (2, 2), 2),
    ]  # fmt: skip


def test_the_folder_of_a_run_with_a_long_name_can_be_made(tmp_path):
    names = [f"lr=0.1{'0' * zeros}" for zeros in (300, 301)]
    study = Study(file="", read=None, config={}, names=names, runs=[configure("fedavg")] * 2, groups=[])
    paths = [study.path(tmp_path, place) for place in range(2)]
    assert len(set(paths)) == 2
    for path in paths:
        path.mkdir(parents=True)


MISTAKES = {
    "no grid": ({"grid": {}}, ["needs a grid"]),
    "no values": ({"grid": {"lr": []}}, ["no values for 'lr'"]),
    "not a list": ({"grid": {"lr": 0.1}}, ["list of values for 'lr'"]),
    "unknown setting": ({"grid": {"lamb": [1]}}, ["'lamb'", "did you mean 'lam'?"]),
    "wrong type": ({"grid": {"lam": [1, "x"]}}, ["lam must be a number, not 'x'"]),
    "out of range": ({"grid": {"lr": [0.1, -1]}}, ["lr must be greater than 0, not -1"]),
    "value twice": ({"grid": {"lr": [0.1, 0.2, "1e-1"]}}, ["lr=1e-1 twice"]),
    "setting twice": ({"grid": {"lr": [0.1]}, "lr": 0.2}, ["'lr' is given twice"]),
    "seed": ({"seed": 3}, ["seeds instead of a seed"]),
    "seed in the grid": ({"grid": {"seed": [1, 2]}}, ["seeds instead of a seed"]),
    "section": ({"grid": {"model": ["mlp", "logreg"]}}, ["'model' is none"]),
    "methods": ({"grid": {"per_method": [1, 2]}}, ["'per_method' is none"]),
    "too many runs": ({"grid": {k: range(1, 101) for k in ("lr", "lam", "clip")}}, ["1000000 runs are more than"]),
    "task": ({"grid": {"clients": [5, 10]}}, ["'clients' changes the task"]),
    "partition": ({"grid": {"partition.beta": [0.1, 1]}}, ["'partition.beta' changes the task"]),
    "method and task": ({"algorithm": "pfedme", "grid": {"lr": [0.01, 1.0]}}, ["diverges where lr"]),
    "no validation data": ({"split": (0.7, 0, 0.3)}, ["no client that is evaluated has any", "split=0.7/0.1/0.2"]),
    "seeds": ({"seeds": "x"}, ["'x'"]),
    "resume": ({"resume": True, "out": None}, ["resume needs out"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows_before_anything_is_trained_or_written(mistake, tmp_path):
    asked, words = MISTAKES[mistake]
    seen = Seen()
    settings = {"algorithm": "ditto", "grid": {"lr": [0.1, 0.2]}, "out": tmp_path / "mine", **TASK, **asked}
    if mistake == "no validation data":
        settings |= {"dataset": "digits"}
        del settings["per_client"]
    with user_error(*words):
        sweep(**settings, callbacks=[seen])
    assert seen.events == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["lr"], "not 'lr'"), (["=1"], "not '=1'"), (["lr="], "not 'lr='"), (["lr=1,,2"], "not 'lr=1,,2'"),
        (["lr=1", "lr=2"], "'lr' twice"), ([], "needs a grid"), (None, "needs a grid"),
    ],
)  # fmt: skip
def test_a_grid_that_is_none_gets_one_sentence(items, words):
    with user_error(words):
        parse_grid(items)


def test_other_folders_are_not_taken_for_a_sweep(done, tmp_path):
    with user_error("was started with grid=", "lam=0.1,1.0"):
        sweep("ditto", grid={"lr": [0.01, 0.1]}, seeds=2, out=done.folder, resume=True, **TASK)
    with user_error("in use already", "--resume"):
        sweep("ditto", grid=GRID, out=done.folder, **TASK)
    assert fedloom.load(done.folder).table == done.table
    with user_error("holds a sweep", "fedloom sweep --resume"):
        fedloom.compare(["ditto"], out=done.folder, resume=True, **TASK)
    with user_error("There is no sweep"):
        read_sweep(tmp_path / "nowhere")


def test_a_sweep_is_resumed_with_nothing_but_its_folder(done, monkeypatch, capsys):
    table = (done.folder / "sweep.csv").read_text()
    code, out, err = run_cli(monkeypatch, capsys, "sweep", "--resume", str(done.folder))
    assert (code, err) == (0, "")
    assert "4 combinations of lr, lam" in out
    assert "select nothing" in " ".join(out.split())
    assert (done.folder / "sweep.csv").read_text() == table


def test_the_command_that_a_sweep_prints_runs_the_best_combination(done, monkeypatch, capsys):
    """With a folder, from the configuration there; without one, spelled out."""
    asked = [f"--set {key}={value}" for key, value in TASK.items() if key not in ("dataset", "model")]
    asked += ["--dataset synthetic --model mlp --grid lr=0.01,0.1 --set lam=1.0 --no-save"]
    code, out, err = run_cli(monkeypatch, capsys, "sweep", "ditto", *" ".join(asked).split())
    assert (code, err) == (0, "")
    spelled_out = out.partition("Run the best one: fedloom ")[2].strip()
    meant, some = [], fedloom.load(folders(done)[0])
    monkeypatch.setattr("fedloom.studies.execute.execute", lambda config, **_: meant.append(describe(config)) or some)
    for line in (spelled_out, done.command.removeprefix("fedloom ")):
        assert run_cli(monkeypatch, capsys, *shlex.split(line), "--no-save")[0] == 0
    spelled, kept = meant
    assert (kept["lr"], kept["algorithm"]["lam"]) == (done.best()["lr"], done.best()["lam"])
    assert spelled["lr"] in (0.01, 0.1)
    assert spelled["algorithm"]["lam"] == 1.0
    assert difference(kept, {**spelled, "lr": kept["lr"], "algorithm": kept["algorithm"]}) is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--grid", "lr=0.1,x"), "lr must be a number, not 'x'"),
        (("--grid", "lrr=0.1"), "did you mean 'lr'?"),
        (("--grid", "lr=0.1,0.10"), "lr=0.10 twice"),
        ((), "needs a grid"),
    ],
)
def test_a_mistake_gets_one_sentence(args, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_cli(monkeypatch, capsys, "sweep", "ditto", *args)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
