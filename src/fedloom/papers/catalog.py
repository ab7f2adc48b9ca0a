"""The papers' experiments, from the YAML files of this folder.

An experiment is a table: its rows are methods, its columns are tasks (a data set, its partition, a model, training
settings), and each cell has one or several metrics.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from fedloom.core.errors import UserError, nearest, shown
from fedloom.papers.numbers import Number, find_number, tokens

FILES = ("plgu", "gpfl", "page", "pfedkt")
ConfigDict = dict[str, Any]


@dataclass(frozen=True)
class PaperTask:
    """A column of a table."""

    name: str
    settings: tuple[ConfigDict, ...]  # of the file, the experiment and the task; later ones take precedence
    dataset: str  # as the paper's numbers call it
    setting: frozenset[str]


@dataclass(frozen=True)
class PaperMethod:
    """A row of a table."""

    label: str
    method: str  # with settings, as on the command line
    view: str | None  # which model is evaluated; None: as the paper does
    algorithm: str | None  # as the paper's numbers call it; None if it has none
    setting: frozenset[str]


@dataclass(frozen=True)
class Experiment:
    """A table, a sweep or an ablation of a paper."""

    id: str
    about: str
    paper: str
    table: str
    metrics: Mapping[str, str]  # the paper's metric, and how it is measured (`studies.protocols`, `.cost_metrics`)
    tasks: tuple[PaperTask, ...]
    methods: tuple[PaperMethod, ...]
    improvement: Mapping[str, str]  # a metric, and that of the paper's method relative to the worst baseline
    costs: bool  # nothing is trained: what methods cost is counted, or timed
    commands: tuple[str, ...]  # that make it, if it is no table: a figure, or an attack

    def number(self, task: PaperTask, method: PaperMethod, metric: str) -> Number | None:
        """What the paper has in a cell."""
        if method.algorithm is None:
            return None
        setting = task.setting | method.setting
        return find_number(self.paper, self.table, task.dataset, setting, method.algorithm, metric)


@functools.cache
def experiments() -> dict[str, Experiment]:
    """All experiments, by id."""
    found: dict[str, Experiment] = {}
    for file in FILES:
        text = (resources.files("fedloom.papers") / f"{file}.yaml").read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        common = content.pop("common", {})
        found |= {id_: _experiment(id_, entry, common) for id_, entry in content.items()}
    return found


def find_experiment(id_: str) -> Experiment:
    """The experiment of an id, whatever its case. Raises a UserError for an unknown one."""
    known = {name.lower(): experiment for name, experiment in experiments().items()}
    if id_.lower() not in known:
        hint = nearest(id_, list(known))
        hint = "'fedloom reproduce' lists all of them." if hint.startswith("known") else hint
        raise UserError(f"Unknown experiment '{shown(id_)}'; {hint}")
    return known[id_.lower()]


def runnable(id_: str) -> Experiment:
    """The experiment of an id. Raises a UserError for one that is no table, with the commands that make it."""
    experiment = find_experiment(id_)
    if experiment.commands:
        made = " and then ".join(f"'{command}'" for command in experiment.commands)
        raise UserError(f"{experiment.id} is no table of trained models; it is made by {made}.")
    return experiment


def _experiment(id_: str, entry: ConfigDict, common: ConfigDict) -> Experiment:
    metrics: dict[str, str] = {}
    for item in entry.get("metrics", []):
        metrics |= item if isinstance(item, dict) else {item: item}
    shared = common, entry.get("settings", {})
    return Experiment(
        id_,
        entry["about"],
        entry.get("paper", ""),
        entry.get("table", ""),
        metrics,
        tuple(_task(name, task, shared) for name, task in entry.get("tasks", {}).items()),
        tuple(_method(label, method) for label, method in entry.get("methods", {}).items()),
        entry.get("improvement", {}),
        entry.get("kind") == "costs",
        tuple(entry.get("commands", ())),
    )


def _task(name: str, task: ConfigDict, shared: tuple[ConfigDict, ...]) -> PaperTask:
    dataset, _, setting = task.get("paper", "").partition(";")
    return PaperTask(name, (*shared, task["settings"]), dataset.strip(), tokens(setting))


def _method(label: str, entry: str | ConfigDict) -> PaperMethod:
    if isinstance(entry, str):
        return PaperMethod(label, entry, None, label, frozenset())
    algorithm, _, setting = entry.get("paper", "").partition(";")
    return PaperMethod(label, entry["method"], entry.get("view"), algorithm.strip() or None, tokens(setting))
