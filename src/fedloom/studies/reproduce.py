"""Reproducing a table of a paper: its runs, and its numbers beside what FedLoom measures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.config.files import ConfigDict
from fedloom.config.resolve import Config, combine, describe, flat, resolve
from fedloom.core.errors import UserError, check_path, unknown
from fedloom.papers.catalog import Experiment, PaperMethod, PaperTask, runnable
from fedloom.report.reproduction import NOT_RUN, to_csv, to_latex, to_markdown
from fedloom.runs.directory import RunDirectory
from fedloom.storage.files import text_writer, write_file
from fedloom.studies.build import make_data, make_task
from fedloom.studies.callbacks import Callback, checked
from fedloom.studies.compare import parse_method, same_division
from fedloom.studies.execute import execute_group
from fedloom.studies.frames import data_frame
from fedloom.studies.notebook import with_progress
from fedloom.studies.protocols import find_protocol, measure
from fedloom.studies.result import Result, load_run
from fedloom.studies.study import parse_seeds, refuse_seed, run_folder

Row = dict[str, Any]
# settings that change how a run is carried out or evaluated, but not what it trains
INCIDENTAL = ("seed", "device", "plan", "engine", "store", "keep", "checkpoint_every", "deterministic", "metric")
TABLES = {"csv": to_csv, "md": to_markdown, "tex": to_latex}


@dataclass(repr=False)
class Reproduction:
    """A table of a paper beside measured numbers. `rows` has one row per task, method and metric."""

    experiment: Experiment
    rows: list[Row]
    folder: Path

    def __repr__(self) -> str:
        done = sum(row["ours"] is not None for row in self.rows)
        return f"Reproduction({self.experiment.id}, {done} of {len(self.rows)} cells, {self.folder})"

    def to_pandas(self) -> Any:
        """The table as a `pandas.DataFrame`. Needs pandas: `pip install 'fedloom[pandas]'`."""
        return data_frame(self.rows)


def reproduce(
    experiment: str,
    *,
    out: str | Path,
    tasks: Sequence[str] = (),
    dataset: str | None = None,
    algorithms: Sequence[str] = (),
    seeds: int | Sequence[int] = 3,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Reproduction:
    """Carry out the runs of a paper's table that are not done yet, and show them beside the paper's numbers.

    Args:
        experiment: its id, such as "GPFL-T1", see `fedloom reproduce` without arguments.
        out: folder for the runs; those that are there already are kept, whoever asked for them.
        tasks: names of the tasks (columns of the table) to run; by default all.
        dataset: only tasks on this data set.
        algorithms: labels of the rows, or registered names of methods; by default all.
        seeds: how many, or which.
        callbacks: objects that are called while runs train, see `fedloom.Callback`.
        **settings: settings in place of the paper's, such as rounds=100.
    """
    called = with_progress(callbacks)
    config = {key.replace("__", "."): value for key, value in settings.items()}
    chosen = select(runnable(experiment), tasks, dataset, algorithms)
    return carry_out(chosen, parse_seeds(seeds), config, Path(out), called)


@dataclass(frozen=True)
class Selection:
    """What is to be run of an experiment."""

    experiment: Experiment
    tasks: Sequence[PaperTask]
    methods: Sequence[PaperMethod]


def select(
    experiment: Experiment, tasks: Sequence[str] = (), dataset: str | None = None, algorithms: Sequence[str] = ()
) -> Selection:
    """The tasks and the methods of an experiment that are asked for."""
    known = {task.name: task for task in experiment.tasks}
    for name in tasks:
        if name not in known:
            raise unknown(f"task of {experiment.id}", name, list(known))
    chosen = [known[name] for name in tasks] or list(experiment.tasks)
    if dataset is not None:
        of = {task.name: _dataset(task) for task in experiment.tasks}
        chosen = [task for task in chosen if of[task.name] == dataset]
        if not chosen:
            raise unknown(f"data set of {experiment.id}", dataset, sorted(set(of.values())))
    return Selection(experiment, chosen, _methods(experiment, algorithms))


def _dataset(task: PaperTask) -> str:
    return combine(*task.settings)["dataset"]["name"]


def _methods(experiment: Experiment, wanted: Sequence[str]) -> list[PaperMethod]:
    """The rows with these labels, or whose method has such a name."""
    found: list[PaperMethod] = []
    by_method = {row: row.method.partition(":")[0] for row in experiment.methods}
    for name in wanted:
        rows = [row for row in by_method if row.label.lower() == name.lower()]
        rows = rows or [row for row, method in by_method.items() if method == name.lower()]
        if not rows:
            known = dict.fromkeys(word for row, method in by_method.items() for word in (row.label, method))
            raise unknown(f"method of {experiment.id}", name, list(known))
        found += [row for row in rows if row not in found]
    return found or list(experiment.methods)


def configuration(task: PaperTask, method: PaperMethod, settings: ConfigDict) -> Config:
    """The configuration of a cell: the paper's, with the settings that a user gives in their place."""
    quiet = {"keep": "none"}  # tables need no models
    return resolve(combine(quiet, *task.settings, settings, {"algorithm": parse_method(method.method)}))


