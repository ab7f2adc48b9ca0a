"""Reproducing a table of a paper: its runs, and its numbers beside what FedLoom measures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.cluster.actors import session
from fedloom.config.files import ConfigDict
from fedloom.config.resolve import Config, combine, describe, flat, resolve
from fedloom.core.errors import UserError, check_path, unknown
from fedloom.papers.catalog import Experiment, PaperMethod, PaperTask, runnable
from fedloom.papers.numbers import Number, find_number
from fedloom.report.reproduction import NOT_RUN, to_csv, to_latex, to_markdown
from fedloom.runs.directory import RunDirectory
from fedloom.storage.files import make_folder, text_writer, write_file
from fedloom.studies.build import make_data, make_task
from fedloom.studies.callbacks import Callback, checked
from fedloom.studies.compare import parse_method, same_division
from fedloom.studies.cost_metrics import COST_METRICS
from fedloom.studies.execute import execute_group
from fedloom.studies.frames import data_frame
from fedloom.studies.notebook import with_progress
from fedloom.studies.protocols import find_protocol, measure
from fedloom.studies.result import Result, load_run
from fedloom.studies.study import parse_seeds, refuse_seed, run_folder

Row = dict[str, Any]
# settings that change how a run is carried out or evaluated, but not what it trains
INCIDENTAL = (
    "seed",
    "device",
    "plan",
    "engine",
    "actors",
    "store",
    "keep",
    "checkpoint_every",
    "deterministic",
    "metric",
)
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
    """Carry out the runs of a paper's table that are not done yet, and show them beside the paper's numbers. Tables of
    costs need no runs.

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
    """Carry out all runs that are not done yet, and make the table of all runs that are in the folder. Where costs are
    counted, there are no runs."""
    refuse_seed(settings, "reproduction")
    checked(callbacks)
    check_path(out)
    experiment = selection.experiment
    if experiment.costs:
        found = Reproduction(experiment, list(_counted(selection, settings)), out)
    else:
        found = load_reproduction(experiment, out, _train(selection, seeds, settings, out, callbacks))
    make_folder(out)
    for suffix, write in TABLES.items():
        write_file(out / f"{experiment.id}.{suffix}", text_writer(write(found.rows)))
    return found


def _train(
    selection: Selection, seeds: Sequence[int], settings: ConfigDict, out: Path, callbacks: Sequence[Callback]
) -> dict[tuple[str, str], str]:
    """Carry out runs, task by task and method by method with all seeds stacked. Returns, by names of task and method,
    why a method does not fit a task."""
    plans = {
        task.name: {row.method: configuration(task, row, settings) for row in selection.methods}
        for task in selection.tasks
    }
    refused: dict[tuple[str, str], str] = {}
    total, number = sum(map(len, plans.values())), 0
    with session():
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
    return refused


def _counted(selection: Selection, settings: ConfigDict) -> Iterator[Row]:
    """The rows of an experiment about costs, one per task, method and metric."""
    experiment = selection.experiment
    for task in selection.tasks:
        for method in selection.methods:
            config = configuration(task, method, settings)
            for metric, how in experiment.metrics.items():
                found = COST_METRICS[how]
                row = _row(experiment, task, method.label, metric, experiment.number(task, method, metric))
                ours = found.measure(config, method.label)
                if ours is not None:
                    state = "; ".join(_differing(task, method, describe(config)))
                    unusable = row["unusable"] or found.unusable
                    yield row | _beside(row, ours) | {"measured": found.about, "unusable": unusable, "state": state}


def load_reproduction(
    experiment: Experiment, out: Path, refused: Mapping[tuple[str, str], str] | None = None
) -> Reproduction:
    """The table of the finished runs in a folder; tasks without any are left out."""
    rows: list[Row] = []
    for task in experiment.tasks:
        runs = {row.method: list(_runs(out, task, row.method)) for row in experiment.methods}
        if any(runs.values()):
            of_task: list[Row] = []
            for row in experiment.methods:
                why = (refused or {}).get((task.name, row.method), "")
                of_task += _rows(experiment, task, row, runs[row.method], why)
            rows += [*of_task, *_improvement(experiment, task, of_task)]
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


