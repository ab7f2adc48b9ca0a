"""Comparing methods: several methods and seeds on one task, and a leaderboard."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from fedloom.config.files import ConfigDict, read_config
from fedloom.config.keywords import from_keywords, takes_settings
from fedloom.config.methods import load_recorded, place_of, split_settings
from fedloom.config.resolve import AlgorithmLike, Config, DatasetLike, combine, describe, resolve
from fedloom.core.algorithm import Algorithm
from fedloom.core.errors import UserError, shown, unknown
from fedloom.core.federation import Federation
from fedloom.engine.budget import expected_computation
from fedloom.engine.simulation import Simulation
from fedloom.metrics.leaderboard import (
    BASELINE,
    MAJORITY,
    MEAN,
    METRICS,
    STATISTICS,
    WITHOUT_MODEL,
    RoundScores,
    RunScores,
    leaderboard,
    unseen_columns,
)
from fedloom.metrics.registry import METRICS as REGISTERED
from fedloom.metrics.registry import column_name, sign
from fedloom.metrics.scores import trend
from fedloom.metrics.summary import over_clients
from fedloom.report.latex import COLUMNS, check_columns, to_latex
from fedloom.report.leaderboard import shown_selection, to_csv, to_markdown
from fedloom.runs.directory import RunDirectory
from fedloom.runs.folders import open_manifest
from fedloom.studies.build import make_data, make_task
from fedloom.studies.callbacks import Callback, checked
from fedloom.studies.client_model import ClientModel
from fedloom.studies.devices import Devices, OnProgress, checked_devices, on_cpu
from fedloom.studies.frames import data_frame
from fedloom.studies.models import When
from fedloom.studies.notebook import device_progress, with_progress
from fedloom.studies.result import Result, load_run
from fedloom.studies.study import Study, parse_seeds, refuse_seed, run_folder

METHODS = (BASELINE, "fedavg", "fedrep", "ditto")
FILE = "compare.yaml"
EQUAL_BUDGET = "equal_budget"  # key of that file: the method whose budget all others get
METHOD_FILES = "method_files"  # key of that file: names and places of methods that are not registered


@dataclass(repr=False)
class Comparison:
    """The result of a comparison. `board` has one row per method, view of the model and selected round."""

    config: ConfigDict
    board: list[dict[str, Any]]
    folder: Path | None = None

    def rows(self, model: str = "pre", selection: str | None = None) -> list[dict[str, Any]]:
        """The leaderboard of one view of the model (pre, post or global), the best mean first; of the round that is
        best on validation data (`selection="validation"`) if there are such data, else of the last round (`"last"`)."""
        selection = selection or shown_selection(self.board)
        return [row for row in self.board if row["model"] == model and row["selection"] == selection]

    def __repr__(self) -> str:
        rows, metric = self.rows(), self.config.get("metric", "accuracy")
        column = f"{column_name(metric)}_mean"
        words = [
            f"{len(self.config['methods'])} methods on {self.config['dataset']['name']}",
            f"seeds {', '.join(map(str, self.config['seeds']))}",
        ]
        if rows and rows[0].get(column) is not None:
            words.append(f"first {rows[0]['method']} with {metric} mean {rows[0][column]:.4g}")
        return f"Comparison({', '.join([*words, *([str(self.folder)] if self.folder else [])])})"

    def to_pandas(self, model: str = "pre", selection: str | None = None) -> Any:
        """The leaderboard as a `pandas.DataFrame`, see `rows`. Needs pandas: `pip install 'fedloom[pandas]'`."""
        return data_frame(self.rows(model, selection))

    def to_latex(self, columns: Sequence[str] = COLUMNS) -> str:
        """The leaderboard as LaTeX, with the columns of these names (see `fedloom.report.latex.to_latex`)."""
        return to_latex(self.board, columns)

    def run(self, method: str | None = None, seed: int | None = None) -> Result:
        """The results of one run: of a method, as the leaderboard names it (by default the one that is ranked first),
        and a seed (by default the first)."""
        if self.folder is None:
            raise UserError("This comparison kept no runs; give it a folder with out=FOLDER.")
        name = (
            method
            if method is not None
            else next(row["method"] for row in self.rows() if row["method"] not in WITHOUT_MODEL)
        )
        if name not in self.config["methods"]:
            raise unknown("method of this comparison", str(name), self.config["methods"])
        number = self.config["seeds"][0] if seed is None else seed
        if number not in self.config["seeds"]:
            raise unknown("seed of this comparison", str(number), [str(s) for s in self.config["seeds"]])
        return load_run(run_folder(self.folder, name, number))

    def model(
        self, client: int | str, method: str | None = None, *, seed: int | None = None, when: When = "best"
    ) -> ClientModel:
        """The model that a client predicts with (see `Result.model`), of one of the runs (see `run`)."""
        return self.run(method, seed).model(client, when)


@takes_settings("seed")
def compare(
    methods: Iterable[AlgorithmLike] | AlgorithmLike = METHODS,
    dataset: DatasetLike = "digits",
    *,
    seeds: int | Sequence[int] = 3,
    out: str | Path | None = None,
    resume: bool = False,
    equal_budget: str | None = None,
    callbacks: Sequence[Callback] = (),
    devices: Devices | None = None,
    **settings: Any,
) -> Comparison:
    """Train and evaluate several methods on one task, and rank them.

    Local (every client trains alone) is always among the methods, because gain and harm are measured against it.

    Args:
        methods: names, names with settings (`"ditto:lam=0.5"`), `Algorithm` classes or instances.
        dataset: a data set's name, a path to your own data, a `Federation` or a `Dataset`.
        seeds: how many, or which.
        out: folder in which everything is kept; without it, nothing is written.
        resume: continue the comparison in `out`.
        equal_budget: a method, such as "fedavg"; all others get as many rounds as it takes them to compute as much as
            it does (see docs/comparisons.md). It is among the methods then.
        callbacks: objects that are called while runs train, see `fedloom.Callback` and docs/callbacks.md.
        devices: devices of this machine among which methods and seeds are divided, such as "0,1" for two GPUs; each
            has a process of its own (see docs/comparisons.md). It needs `out`.
        **settings: the keyword arguments below, and settings of the data set, the partition or the model, by name.

    Returns:
        The leaderboard, and where the runs are.

    >>> import fedloom
    >>> found = fedloom.compare(["fedavg", "fedrep"], seeds=1, rounds=3, clients=5)
    >>> sorted(row["method"] for row in found.rows())
    ['fedavg', 'fedrep', 'local', 'majority']
    """
    refuse_seed(settings, "comparison")
    return carry_out(
        configure_methods(methods, dataset, settings),
        parse_seeds(seeds),
        out=out,
        resume=resume,
        equal_budget=equal_budget,
        callbacks=callbacks if devices is not None else with_progress(callbacks),
        devices=devices,
        on_progress=device_progress(),
    )


def configure_methods(
    methods: Iterable[AlgorithmLike] | AlgorithmLike, dataset: DatasetLike, settings: dict[str, Any]
) -> list[Config]:
    """One configuration per method, from keyword arguments."""
    configs = []
    for method in [methods] if isinstance(methods, str | Algorithm | type) else methods:
        section = parse_method(method) if isinstance(method, str) else {"name": method}
        of_method = {f"algorithm.{key}": value for key, value in section.items() if key != "name"}
        configs.append(from_keywords(section["name"], dataset, {**settings, **of_method}))
    return configs


def configurations(methods: Iterable[str], config: Mapping[str, Any]) -> list[Config]:
    """One configuration per method, from what the command line or a file gives."""
    if "algorithm" in config:
        raise UserError("A comparison has methods instead of an algorithm; name them, such as 'ditto:lam=0.5'.")
    refuse_seed(config, "comparison")
    return [resolve(combine(config, {"algorithm": parse_method(method)})) for method in methods]


def read_comparison(folder: Path) -> tuple[list[str], list[int], ConfigDict]:
    """Methods, seeds and configuration of the comparison in a folder, to continue it."""
    found = stored_config(folder)
    for place in found.pop(METHOD_FILES, []):
        name, _, where = str(place).partition(" ")
        load_recorded(name, where)  # from now on it is registered
    return found.pop("methods"), found.pop("seeds"), found


def stored_config(folder: Path) -> ConfigDict:
    """The configuration of the comparison in a folder, with its methods and seeds."""
    open_manifest(folder, FILE)
    config = read_config(folder / FILE)
    methods, seeds = config.pop("methods", None), config.pop("seeds", None)
    if not isinstance(methods, list) or not isinstance(seeds, list):
        raise UserError(f"{folder} is damaged: compare.yaml does not list methods and seeds.")
    return {"methods": parse_methods(methods), "seeds": parse_seeds(seeds), **config}


def carry_out(
    configs: Sequence[Config],
    seeds: Sequence[int],
    *,
    out: str | Path | None = None,
    resume: bool = False,
    equal_budget: str | None = None,
    columns: Sequence[str] = COLUMNS,
    callbacks: Sequence[Callback] = (),
    devices: Devices | None = None,
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Carry out all runs that are not done yet, method by method with all seeds stacked, and make the leaderboard.
    `columns` are those of its LaTeX table; `on_progress` is called if there are several devices."""
    check_columns(columns)
    names_of_devices = checked_devices(devices, configs, out, checked(callbacks))
    entries = _labelled(configs, equal_budget)
    labels, described, data = list(entries), _describe(entries, seeds), None
    if equal_budget is not None:
        first = next(iter(entries.values()))
        data = make_data(on_cpu(first, names_of_devices) if names_of_devices else first)
        described |= {EQUAL_BUDGET: _reference(entries, equal_budget)}
        entries = with_equal_budgets(entries, described[EQUAL_BUDGET], data)
    study = Study(
        file=FILE,
        read=stored_config,
        config=described,
        data=data,
        names=[label for label in labels for _ in seeds],
        runs=[config.with_seed(seed) for config in entries.values() for seed in seeds],
        groups=[range(k * len(seeds), (k + 1) * len(seeds)) for k in range(len(labels))],
        devices=names_of_devices,
    )

    with study.opened(out, resume) as (folder, data):
        results = (
            (study.names[place], study.runs[place].settings.seed, result)
            for place, result in study.execute(folder, data, callbacks, on_progress)
        )
        found = Comparison(study.config, _board(results, study.config), folder)
        if folder is not None:
            tables = {"csv": to_csv(found.board), "md": to_markdown(found.board), "tex": found.to_latex(columns)}
            study.write(folder, {f"leaderboard.{name}": text for name, text in tables.items()})
    return found


