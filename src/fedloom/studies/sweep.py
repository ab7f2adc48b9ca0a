"""Sweeping settings: one method with all combinations of some settings, ranked on validation data."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.config.files import SECTIONS, ConfigDict, read_config
from fedloom.config.keywords import from_keywords, takes_settings
from fedloom.config.methods import CHECKSUM, place_of
from fedloom.config.resolve import (
    NOT_SETTINGS,
    AlgorithmLike,
    Config,
    DatasetLike,
    combine,
    describe,
    flat,
    resolve,
)
from fedloom.core.errors import UserError, shown
from fedloom.core.federation import Federation
from fedloom.metrics.leaderboard import over_seeds
from fedloom.metrics.registry import column_name, sign
from fedloom.report.leaderboard import to_csv
from fedloom.report.sweep import columns, to_markdown
from fedloom.runs.directory import RunDirectory
from fedloom.runs.folders import open_manifest
from fedloom.studies.build import eval_client_ids
from fedloom.studies.callbacks import Callback, checked
from fedloom.studies.devices import Devices, OnProgress, checked_devices
from fedloom.studies.frames import data_frame
from fedloom.studies.notebook import device_progress, with_progress
from fedloom.studies.result import Result, load_run
from fedloom.studies.study import Study, check_size, parse_seeds, refuse_seed, run_folder, stackable_groups

# settings that define the task, so their values cannot be ranked
TASK = ("clients", "partition_seed", "split", "pool", "subset", "server_share", "holdout_clients", "eval_clients")
NAMED = ("partition", "model", "data_dir")  # options of the command line that --set does not know
FILE = "sweep.yaml"
Grid = Mapping[str, Iterable[Any]]
Combination = dict[str, Any]


@dataclass(repr=False)
class Sweep:
    """The result of a sweep. `table` has one row per combination, the best on validation data first."""

    config: ConfigDict
    table: list[dict[str, Any]]
    command: str | None = None  # that runs the best combination
    folder: Path | None = None

    def __repr__(self) -> str:
        metric, best = self.config.get("metric", "accuracy"), self.best()
        method, data = (self.config[section]["name"] for section in ("algorithm", "dataset"))
        searched = [str(item).partition("=")[0] for item in self.config["grid"]]
        found = ", ".join(f"{key}={best[key]}" for key in searched if key in best)
        score = best.get(f"val_{column_name(metric)}_mean", math.nan)
        words = [f"{method} on {data}", f"{len(self.table)} combinations", f"best {found} with {metric} {score:.4g}"]
        return f"Sweep({', '.join(words)} on validation data{f', {self.folder}' if self.folder else ''})"

    def best(self) -> dict[str, Any]:
        """The best combination, with its scores."""
        return self.table[0]

    def to_pandas(self) -> Any:
        """The table as a `pandas.DataFrame`. Needs pandas: `pip install 'fedloom[pandas]'`."""
        return data_frame(self.table)


@takes_settings("seed")
def sweep(
    algorithm: AlgorithmLike = "ditto",
    dataset: DatasetLike = "digits",
    *,
    grid: Grid,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    devices: Devices | None = None,
    **settings: Any,
) -> Sweep:
    """Train and evaluate one method with all combinations of some settings, and rank them on validation data.

    Args:
        algorithm: the method, a name, an `Algorithm` class or instance.
        dataset: a data set's name, a path to your own data, a `Federation`, a `Dataset`, or data in Python: a data
            frame, a torch or Hugging Face data set, or a dictionary of them by client.
        grid: a list of values for every setting that is searched, such as `{"lr": [0.01, 0.1]}`.
        seeds: how many, or which.
        out: folder in which everything is kept; without it, nothing is written.
        resume: continue the sweep in `out`.
        callbacks: objects that are called while runs train, see `fedloom.Callback` and docs/callbacks.md.
        devices: devices of this machine among which the runs are divided, such as "0,1" for two GPUs; each has a
            process of its own (see docs/comparisons.md). It needs `out`.
        **settings: the keyword arguments below, and settings of the method, the data set, the partition or the model,
            by name.

    Returns:
        The table of combinations, the best first.

    >>> import fedloom
    >>> found = fedloom.sweep("fedprox", grid={"lr": [0.01, 0.1], "mu": [0.001, 0.1]}, rounds=2, clients=5)
    >>> len(found.table), found.best()["lr"]
    (4, 0.1)
    """
    searched = _checked({key.replace("__", "."): list(found) for key, found in _pairs(grid)})
    refuse_seed(settings, "sweep")
    if twice := sorted({key.replace("__", ".") for key in settings} & searched.keys()):
        raise UserError(f"'{twice[0]}' is given twice, as a setting and in the grid.")

    def make(combination: Combination) -> Config:
        return from_keywords(algorithm, dataset, {**settings, **combination})

    return carry_out(
        make,
        searched,
        parse_seeds(seeds),
        out=out,
        resume=resume,
        callbacks=callbacks if devices is not None else with_progress(callbacks),
        devices=devices,
        on_progress=device_progress(),
    )


def _pairs(grid: Any) -> Iterable[tuple[str, Iterable[Any]]]:
    for key, found in dict(grid).items():
        if isinstance(found, str) or not isinstance(found, Iterable):
            raise UserError(f"grid has a list of values for '{key}', such as [0.01, 0.1], not '{shown(found)}'.")
        yield key, found


def parse_grid(items: Any) -> dict[str, list[str]]:
    """The grid of one or several options `--grid lr=0.005,0.01`."""
    found: dict[str, list[str]] = {}
    for item in [items] if isinstance(items, str) else items or []:
        key, _, rest = str(item).partition("=")
        given = [value.strip() for value in rest.split(",")]
        if not key.strip() or not all(given):
            raise UserError(f"A grid is written lr=0.005,0.01,0.05, not '{shown(item)}'.")
        if key.strip() in found:
            raise UserError(f"The grid has '{key.strip()}' twice; give all its values at once.")
        found[key.strip()] = given
    return _checked(found)


def _checked(grid: dict[str, list[Any]]) -> dict[str, list[Any]]:
    if not grid:
        raise UserError("A sweep needs a grid of settings, such as lr=0.005,0.01,0.05.")
    for key, values in grid.items():
        section, _, bare = key.rpartition(".")
        refuse_seed([key], "sweep")
        if key in (*SECTIONS, *NOT_SETTINGS, "per_method"):
            raise UserError(f"A sweep searches settings, and '{key}' is none; make a sweep for each of its values.")
        if bare in TASK or section in ("dataset", "partition"):
            raise UserError(f"'{key}' changes the task, so its values cannot be ranked; make a sweep for each of them.")
        if not values:
            raise UserError(f"The grid has no values for '{key}'.")
    return grid


def configurations(config: Mapping[str, Any]) -> Callable[[Combination], Config]:
    """A function that makes the configuration of a combination, from what the command line or a file gives."""
    refuse_seed(config, "sweep")

    def make(combination: Combination) -> Config:
        return resolve(combine(config, combination))

    return make


def read_sweep(folder: Path) -> tuple[dict[str, list[str]], list[int], ConfigDict]:
    """Grid, seeds and configuration of the sweep in a folder."""
    config = _stored(folder)
    grid, seeds = config.pop("grid", None), config.pop("seeds", None)
    if not isinstance(grid, list) or not isinstance(seeds, list):
        raise UserError(f"{folder} is damaged: sweep.yaml does not list grid and seeds.")
    return parse_grid(grid), parse_seeds(seeds), config


def _stored(folder: Path) -> ConfigDict:
    open_manifest(folder, FILE)
    return read_config(folder / FILE)


def carry_out(
    make: Callable[[Combination], Config],
    grid: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    *,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    devices: Devices | None = None,
    on_progress: OnProgress | None = None,
) -> Sweep:
    """Carry out all runs that are not done yet, as many as possible stacked, and make the table. `on_progress` is
    called if there are several devices."""
    called = checked(callbacks)
    check_size(math.prod(map(len, grid.values())) * len(seeds))
    _check_values(make, grid)
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    configs = [make(combination) for combination in combinations]
    names = [",".join(f"{key}={value}" for key, value in combination.items()) for combination in combinations]
    runs = [config.with_seed(seed) for config in configs for seed in seeds]
    study = Study(
        file=FILE,
        read=_stored,
        config=_describe(configs[0], grid, seeds),
        names=[name for name in names for _ in seeds],
        runs=runs,
        groups=stackable_groups(runs),
        check_data=lambda data: _check_validation(configs[0], data),
        devices=checked_devices(devices, configs, out, called),
    )

    with study.opened(out, resume) as (folder, data):
        scores = {place: _score(result) for place, result in study.execute(folder, data, called, on_progress)}
        metric = study.config["metric"]
        table, order = _ranked(combinations, scores, len(seeds), metric)
        best = order[0] * len(seeds)
        command = _command(runs[best], study.path(folder, best))
        found = Sweep(study.config, table, command, folder)
        if folder is not None:
            texts = {"sweep.csv": to_csv(found.table), "sweep.md": to_markdown(found.table, list(grid), metric)}
            study.write(folder, texts)
    return found


def load_sweep(folder: Path) -> Sweep:
    """The sweep in a folder, which must be finished."""
    grid, seeds, config = read_sweep(folder)
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    scores: dict[int, dict[str, float]] = {}
    for place, combination in enumerate(combinations):
        name = ",".join(f"{key}={value}" for key, value in combination.items())
        for number, seed in enumerate(seeds):
            path = run_folder(folder, name, seed)
            if not RunDirectory(path).finished:
                raise UserError(f"{folder} is not finished; continue the sweep with --resume {folder}.")
            result = load_run(path)
            scores[place * len(seeds) + number] = _score(result)
        combinations[place] = {key: _value(key, text, result.config) for key, text in combination.items()}
    table, order = _ranked(combinations, scores, len(seeds), config.get("metric", "accuracy"))
    best = next(itertools.islice(itertools.product(*grid.values()), order[0], None))
    name = ",".join(f"{key}={value}" for key, value in zip(grid, best, strict=True))
    command = _command_of_folder(config, run_folder(folder, name, seeds[0]))
    return Sweep(_stored(folder), table, command, folder)


def _value(key: str, text: str, config: ConfigDict) -> Any:
    """The value of a setting in the configuration of a run, as which its text in the grid was read."""
    known = flat(config)
    return next((known[k] for k in (key, *(f"{section}.{key}" for section in SECTIONS)) if k in known), text)


def _ranked(
    combinations: Sequence[Combination], scores: Mapping[int, dict[str, float]], seeds: int, metric: str
) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows of the table, the best first, and the places of their combinations."""
    table = [
        {**combination, **_row([scores[i] for i in range(place * seeds, (place + 1) * seeds)])}
        for place, combination in enumerate(combinations)
    ]
    column, direction = f"val_{column_name(metric)}_mean", sign(metric)
    order = sorted(range(len(table)), key=lambda i: (-direction * table[i][column], table[i]["val_loss"]))
    return [table[place] for place in order], order


