"""A run that is killed at any moment and resumed leaves the same bytes as one that was not."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from kills import assert_same_files, run_process

ROUNDS = 24
SMALL = ["--device", "cpu", "--clients", "6", "--participation", "0.5", "--set", "checkpoint_every=1"]
SHORT = ["--batch-size", "100"]  # rounds of a few steps; not for runs that are killed after some time


def run(method, engine, store, *more):
    """The command of a run; if stacked, without traces, which would take seconds in every process."""
    how = {"vectorized": ["--plan", "stacked-eager"], "reference": ["--engine", "reference"]}[engine]
    return ["run", method, "--rounds", str(ROUNDS), "--store", store, *how, *SMALL, *more]


def operations(command, folder, name) -> list[str]:
    """What an undisturbed run does to files, one path after another."""
    log_file = folder / f"{name}-operations.json"
    assert run_process([*command, "--out", str(folder / name)], log_file=log_file) == 0
    return json.loads(log_file.read_text())


def start_or_resume(command, folder) -> list[str]:
    """The command that a user would type: the same again if there is nothing to resume yet, else --resume."""
    started = any((folder / name).exists() for name in ("config.yaml", "compare.yaml"))
    return [command[0], "--resume", str(folder)] if started else [*command, "--out", str(folder)]


def checkpoint(t: int, run_="") -> str:
    """A part of the path of a checkpoint of round t while it is written."""
    return f"{run_}/checkpoints/.round-{t:08d}"


def first(log: list[str], mark: str) -> int:
    """The place of the first operation on a path that contains `mark`."""
    return next(i for i, path in enumerate(log) if mark in path)


def run_with_kills(command, folder, places) -> int:
    """Start, and resume after every kill, each at one of the places; then run to the end. Returns how many of the kills
    left a file half written."""
    half_written = 0
    for mark, at in places:
        assert run_process(start_or_resume(command, folder), at=at, mark=mark) == -9, (mark, at)
        half_written += bool(list(folder.rglob("*.partial")))
    assert run_process(start_or_resume(command, folder)) == 0
    return half_written


@pytest.mark.parametrize(
    ("method", "engine", "store"),
    [
        ("fedrep", "vectorized", "disk"),
        ("scaffold", "reference", "memory"),
    ],
)
def test_twenty_kills_change_nothing(method, engine, store, tmp_path):
    """One at the start; twelve at even distances over the rounds, from the write of a checkpoint up to that of the
    next, every third of them followed by one while the run resumes; three while the final files are written."""
    command = run(method, engine, store, *SHORT)
    log = operations(command, tmp_path, "whole")
    draw = np.random.default_rng([len(method), len(engine)])
    starting, ending, summary = (first(log, mark) for mark in (checkpoint(1), "/final/.", "/.summary.json"))
    per_round = (first(log, checkpoint(ROUNDS)) - starting) // (ROUNDS - 1)
    places = [("", int(draw.integers(1, starting + 1)))]
    for i, t in enumerate(range(1, ROUNDS, 2)):
        places.append((checkpoint(t), int(draw.integers(1, per_round + 1))))
        if i % 3 == 0:
            places.append(("", int(draw.integers(1, starting // 2))))
    places += [("/final/.", int(at)) for at in np.sort(draw.integers(1, summary - ending + 2, 3))]
    assert len(places) == 20
    assert run_with_kills(command, tmp_path / "killed", places) >= 1
    assert_same_files(tmp_path / "killed", tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob("*.partial"))


def test_kills_at_any_time_change_nothing(tmp_path):
    command = run("ditto", "vectorized", "disk")
    operations(command, tmp_path, "whole")
    folder = tmp_path / "killed"
    draw = np.random.default_rng(5)
    for _ in range(6):
        run_process(start_or_resume(command, folder), after=draw.uniform(0.3, 1))
    assert run_process(start_or_resume(command, folder)) == 0
    assert_same_files(folder, tmp_path / "whole")


def test_a_comparison_survives_twenty_kills_too(tmp_path):
    """The two seeds of a method are stacked and make their checkpoints in the same rounds. Kills of each method: at or
    after the checkpoint of the first seed, and of the second in a later round; while resuming after either; while the
    final files of either are written. And two while the leaderboard is written."""
    command = ["compare", "fedrep", "ditto", "--seeds", "2", "--rounds", "4", "--plan", "stacked-eager", *SMALL, *SHORT]
    log = operations(command, tmp_path, "whole")
    draw = np.random.default_rng(3)
    whole = tmp_path / "whole"
    runs = sorted((f"/{p.relative_to(whole)}" for p in whole.glob("runs/*/seed-*")), key=lambda r: first(log, r))
    assert len(runs) == 6
    places = []
    for seeds in zip(runs[::2], runs[1::2], strict=True):
        for run_, t in zip(seeds, draw.integers([1, 3], [3, 5]), strict=True):
            places.append((checkpoint(int(t), run_), int(draw.integers(1, 9))))
            places.append(("", int(draw.integers(1, first(log, runs[0])))))
        places += [(f"{run_}/final/.", int(draw.integers(1, 9))) for run_ in seeds]
    places += [("/.leaderboard", 1), ("/.leaderboard", 6)]
    assert len(places) == 20
    assert run_with_kills(command, tmp_path / "killed", places) >= 1
    for run_ in runs:
        assert_same_files(tmp_path / f"killed{run_}", tmp_path / f"whole{run_}")
    assert board(tmp_path / "killed") == board(tmp_path / "whole")


def board(folder: Path) -> list[dict[str, str]]:
    """The leaderboard without its times."""
    with (folder / "leaderboard.csv").open() as file:
        return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in csv.DictReader(file)]