def load_comparison(folder: Path) -> Comparison:
    """The comparison in a folder, which must be finished."""
    config = stored_config(folder)
    results = (
        (name, seed, load_run(run_folder(folder, name, seed)))
        for name in config["methods"]
        for seed in config["seeds"]
        if _finished(folder, name, seed)
    )
    return Comparison(config, _board(results, config), folder)


def _board(results: Iterable[tuple[str, int, Result]], config: ConfigDict) -> list[dict[str, Any]]:
    """The leaderboard of runs, given as label, seed and result, with a baseline that predicts without a model."""
    runs: list[RunScores] = []
    for name, seed, result in results:
        runs.append(score(name, seed, result))
        if name == BASELINE and (baseline := without_model(runs[-1], result)) is not None:
            runs.append(baseline)
    return leaderboard(runs, config.get("metric", "accuracy"), config.get(EQUAL_BUDGET))


def _finished(folder: Path, name: str, seed: int) -> bool:
    if not RunDirectory(run_folder(folder, name, seed)).finished:
        raise UserError(f"{folder} is not finished; continue the comparison with --resume {folder}.")
    return True


def _labelled(configs: Sequence[Config], equal_budget: str | None) -> dict[str, Config]:
    """Configurations by label, with Local first and the method whose budget all have, if they are not among them."""
    if not configs:
        raise UserError("A comparison needs at least one method.")
    entries: dict[str, Config] = {}
    known = {label(config.algorithm) for config in configs}
    for method in filter(None, (BASELINE, equal_budget)):
        if method not in known and (name := label(algorithm := _algorithm(method))) not in {*known, *entries}:
            entries[name] = dataclasses.replace(configs[0], algorithm=algorithm)
    for config in configs:
        name = label(config.algorithm)
        if name in entries:
            raise UserError(f"'{name}' is asked for twice; give each method once, or with different settings.")
        entries[name] = config
    return same_division(entries)