def _check_validation(config: Config, data: Federation) -> None:
    eval_ids = eval_client_ids(config.settings, data)
    if not data.splits["val"].sizes[: data.clients][slice(None) if eval_ids is None else eval_ids].sum():
        raise UserError(
            "A sweep selects on validation data, but no client that is evaluated has any; set split=0.7/0.1/0.2."
        )


def _check_values(make: Callable[[Combination], Config], grid: Mapping[str, Sequence[Any]]) -> None:
    """Refuse two values of a setting that mean the same, however they are written."""
    for key, values in grid.items():
        rest = {other: found[0] for other, found in grid.items() if other != key}
        known = set()
        for value in values:
            meant = repr(describe(make({**rest, key: value})))
            if meant in known:
                raise UserError(f"The grid has {key}={shown(value)} twice.")
            known.add(meant)


def _describe(config: Config, grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> ConfigDict:
    """The configuration of the first combination, with the grid and the seeds."""
    first = {key: value for key, value in describe(config).items() if key != "seed"}
    return {"grid": [f"{k}={','.join(map(str, v))}" for k, v in grid.items()], "seeds": list(seeds), **first}


def _score(result: Result) -> dict[str, float]:
    """Scores of the personal models, in the round that is best on validation data."""
    row = result.best_on_validation()
    seconds = [t["train_seconds"] for t in result.timings]
    loss = row["pre_val_loss"]
    return {
        **{name: row.get(f"pre_{name}", math.nan) for name in columns(result.metric)},
        "val_loss": loss if math.isfinite(loss) else math.inf,
        "round": float(row["round"]),
        "train_seconds": sum(seconds) / len(seconds),
    }


def _row(scores: Sequence[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"seeds": len(scores)}
    for metric in (name for name in scores[0] if name.endswith(("_mean", "_low5", "_worst"))):
        row |= over_seeds(metric, [one[metric] for one in scores])
    for name in ("val_loss", "round", "train_seconds"):
        row[name] = sum(one[name] for one in scores) / len(scores)
    return row


def _command(config: Config, folder: Path | None) -> str | None:
    """The command that runs this configuration; None if it has Python objects."""
    asked = describe(config)
    if folder is not None:
        return _command_of_folder(asked, folder)
    if any(asked[section].get("own") is True for section in SECTIONS):
        return None
    method, data = asked["algorithm"]["name"], asked["dataset"]
    default = flat(describe(resolve({"algorithm": method, "dataset": data})))
    words = ["--dataset", data.get("path") or data["name"]]
    for key, value in flat(asked).items():
        if key.startswith("dataset."):
            words += [] if key == "dataset.path" else ["--set", f"{key}={_written(value)}"]
        elif value != default.get(key):
            words += [f"--{key.replace('_', '-')}", value] if key in NAMED else ["--set", f"{key}={_written(value)}"]
    place = place_of(type(config.algorithm))  # of a method that is not known by its name
    return shlex.join(["fedloom", "run", method if place is None else place.partition(CHECKSUM)[0], *words])


def _command_of_folder(config: ConfigDict, folder: Path) -> str | None:
    """The command that repeats the run in a folder; None if it has Python objects."""
    if any(config[section].get("own") is True for section in SECTIONS):
        return None
    return shlex.join(["fedloom", "run", "--config", str(folder / "config.yaml")])


def _written(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)
