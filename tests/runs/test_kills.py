"""A run that is killed at any moment and resumed leaves the same bytes as one that was not."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from kills import SAME, live

ROUNDS = 24
SMALL = ["--device", "cpu", "--clients", "6", "--participation", "0.5", "--set", "checkpoint_every=1"]
SHORT = ["--batch-size", "100"]  # rounds of a few steps; what is killed after some time must not end before


def run(method, engine, store, *more):
    """Stacked without traces, which would take seconds to make in every life."""
    how = {"vectorized": ["--plan", "stacked-eager"], "reference": ["--engine", "reference"]}[engine]
    return ["run", method, "--rounds", str(ROUNDS), "--store", store, *how, *SMALL, *more]


def operations(command, folder, name) -> list[str]:
    """What an undisturbed run does to files, one path after another."""
    report = folder / f"{name}-operations.json"
    assert live([*command, "--out", str(folder / name)], report=report) == 0
    return json.loads(report.read_text())


def next_life(command, folder) -> list[str]:
    """What a person would type: the command again if nothing is there yet, else --resume."""
    started = any((folder / name).exists() for name in ("config.yaml", "compare.yaml"))
    return [command[0], "--resume", str(folder)] if started else [*command, "--out", str(folder)]


def checkpoint(t: int, run_="") -> str:
    return f"{run_}/checkpoints/.round-{t:08d}"


def first(log: list[str], mark: str) -> int:
    return next(i for i, path in enumerate(log) if mark in path)


def die(command, folder, places) -> int:
    """Start, and resume after every kill, each at its own place; then let it end. Returns in how many deaths a
    checkpoint was half written."""
    halves = 0
    for mark, at in places:
        assert live(next_life(command, folder), at=at, mark=mark) == -9, (mark, at)
        halves += bool(list(folder.rglob(".round-*.partial")))
    assert live(next_life(command, folder)) == 0
    return halves


@pytest.mark.parametrize(
    ("method", "engine", "store"),
    [
        ("fedrep", "vectorized", "disk"),
        ("ditto", "vectorized", "memory"),
        ("ditto", "reference", "disk"),
        ("scaffold", "reference", "memory"),
    ],
)
def test_twenty_kills_change_nothing(method, engine, store, tmp_path):
    """Twelve are spread evenly over the rounds, from the write of a checkpoint up to that of the next; every third
    of them is followed by one in the resume, of which there is one at the very start; the last three are in the end."""
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
    assert die(command, tmp_path / "killed", places) >= 1
    for name in SAME:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not list((tmp_path / "killed").rglob("*.partial"))


def test_kills_at_any_time_change_nothing(tmp_path):
    command = run("ditto", "vectorized", "disk")
    operations(command, tmp_path, "whole")
    folder = tmp_path / "killed"
    draw = np.random.default_rng(5)
    for _ in range(6):
        live(next_life(command, folder), after=draw.uniform(0.3, 1))
    assert live(next_life(command, folder)) == 0
    for name in SAME:
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_comparison_survives_twenty_kills_too(tmp_path):
    """Two seeds of a method are one run. For each: before a checkpoint of the first seed is complete, or after it and
    before that of the second is; the same the other way round; in the resumes after them; in the end of either. And two
    while the leaderboard is written."""
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
    assert die(command, tmp_path / "killed", places) >= 1
    for run_ in runs:
        for name in SAME:
            assert (tmp_path / f"killed{run_}" / name).read_bytes() == (tmp_path / f"whole{run_}" / name).read_bytes()
    assert board(tmp_path / "killed") == board(tmp_path / "whole")


def board(folder: Path) -> list[dict[str, str]]:
    """The leaderboard without its times."""
    with (folder / "leaderboard.csv").open() as file:
        return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in csv.DictReader(file)]