def carry_out(
    selection: Selection,
    seeds: Sequence[int],
    settings: ConfigDict,
    out: Path,
    callbacks: Sequence[Callback] = (),
) -> Reproduction:
    """Carry out all runs that are not done yet, task by task and method by method with all seeds stacked, and make the
    table of all runs that are in the folder."""
    refuse_seed(settings, "reproduction")
    checked(callbacks)
    check_path(out)
    experiment = selection.experiment
    plans = {
        task.name: {row.method: configuration(task, row, settings) for row in selection.methods}
        for task in selection.tasks
    }
    refused: dict[tuple[str, str], str] = {}
    total, number = sum(map(len, plans.values())), 0
    for task in selection.tasks:
        configs = same_division(plans[task.name])
        left = {name: config for name, config in configs.items() if not _finished(out, task, name, config, seeds)}
        number += len(configs) - len(left)
        if not left:
            continue
        data = make_data(next(iter(left.values())))
        for name, config in left.items():
            number += 1
            try:
                make_task(config, data)
            except UserError as error:  # the method does not fit this task
                refused[task.name, name] = str(error)
                continue
            execute_group(
                [config.with_seed(seed) for seed in seeds],
                out=[_folder(out, task, name, seed) for seed in seeds],
                resume=True,
                callbacks=callbacks,
                names=[f"{task.name} {name}"] * len(seeds),
                number=(number, total),
                data=data,
            )
    if refused and len(refused) == total:
        raise UserError(next(iter(refused.values())))
    found = load_reproduction(experiment, out, refused)
    for suffix, write in TABLES.items():
        write_file(out / f"{experiment.id}.{suffix}", text_writer(write(found.rows)))
    return found


def load_reproduction(
    experiment: Experiment, out: Path, refused: Mapping[tuple[str, str], str] | None = None
) -> Reproduction:
    """The table of the finished runs in a folder; tasks without any are left out."""
    rows: list[Row] = []
    for task in experiment.tasks:
        runs = {row.method: list(_runs(out, task, row.method)) for row in experiment.methods}
        if any(runs.values()):
            for row in experiment.methods:
                rows += _rows(experiment, task, row, runs[row.method], (refused or {}).get((task.name, row.method), ""))
    return Reproduction(experiment, rows, out)


def _folder(out: Path, task: PaperTask, method: str, seed: int) -> Path:
    return run_folder(out / task.name, method, seed)


def _finished(out: Path, task: PaperTask, method: str, config: Config, seeds: Sequence[int]) -> bool:
    """True if all runs of a method are finished; then their data need not be loaded. Raises a UserError if one has
    other settings."""
    done = [
        RunDirectory(_folder(out, task, method, seed)).check(describe(config.with_seed(seed)), resume=True)
        for seed in seeds
    ]
    return all(done)


def _runs(out: Path, task: PaperTask, method: str) -> Iterator[Result]:
    """All finished runs of a method in the folder."""
    parent = _folder(out, task, method, 0).parent
    for folder in sorted(parent.glob("seed-*"), key=lambda path: int(path.name.rpartition("-")[2])):
        if RunDirectory(folder).finished:
            yield load_run(folder)


def _rows(experiment: Experiment, task: PaperTask, method: PaperMethod, runs: list[Result], refused: str) -> list[Row]:
    """The rows of a method on a task, one per metric."""
    rows = []
    for metric, how in experiment.metrics.items():
        number = experiment.number(task, method, metric)
        row: Row = {
            "experiment": experiment.id,
            "task": task.name,
            "method": method.label,
            "metric": metric,
            "measured": find_protocol(how).about,
            "paper": None if number is None else number.value,
            "paper_std": None if number is None else number.std,
            "unusable": "" if number is None else number.unusable,
            "notes": "" if number is None else number.notes,
            **dict.fromkeys(("ours", "se", "difference", "validation", "last")),
            "seeds": len(runs),
            "state": refused or ("" if runs else NOT_RUN),
        }
        found = [one for run in runs if (one := measure(run, how, method.view)) is not None]
        if found:
            ours = [one.paper for one in found]
            row |= {
                "ours": float(np.mean(ours)),
                "se": float(np.std(ours, ddof=1) / math.sqrt(len(ours))) if len(ours) > 1 else None,
                "validation": float(np.mean([one.validation for one in found])),
                "last": float(np.mean([one.last for one in found])),
                "state": "; ".join(changes(task, method, runs[0])),
            }
            if row["paper"] is not None:
                row["difference"] = row["ours"] - row["paper"]
        elif runs:
            row["state"] = "the method has no such model"
        rows.append(row)
    return rows


def changes(task: PaperTask, method: PaperMethod, run: Result) -> list[str]:
    """How a run differs from the paper's, such as "100 of 500 rounds"."""
    paper, mine = flat(describe(configuration(task, method, {}))), flat(run.config)
    found = [f"{run.last()['round']} of {paper['rounds']} rounds"] if run.last()["round"] != paper["rounds"] else []
    skipped = {*INCIDENTAL, "rounds", "data_dir", "dataset.data_dir", "head"}
    differing = [key for key in paper if key not in skipped and key in mine and mine[key] != paper[key]]
    return found + [f"{key}={_written(mine[key])} (paper {_written(paper[key])})" for key in differing]


def _written(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
