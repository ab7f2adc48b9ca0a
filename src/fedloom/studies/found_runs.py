"""Runs in a folder, finished or not: of a run directory, a comparison, a sweep, a reproduction, or a folder of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.config.files import ConfigDict
from fedloom.config.resolve import flat
from fedloom.core.errors import UserError, check_path, plural
from fedloom.runs.directory import CONFIG, RunDirectory
from fedloom.studies import compare
from fedloom.studies.result import Result, load_run
from fedloom.studies.study import run_folder

DEEPEST = 5  # folders below the one that is asked for
UNIMPORTANT = ("seed", "rounds", "device", "plan", "engine", "actors", "store", "keep", "checkpoint_every", "data_dir")


class FoundRun(NamedTuple):
    """A run with at least one evaluated round."""

    label: str  # of its method: runs of one label differ in their seeds only
    seed: int
    folder: Path
    result: Result
    finished: bool


class FoundRuns(NamedTuple):
    """All runs of a folder, which are on one task."""

    folder: Path
    runs: list[FoundRun]
    waiting: int  # runs of which no round is saved yet, or that have not begun
    equal_budget: str | None = None  # the method of a comparison whose budget all others have


def find_runs(folder: Path) -> FoundRuns:
    """The runs in a folder, those of a comparison in the order of its methods. Raises UserError if there are none with
    results, if one is damaged, or if they are on different tasks."""
    check_path(folder)
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}; give the folder of a run, or one that has runs in it.")
    planned, equal_budget = _planned(folder)
    paths = list(dict.fromkeys([*run_directories(folder), *planned]))
    ready = [(path, load_run(path)) for path in paths if has_results(path)]
    waiting = len(paths) - len(ready)
    if not ready:
        if waiting:
            raise UserError(f"{folder} has no results yet; wait for the first checkpoint of a run.")
        raise UserError(f"There are no runs in {folder}; give the folder of a run, or one that has runs in it.")
    check_one_task(ready)
    if planned:
        labels = [planned.get(path, path.parent.name) for path, _ in ready]
    else:
        labels = distinguished([result.config for _, result in ready])
    runs = [
        FoundRun(label, int(result.config["seed"]), path, result, RunDirectory(path).finished)
        for label, (path, result) in zip(labels, ready, strict=True)
    ]
    order = {label: place for place, label in enumerate(dict.fromkeys([*planned.values(), *labels]))}
    return FoundRuns(folder, sorted(runs, key=lambda run: order[run.label]), waiting, equal_budget)


def run_directories(folder: Path) -> list[Path]:
    """Run directories in a folder, or the folder itself."""
    if (folder / CONFIG).exists():
        return [folder]
    found = []
    for depth in range(1, DEEPEST + 1):
        found += [path.parent for path in folder.glob("*/" * depth + CONFIG)]
    return sorted(found, key=lambda path: [_natural(part) for part in path.parts])


def has_results(path: Path) -> bool:
    """True if a run has been planned, and a first round is recorded."""
    return (path / "plan.json").exists() and (path / "rounds.parquet").exists()


def check_one_task(runs: Sequence[tuple[Path, Result]]) -> None:
    """Raise UserError for runs that cannot be compared: of other data, other clients or another metric."""
    first, rest = runs[0], runs[1:]
    for path, result in rest:
        for what, (mine, other) in {
            "the data set": [r.config["dataset"]["name"] for r in (first[1], result)],
            "the metric": [r.metric for r in (first[1], result)],
            "the division of the data": [r.partition for r in (first[1], result)],
        }.items():
            if mine != other:
                told = f" ({mine} and {other})" if what != "the division of the data" else ""
                raise UserError(
                    f"{first[0]} and {path} cannot be compared, because {what} differs{told}; give a folder with runs "
                    "on one task."
                )


def _planned(folder: Path) -> tuple[dict[Path, str], str | None]:
    """The runs of a comparison, with what it calls their methods, and the method whose budget all have, if it says so;
    nothing for other folders."""
    if not (folder / compare.FILE).exists():
        return {}, None
    config = compare.stored_config(folder)  # and not the code of methods that are in files
    planned = {run_folder(folder, method, seed): method for method in config["methods"] for seed in config["seeds"]}
    return planned, config.get(compare.EQUAL_BUDGET)


def distinguished(configs: Sequence[ConfigDict]) -> list[str]:
    """A name for each configuration: its method and, as `method:setting=value`, what differs among those of it."""
    settings = [{k: v for k, v in flat(config).items() if k not in UNIMPORTANT} for config in configs]
    names = [str(found.pop("algorithm")) for found in settings]
    labels = []
    for name, mine in zip(names, settings, strict=True):
        same = [other for other, of in zip(settings, names, strict=True) if of == name]
        differing = [key for key, value in mine.items() if any(other.get(key) != value for other in same)]
        words = [f"{key.removeprefix('algorithm.')}={_written(mine[key])}" for key in differing]
        labels.append(name + (":" + ",".join(words) if words else ""))
    return labels


def by_label(runs: Iterable[FoundRun]) -> dict[str, list[FoundRun]]:
    """The runs of every method, by seed. Of several with the same seed the last counts."""
    found: dict[str, dict[int, FoundRun]] = {}
    for run in runs:
        found.setdefault(run.label, {})[run.seed] = run
    return {label: [mine[seed] for seed in sorted(mine)] for label, mine in found.items()}


def about_progress(found: FoundRuns) -> str:
    """How far the runs are; "" if all are finished."""
    going = [run for run in found.runs if not run.finished]
    words = [f"{plural(len(going), 'run')} not finished"] if going else []
    words += [f"{plural(found.waiting, 'run')} without saved rounds"] if found.waiting else []
    return ", ".join(words)


def _natural(text: str) -> tuple[Any, ...]:
    """A key that sorts seed-2 before seed-10."""
    head = text.rstrip("0123456789")
    return head, int(text[len(head) :] or -1)


def _written(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