def _algorithm(method: str) -> Algorithm:
    return resolve({"algorithm": parse_method(method)}).algorithm


def _reference(entries: Mapping[str, Config], method: str) -> str:
    """The label of the method whose budget all others get."""
    return method if method in entries else label(_algorithm(method))


def with_equal_budgets(entries: Mapping[str, Config], reference: str, data: Federation) -> dict[str, Config]:
    """The configurations with so many rounds that a client computes about as much with every method as with the one
    that is named. What counts are samples of which gradients are taken, see `fedloom.engine.budget`."""
    costs = {}
    for name, config in entries.items():
        simulation = Simulation(config.algorithm, make_task(config, data), seed=0, screening=False)
        costs[name] = expected_computation(simulation.alg, simulation.task, simulation.first_cohort()).samples
        if not costs[name]:
            raise UserError(f"{name} takes no gradients at the clients, so it cannot have the budget of {reference}.")
    budget = entries[reference].settings.rounds * costs[reference]
    found = {}
    for name, config in entries.items():
        rounds = max(1, round(budget / costs[name]))
        found[name] = dataclasses.replace(config, settings=dataclasses.replace(config.settings, rounds=rounds))
    return found


def same_division(entries: dict[str, Config]) -> dict[str, Config]:
    """All methods on the same division of the data: if one needs samples at the server, the others have them, too."""
    shares = {config.settings.server_share for config in entries.values()}
    if len(shares) != 2 or 0.0 not in shares:
        return entries
    share = max(shares)
    return {
        name: dataclasses.replace(config, settings=dataclasses.replace(config.settings, server_share=share))
        for name, config in entries.items()
    }