def _row(experiment: Experiment, task: PaperTask, label: str, metric: str, number: Number | None) -> Row:
    """A row without what is measured."""
    return {
        "experiment": experiment.id,
        "task": task.name,
        "method": label,
        "metric": metric,
        "measured": "",
        "paper": None if number is None else number.value,
        "paper_std": None if number is None else number.std,
        "unusable": "" if number is None else number.unusable,
        "notes": "" if number is None else number.notes,
        **dict.fromkeys(("ours", "se", "difference", "validation", "last")),
        "seeds": 0,
        "state": "",
    }


def _beside(row: Row, ours: float) -> Row:
    """What is measured beside a row's number of the paper."""
    return {"ours": ours, "difference": None if row["paper"] is None else ours - row["paper"]}


def _rows(experiment: Experiment, task: PaperTask, method: PaperMethod, runs: list[Result], refused: str) -> list[Row]:
    """The rows of a method on a task, one per metric."""
    rows = []
    for metric, how in experiment.metrics.items():
        row = _row(experiment, task, method.label, metric, experiment.number(task, method, metric))
        row |= {
            "measured": find_protocol(how).about,
            "seeds": len(runs),
            "state": refused or ("" if runs else NOT_RUN),
        }
        found = [one for run in runs if (one := measure(run, how, method.view)) is not None]
        if found:
            ours = [one.paper for one in found]
            row |= {
                **_beside(row, float(np.mean(ours))),
                "se": float(np.std(ours, ddof=1) / math.sqrt(len(ours))) if len(ours) > 1 else None,
                "validation": float(np.mean([one.validation for one in found])),
                "last": float(np.mean([one.last for one in found])),
                "state": "; ".join(changes(task, method, runs[0])),
            }
        elif runs:
            row["state"] = "the method has no such model"
        rows.append(row)
    return rows


def _improvement(experiment: Experiment, task: PaperTask, rows: Sequence[Row]) -> Iterator[Row]:
    """How much better the paper's method is than the worst of those that it is compared with, in percent of that."""
    label = f"{experiment.paper}_vs_worst_baseline"
    for metric, name in experiment.improvement.items():
        number = find_number(experiment.paper, experiment.table, task.dataset, task.setting, label, name)
        of_metric = [row for row in rows if row["metric"] == metric and row["paper"] is not None]
        best = next(row for row in of_metric if row["method"] == experiment.paper)
        others = [row for row in of_metric if row is not best]
        row = _row(experiment, task, label, name, number)
        row |= {"measured": f"{experiment.paper} relative to the worst baseline, in percent", "state": NOT_RUN}
        if best["ours"] is not None and all(other["ours"] is not None for other in others):
            gain = 100 * (best["ours"] / min(other["ours"] for other in others) - 1)
            row |= {**_beside(row, gain), "seeds": best["seeds"], "state": best["state"]}
        yield row


def changes(task: PaperTask, method: PaperMethod, run: Result) -> list[str]:
    """How a run differs from the paper's, such as "100 of 500 rounds"."""
    done, rounds = run.last()["round"], configuration(task, method, {}).settings.rounds
    return [f"{done} of {rounds} rounds"] * (done != rounds) + _differing(task, method, run.config)


def _differing(task: PaperTask, method: PaperMethod, config: ConfigDict) -> list[str]:
    """The settings in which a configuration differs from the paper's."""
    paper, mine = flat(describe(configuration(task, method, {}))), flat(config)
    skipped = {*INCIDENTAL, "rounds", "data_dir", "dataset.data_dir", "head"}
    differing = [key for key in paper if key not in skipped and key in mine and mine[key] != paper[key]]
    return [f"{key}={_written(mine[key])} (paper {_written(paper[key])})" for key in differing]


def _written(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
