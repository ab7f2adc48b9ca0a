"""A grid of settings for one method: every combination is run, and validation data say which is best."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.comparison import file_name, parse_seeds
from fedloom.config import (
    SECTIONS,
    Config,
    Request,
    combine,
    configure,
    describe,
    difference,
    flat,
    read_request,
    resolve,
    to_yaml,
)
from fedloom.core.contract import Algorithm
from fedloom.core.errors import UserError, told
from fedloom.core.federation import Federation
from fedloom.core.files import write_text
from fedloom.data.partitions import Partition
from fedloom.data.pool import Dataset
from fedloom.experiment import OnRound, Result, alike, evaluated, execute_together, make_data, make_task
from fedloom.metrics.leaderboard import over_seeds
from fedloom.models.zoo import Model
from fedloom.report.leaderboard import to_csv
from fedloom.report.sweep import to_markdown
from fedloom.runs.directory import alone, check_empty, check_kind, check_same, unused

# settings of a run that say who has which samples, and who is asked
TASK = ("clients", "partition_seed", "split", "pool", "subset", "server_share", "holdout_clients", "eval_clients")
METRICS = ("val_acc_mean", "acc_mean", "acc_low5", "acc_worst")
NAMED = ("partition", "model", "data_dir")  # options of the command line that --set does not know
OnGroup = Callable[[str, int, int, int], OnRound | None]  # method, runs in this group, groups done, groups in all
Grid = Mapping[str, Iterable[Any]]
Combination = dict[str, Any]


@dataclass
class Sweep:
    """`table` has a row per combination, the best on validation data first."""

    config: Request
    table: list[dict[str, Any]]
    command: str | None = None  # what runs the best one
    folder: Path | None = None

    def best(self) -> dict[str, Any]:
        return self.table[0]


def sweep(
    algorithm: str | Algorithm | type[Algorithm] = "ditto",
    dataset: str | Path | Dataset | Federation = "digits",
    *,
    grid: Grid,
    seeds: int | Sequence[int] = 1,
    partition: str | Partition | None = None,
    model: str | Model | nn.Module | Callable[[], nn.Module] | None = None,
    head: str = "head",
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_group: OnGroup | None = None,
    **values: Any,
) -> Sweep:
    """Train and evaluate one method with all combinations of some settings, and rank them on validation data.

    `grid` has a list of values for every setting that is searched; the rest is as for `fedloom.run`.

    >>> import fedloom
    >>> found = fedloom.sweep("fedprox", grid={"lr": [0.01, 0.1], "mu": [0.001, 0.1]}, rounds=2, clients=5)
    >>> len(found.table), found.best()["lr"]
    (4, 0.1)
    """
    values = {key.replace("__", "."): value for key, value in values.items()}
    wanted = _checked({key.replace("__", "."): list(found) for key, found in _pairs(grid)})
    _check_request(values)
    if twice := sorted(values.keys() & wanted.keys()):
        raise UserError(f"'{twice[0]}' is given twice, as a setting and in the grid.")

    def make(combination: Combination) -> Config:
        return configure(algorithm, dataset, partition, model, head, data_dir, {**values, **combination})

    return carry_out(make, wanted, parse_seeds(seeds), out=out, resume=resume, on_group=on_group)


def _pairs(grid: Any) -> Iterable[tuple[str, Iterable[Any]]]:
    for key, found in dict(grid).items():
        if isinstance(found, str) or not isinstance(found, Iterable):
            raise UserError(f"grid has a list of values for '{key}', such as [0.01, 0.1], not '{found}'.")
        yield key, found


def parse_grid(items: Any) -> dict[str, list[str]]:
    """What `--grid lr=0.005,0.01` gives, once or several times."""
    found: dict[str, list[str]] = {}
    for item in [items] if isinstance(items, str) else items or []:
        key, _, rest = str(item).partition("=")
        given = [value.strip() for value in rest.split(",")]
        if not key.strip() or not all(given):
            raise UserError(f"A grid is written lr=0.005,0.01,0.05, not '{item}'.")
        if key.strip() in found:
            raise UserError(f"The grid has '{key.strip()}' twice; give all its values at once.")
        found[key.strip()] = given
    return _checked(found)


def _checked(grid: dict[str, list[Any]]) -> dict[str, list[Any]]:
    if not grid:
        raise UserError("A sweep needs a grid of settings, such as lr=0.005,0.01,0.05.")
    for key, values in grid.items():
        section, _, bare = key.rpartition(".")
        _check_request([key])
        if key in SECTIONS:
            raise UserError(f"A sweep searches settings, and '{key}' is none; make a sweep for each {key}.")
        if bare in TASK or section in ("dataset", "partition"):
            raise UserError(f"'{key}' changes the task, so its values cannot be ranked; make a sweep for each of them.")
        if not values:
            raise UserError(f"The grid has no values for '{key}'.")
    return grid


def configurations(request: Mapping[str, Any]) -> Callable[[Combination], Config]:
    """What is asked for on the command line or in a file: a configuration for every combination."""
    _check_request(request)

    def make(combination: Combination) -> Config:
        return resolve(combine(request, combination))

    return make


def _check_request(request: Iterable[str]) -> None:
    if "seed" in request:
        raise UserError("A sweep has seeds instead of a seed; say how many (3) or which (4,7,9).")


def read_sweep(folder: Path) -> tuple[dict[str, list[str]], list[int], Request]:
    """Grid, seeds and request of the sweep in a folder."""
    check_kind(folder, "sweep.yaml")
    request = read_request(folder / "sweep.yaml")
    grid, seeds = request.pop("grid", None), request.pop("seeds", None)
    if not isinstance(grid, list) or not isinstance(seeds, list):
        raise UserError(f"{folder} is damaged: sweep.yaml does not list grid and seeds.")
    return parse_grid(grid), parse_seeds(seeds), request


def carry_out(
    make: Callable[[Combination], Config],
    grid: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    *,
    out: str | Path | None = None,
    resume: bool = False,
    on_group: OnGroup | None = None,
) -> Sweep:
    """All runs that are not done yet, as few at a time as can be one run, and the table."""
    _check_values(make, grid)
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    configs = [make(combination) for combination in combinations]
    described = _describe(configs[0], grid, seeds)
    folder = None if out is None else Path(out)
    if folder is None and resume:
        raise UserError("resume needs out, the folder of the sweep.")
    if folder is not None:
        _check(folder, described, resume)
    data = make_data(configs[0])
    asked = evaluated(configs[0].settings, data)
    if not data.splits["val"].sizes[: data.clients][slice(None) if asked is None else asked].sum():
        raise UserError(
            "A sweep selects on validation data, but no client that is evaluated has any; set split=0.7/0.1/0.2."
        )
    for config in configs:  # every mistake shows before anything is trained
        make_task(config, data)
    if folder is not None:
        with told(folder):
            folder.mkdir(parents=True, exist_ok=True)
    with alone(folder) if folder is not None else nullcontext():
        if folder is not None:
            _check(folder, described, resume)
            write_text(folder / "sweep.yaml", to_yaml(described))
        names = [",".join(f"{key}={value}" for key, value in combination.items()) for combination in combinations]
        runs = [(place, config.with_seed(seed)) for place, config in enumerate(configs) for seed in seeds]
        places = [
            None if folder is None else folder / "runs" / file_name(names[place]) / f"seed-{config.settings.seed}"
            for place, config in runs
        ]
        scores: dict[int, dict[str, float]] = {}
        together = alike([config for _, config in runs])
        for count, group in enumerate(together):
            name = configs[0].algorithm.name
            on_round = on_group(name, len(group), count, len(together)) if on_group is not None else None
            mine, where = [runs[i][1] for i in group], [places[i] for i in group]
            done = execute_together(mine, out=where, resume=folder is not None, on_round=on_round, data=data)
            scores |= {i: _score(result) for i, result in zip(group, done, strict=True)}
        table = []
        for place, combination in enumerate(combinations):
            table.append({**combination, **_row([scores[i] for i, (of, _) in enumerate(runs) if of == place])})
        order = sorted(range(len(table)), key=lambda place: (-table[place]["val_acc_mean"], table[place]["val_loss"]))
        best = order[0] * len(seeds)
        command = _command(runs[best][1], places[best])
        found = Sweep(described, [table[place] for place in order], command, folder)
        if folder is not None:
            write_text(folder / "sweep.csv", to_csv(found.table))
            write_text(folder / "sweep.md", to_markdown(found.table, list(grid)))
    return found


def _check(folder: Path, described: Request, resume: bool) -> None:
    if not resume:
        check_empty(folder)
        return
    if unused(folder):
        return
    check_kind(folder, "sweep.yaml")
    check_same(read_request(folder / "sweep.yaml"), described, folder)


def _check_values(make: Callable[[Combination], Config], grid: Mapping[str, Sequence[Any]]) -> None:
    """Each value means something else, in whatever way it is written."""
    for key, values in grid.items():
        rest = {other: found[0] for other, found in grid.items() if other != key}
        known: list[Request] = []
        for value in values:
            meant = describe(make({**rest, key: value}))
            if any(difference(before, meant) is None for before in known):
                raise UserError(f"The grid has {key}={value} twice.")
            known.append(meant)


def _describe(config: Config, grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> Request:
    """The first combination, and what it is the first of."""
    first = {key: value for key, value in describe(config).items() if key != "seed"}
    return {"grid": [f"{k}={','.join(map(str, v))}" for k, v in grid.items()], "seeds": list(seeds), **first}


def _score(result: Result) -> dict[str, float]:
    """Of the personal models, in the round that is best on validation data."""
    row = result.best_on_validation()
    seconds = [t["train_seconds"] for t in result.timings]
    loss = row["pre_val_loss"]
    return {
        **{metric: row[f"pre_{metric}"] for metric in METRICS},
        "val_loss": loss if math.isfinite(loss) else math.inf,
        "round": float(row["round"]),
        "train_seconds": sum(seconds) / len(seconds),
    }


def _row(scores: Sequence[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"seeds": len(scores)}
    for metric in METRICS:
        row |= over_seeds(metric, [one[metric] for one in scores])
    for name in ("val_loss", "round", "train_seconds"):
        row[name] = sum(one[name] for one in scores) / len(scores)
    return row


def _command(config: Config, folder: Path | None) -> str | None:
    """What to type to run this again."""
    if folder is not None:
        return shlex.join(["fedloom", "run", "--config", str(folder / "config.yaml")])
    asked = describe(config)
    if any(asked[section].get("own") is True for section in SECTIONS):
        return None
    method, data = asked["algorithm"]["name"], asked["dataset"]
    usual = flat(describe(resolve({"algorithm": method, "dataset": data})))
    words = ["--dataset", data.get("path") or data["name"]]
    for key, value in flat(asked).items():
        if key.startswith("dataset."):
            words += [] if key == "dataset.path" else ["--set", f"{key}={_written(value)}"]
        elif value != usual.get(key):
            words += [f"--{key.replace('_', '-')}", value] if key in NAMED else ["--set", f"{key}={_written(value)}"]
    return shlex.join(["fedloom", "run", method, *words])


def _written(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)