def _describe(entries: Mapping[str, Config], seeds: Sequence[int]) -> ConfigDict:
    """The settings that all methods have in common, and under `per_method` those in which a method differs."""
    each = {
        name: {k: v for k, v in describe(c).items() if k not in ("algorithm", "seed")} for name, c in entries.items()
    }
    common = next(iter(each.values()))
    special = {
        parse_method(name)["name"]: {k: v for k, v in config.items() if v != common[k]} for name, config in each.items()
    }
    special = {method: values for method, values in special.items() if values}
    methods = {type(config.algorithm) for config in entries.values()}
    places = sorted(f"{cls.name} {place}" for cls in methods if (place := place_of(cls)) is not None)
    more: ConfigDict = {METHOD_FILES: places} if places else {}
    more |= {"per_method": special} if special else {}
    return {"methods": list(entries), "seeds": list(seeds), **common, **more}


def label(algorithm: Algorithm) -> str:
    """A method with those of its settings that are not the defaults, as written on the command line."""
    changed = [
        f"{f.name}={_written(getattr(algorithm, f.name))}"
        for f in dataclasses.fields(algorithm)
        if getattr(algorithm, f.name) != f.default
    ]
    return algorithm.name + (":" + ",".join(changed) if changed else "")


def _written(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def parse_methods(methods: Any) -> list[str]:
    """The methods that a file lists: one name, or a list."""
    found = [methods] if isinstance(methods, str) else methods
    if not isinstance(found, list) or not found or not all(isinstance(method, str) for method in found):
        raise UserError(f"methods must be a list of names such as [fedavg, 'ditto:lam=0.5'], not '{shown(methods)}'.")
    return found


def parse_method(text: str) -> dict[str, Any]:
    """`ditto:lam=0.5,personal_epochs=2` or `./my_method.py:lam=0.5` as the section `algorithm` of a config dict."""
    name, rest = split_settings(text.strip())
    section: dict[str, Any] = {"name": name.strip()}
    for item in rest.split(",") if rest is not None else ():
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UserError(
                f"A method with settings is written 'ditto:lam=0.5,personal_epochs=2', not '{shown(text)}'."
            )
        if key.strip() in section:
            raise UserError(f"'{text}' gives '{key.strip()}' twice.")
        section[key.strip()] = value.strip()
    return section


def score(label: str, seed: int, result: Result) -> RunScores:
    """What the leaderboard needs of a run."""
    views = {}
    for view in result.views():
        picks = {"last": result.last()}
        if f"{view}_val_{column_name(result.metric)}_mean" in result.last():
            picks = {"validation": result.best_on_validation(view), **picks}
        views[view] = {name: _chosen(result, view, row) for name, row in picks.items()}
    at = [row["round"] for row in result.rounds]
    mean = f"{column_name(result.metric)}_mean"
    trends = {view: trend(at, [row.get(f"{view}_{mean}", math.nan) for row in result.rounds]) for view in views}
    down, up = (float(np.mean([row[name] for row in result.rounds])) for name in ("bytes_down", "bytes_up"))
    train = float(np.median([row["train_seconds"] for row in result.timings]))
    evaluation = float(np.median([row["eval_seconds"] for row in result.timings if row["round"] in set(at)]))
    computed = result.computed(per_round=True), result.computed()
    return RunScores(
        label, seed, views, trends, down, up, train, evaluation, result.last()["round"], *computed, result.epsilon
    )


def _chosen(result: Result, view: str, row: Mapping[str, Any]) -> RoundScores:
    clients, column = result.clients.filter(pc.field("round") == row["round"]), column_name(result.metric)
    ids, values = clients["client"].to_numpy(), clients[f"{view}_{column}"].to_numpy()  # NaN for those who are held out
    metrics = {m: row[f"{view}_{m}"] for m in METRICS} if result.basic_metric == "accuracy" else {}
    if column != "acc":
        metrics |= {f"{column}_{s}": row.get(f"{view}_{column}_{s}", math.nan) for s in STATISTICS}
    others, sizes = _further(result, row["round"], ids) if view == "pre" else ({}, None)
    unseen = {name: row[name] for name in unseen_columns(result.metric) if name in row}
    return RoundScores(row["round"], metrics, ids, values, others, sizes, unseen)


def _further(result: Result, t: int, ids: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Further metrics of clients after round t, and their numbers of samples, if they were kept."""
    found = None if result.metrics is None else result.metrics.filter(pc.field("round") == t)
    if found is None or not len(found):
        return {}, None
    at = np.searchsorted(ids, found["client"].to_numpy())

    def column(name: str) -> np.ndarray:
        values = np.full(len(ids), np.nan)
        values[at] = found[name].to_numpy()
        return values

    known = [name for name in dict.fromkeys(m.name for m in REGISTERED) if name in found.column_names]
    return {name: column(name) for name in known if name not in ("accuracy", result.metric)}, column("samples")


def without_model(run: RunScores, result: Result) -> RunScores | None:
    """The baseline that always predicts the most frequent class of a client's training samples, or the mean of their
    targets, in the place of the personal models of a run on the same task."""
    chosen = run.views["pre"]
    ids = next(iter(chosen.values())).clients
    others, sizes = _further(result, 0, ids)
    if sizes is None or result.metrics is None:
        return None
    table = result.metrics.filter(pc.field("round") == 0)
    at = np.searchsorted(ids, table["client"].to_numpy())
    values: dict[str, np.ndarray] = {}
    for name in {result.basic_metric, result.metric}:
        values[name] = np.full(len(ids), np.nan)
        values[name][at] = table[name].to_numpy()
    metrics: dict[str, float] = {}
    if result.basic_metric == "accuracy":
        over = over_clients(values["accuracy"], sizes)
        metrics = {f"acc_{s}": v for s, v in over.items() if s in ("mean", "weighted", "low5", "top5", "worst")}
        metrics["client_acc_std"] = over["std"]
        metrics["client_acc_cv_x1e-2"] = 100 * over["std"] / (over["weighted"] or math.nan)
    if result.metric != "accuracy":
        found = over_clients(values[result.metric], sizes, sign(result.metric) > 0)
        metrics |= {f"{result.metric}_{s}": found.get(s, math.nan) for s in STATISTICS}
    score = RoundScores(0, metrics, ids, values[result.metric], others, sizes)
    name = MAJORITY if result.basic_metric == "accuracy" else MEAN
    return RunScores(name, run.seed, {"pre": dict.fromkeys(chosen, score)}, {}, 0.0, 0.0, 0.0, 0.0)
