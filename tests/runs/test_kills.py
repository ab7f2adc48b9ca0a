"""A run that is killed at any moment and resumed leaves the same bytes as one that was not."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from kills import live

KILLS = 20
SAME = (
    "final/server.safetensors", "final/clients.safetensors", "rounds.parquet", "clients.parquet", "reports.parquet",
    "partition.parquet",
    "summary.json", "config.yaml",
)  # fmt: skip
SMALL = ["--device", "cpu", "--clients", "6", "--participation", "0.5", "--set", "checkpoint_every=1"]


def run(method, engine, store):
    """Stacked without traces, which would take seconds to make in every life."""
    how = {"vectorized": ["--plan", "stacked-eager"], "reference": ["--engine", "reference"]}[engine]
    return ["run", method, "--rounds", "24", "--store", store, *how, *SMALL]


def operations(command, folder, name) -> int:
    report = folder / f"{name}-operations.json"
    assert live([*command, "--out", str(folder / name)], report=report) == 0
    return json.loads(report.read_text())


def next_life(command, folder) -> list[str]:
    """What a person would type: the command again if nothing is there yet, else --resume."""
    started = any((folder / name).exists() for name in ("config.yaml", "compare.yaml"))
    return [command[0], "--resume", str(folder)] if started else [*command, "--out", str(folder)]


def killed(command, folder, draw, most: int) -> None:
    """Start, and resume after every kill; then let it end. Kills are spread evenly over as many operations as the whole
    takes, so that some fall into writes of checkpoints and some into the start of a resumed run."""
    for _ in range(KILLS):
        code = live(next_life(command, folder), at=int(draw.integers(1, most)))
        assert code in (-9, 0)
        if code == 0:
            return
    assert live(next_life(command, folder)) == 0


@pytest.mark.parametrize(
    ("method", "engine", "store"),
    [
        ("fedrep", "vectorized", "disk"),
        ("fedrep", "reference", "memory"),
        ("ditto", "vectorized", "memory"),
        ("ditto", "reference", "disk"),
        ("scaffold", "vectorized", "disk"),
        ("scaffold", "reference", "memory"),
    ],
)
def test_twenty_kills_change_nothing(method, engine, store, tmp_path):
    command = run(method, engine, store)
    total = operations(command, tmp_path, "whole")
    draw = np.random.default_rng([len(method), len(engine)])
    killed(command, tmp_path / "killed", draw, 2 * total // KILLS)
    lives = json.loads((tmp_path / "killed" / "environment.json").read_text())["starts"]
    assert len(lives) > KILLS // 2
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
    command = ["compare", "fedrep", "ditto", "--seeds", "2", "--rounds", "4", "--plan", "stacked-eager", *SMALL]
    total = operations(command, tmp_path, "whole")
    draw = np.random.default_rng(3)
    killed(command, tmp_path / "killed", draw, 2 * total // KILLS)
    runs = sorted(p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").glob("runs/*/seed-*"))
    assert len(runs) == 6
    for run_ in runs:
        for name in SAME:
            assert (tmp_path / "killed" / run_ / name).read_bytes() == (tmp_path / "whole" / run_ / name).read_bytes()
    assert board(tmp_path / "killed") == board(tmp_path / "whole")


def board(folder: Path) -> list[dict[str, str]]:
    """The leaderboard without its times."""
    with (folder / "leaderboard.csv").open() as file:
        return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in csv.DictReader(file)]
