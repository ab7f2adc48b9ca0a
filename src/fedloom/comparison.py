"""Several methods, several seeds, one task: a folder of runs and a leaderboard."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from torch import nn

from fedloom.config import Config, Request, combine, configure, describe, read_request, resolve, to_yaml
from fedloom.core.contract import Algorithm
from fedloom.core.errors import UserError, told
from fedloom.core.federation import Federation
from fedloom.core.files import write_text
from fedloom.data.partitions import Partition
from fedloom.data.pool import Dataset
from fedloom.experiment import OnRound, Result, execute_together, make_data, make_task
from fedloom.metrics.leaderboard import BASELINE, METRICS, UNSEEN, Chosen, Scored, leaderboard
from fedloom.metrics.scores import trend
from fedloom.models.zoo import Model
from fedloom.report.leaderboard import selected, to_csv, to_latex, to_markdown
from fedloom.runs.directory import alone, check_empty, check_kind, check_same, unused

METHODS = (BASELINE, "fedavg", "fedrep", "ditto")
OnMethod = Callable[[str, Sequence[int], int, int], OnRound | None]  # label, seeds, methods done, methods in all


@dataclass
class Comparison:
    """`board` has a row per method, model view and selection; see `fedloom.metrics.leaderboard`."""

    config: Request
    board: list[dict[str, Any]]
    folder: Path | None = None

    def rows(self, model: str = "pre", selection: str | None = None) -> list[dict[str, Any]]:
        """The leaderboard of one model view, the best mean first; of the round best on validation data, if there is
        such data, else of the last round."""
        selection = selection or selected(self.board)
        return [row for row in self.board if row["model"] == model and row["selection"] == selection]


def compare(
    methods: Iterable[str | Algorithm | type[Algorithm]] | str | Algorithm | type[Algorithm] = METHODS,
    dataset: str | Path | Dataset | Federation = "digits",
    *,
    seeds: int | Sequence[int] = 3,
    partition: str | Partition | None = None,
    model: str | Model | nn.Module | Callable[[], nn.Module] | None = None,
    head: str = "head",
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_method: OnMethod | None = None,
    **values: Any,
) -> Comparison:
    """Train and evaluate several methods on one task. Local is always among them: the others are measured by it.

    A method is a name, a name with settings (`"ditto:lam=0.5"`), or an object. `seeds` is how many, or which.

    >>> import fedloom
    >>> found = fedloom.compare(["fedavg", "fedrep"], seeds=1, rounds=3, clients=5)
    >>> sorted(row["method"] for row in found.rows())
    ['fedavg', 'fedrep', 'local']
    """
    values = {key.replace("__", "."): value for key, value in values.items()}
    _check_seed(values)
    configs = []
    for method in [methods] if isinstance(methods, str | Algorithm | type) else methods:
        spec = parse_method(method) if isinstance(method, str) else {"name": method}
        own = {f"algorithm.{key}": value for key, value in spec.items() if key != "name"}
        configs.append(configure(spec["name"], dataset, partition, model, head, data_dir, {**values, **own}))
    return carry_out(configs, parse_seeds(seeds), out=out, resume=resume, on_method=on_method)


def configurations(methods: Iterable[str], request: Mapping[str, Any]) -> list[Config]:
    """What is asked for on the command line or in a file: a configuration per method."""
    if "algorithm" in request:
        raise UserError("A comparison has methods instead of an algorithm; name them, such as 'ditto:lam=0.5'.")
    _check_seed(request)
    return [resolve(combine(request, {"algorithm": parse_method(method)})) for method in methods]


def _check_seed(request: Mapping[str, Any]) -> None:
    if "seed" in request:
        raise UserError("A comparison has seeds instead of a seed; say how many (3) or which (4,7,9).")


def read_comparison(folder: Path) -> tuple[list[str], list[int], Request]:
    """Methods, seeds and request of the comparison in a folder."""
    check_kind(folder, "compare.yaml")
    request = read_request(folder / "compare.yaml")
    methods, seeds = request.pop("methods", None), request.pop("seeds", None)
    if not isinstance(methods, list) or not isinstance(seeds, list):
        raise UserError(f"{folder} is damaged: compare.yaml does not list methods and seeds.")
    return parse_methods(methods), parse_seeds(seeds), request


def carry_out(
    configs: Sequence[Config],
    seeds: Sequence[int],
    *,
    out: str | Path | None = None,
    resume: bool = False,
    on_method: OnMethod | None = None,
) -> Comparison:
    """All runs that are not done yet, method by method, all seeds of one in one run, and the leaderboard."""
    entries = _labelled(configs)
    described = _describe(entries, seeds)
    folder = None if out is None else Path(out)
    if folder is None and resume:
        raise UserError("resume needs out, the folder of the comparison.")
    if folder is not None:
        _check(folder, described, resume)
    data = make_data(next(iter(entries.values())))
    for config in entries.values():  # every mistake shows before anything is trained
        make_task(config, data)
    if folder is not None:
        with told(folder):
            folder.mkdir(parents=True, exist_ok=True)
    with alone(folder) if folder is not None else nullcontext():
        if folder is not None:
            _check(folder, described, resume)
            write_text(folder / "compare.yaml", to_yaml(described))
        runs: list[Scored] = []
        for count, (label, config) in enumerate(entries.items()):
            on_round = on_method(label, seeds, count, len(entries)) if on_method is not None else None
            places = [None if folder is None else folder / "runs" / file_name(label) / f"seed-{s}" for s in seeds]
            each, again = [config.with_seed(seed) for seed in seeds], folder is not None
            done = execute_together(each, out=places, resume=again, on_round=on_round, data=data)
            runs += [score(label, seed, result) for seed, result in zip(seeds, done, strict=True)]
        found = Comparison(described, leaderboard(runs), folder)
        if folder is not None:
            for name, write in (("csv", to_csv), ("md", to_markdown), ("tex", to_latex)):
                write_text(folder / f"leaderboard.{name}", write(found.board))
    return found


def _check(folder: Path, described: Request, resume: bool) -> None:
    if not resume:
        check_empty(folder)
        return
    if unused(folder):
        return
    methods, seeds, request = read_comparison(folder)
    check_same({"methods": methods, "seeds": seeds, **request}, described, folder)


def _labelled(configs: Sequence[Config]) -> dict[str, Config]:
    """Configurations by label; with Local, before the others if it is not among them."""
    if not configs:
        raise UserError("A comparison needs at least one method.")
    entries: dict[str, Config] = {}
    if all(label(config.algorithm) != BASELINE for config in configs):
        local = resolve({"algorithm": BASELINE}).algorithm
        entries[BASELINE] = dataclasses.replace(configs[0], algorithm=local)
    for config in configs:
        name = label(config.algorithm)
        if name in entries:
            raise UserError(f"'{name}' is asked for twice; give each method once, or with different settings.")
        entries[name] = config
    return entries


def _describe(entries: Mapping[str, Config], seeds: Sequence[int]) -> Request:
    """What all have in common, and what is special to a method (a preset's `per_method`)."""
    each = {
        name: {k: v for k, v in describe(c).items() if k not in ("algorithm", "seed")} for name, c in entries.items()
    }
    common = next(iter(each.values()))
    special = {
        parse_method(name)["name"]: {k: v for k, v in mine.items() if v != common[k]} for name, mine in each.items()
    }
    special = {method: values for method, values in special.items() if values}
    return {"methods": list(entries), "seeds": list(seeds), **common, **({"per_method": special} if special else {})}


def label(algorithm: Algorithm) -> str:
    """A method and those of its settings that are not the defaults, as it is written on the command line."""
    changed = [
        f"{f.name}={_written(getattr(algorithm, f.name))}"
        for f in dataclasses.fields(algorithm)
        if getattr(algorithm, f.name) != f.default
    ]
    return algorithm.name + (":" + ",".join(changed) if changed else "")


def _written(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def parse_methods(methods: Any) -> list[str]:
    """Methods as a file lists them: one, or several."""
    found = [methods] if isinstance(methods, str) else methods
    if not isinstance(found, list) or not found or not all(isinstance(method, str) for method in found):
        raise UserError(f"methods must be a list of names such as [fedavg, 'ditto:lam=0.5'], not '{methods}'.")
    return found


def parse_method(text: str) -> dict[str, Any]:
    """`ditto:lam=0.5,personal_epochs=2` as a section of a request."""
    name, colon, rest = text.partition(":")
    section: dict[str, Any] = {"name": name.strip()}
    for item in rest.split(",") if colon else ():
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UserError(f"A method with settings is written 'ditto:lam=0.5,personal_epochs=2', not '{text}'.")
        if key.strip() in section:
            raise UserError(f"'{text}' gives '{key.strip()}' twice.")
        section[key.strip()] = value.strip()
    return section


def parse_seeds(seeds: Any) -> list[int]:
    """A number of seeds, or the seeds themselves (`3`, `4,7,9`, `5,`)."""
    wrong = UserError(f"seeds must be how many (3) or which ones (4,7,9), not '{seeds}'.")
    try:
        if isinstance(seeds, str):
            parts = [int(part) for part in seeds.rstrip(", ").split(",")]
            found = parts if "," in seeds else list(range(parts[0]))
        elif isinstance(seeds, bool):
            raise wrong
        else:
            found = list(range(operator.index(seeds))) if np.ndim(seeds) == 0 else [operator.index(s) for s in seeds]
    except (TypeError, ValueError):
        raise wrong from None
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise wrong
    return found


def file_name(label: str) -> str:
    return re.sub(r"[^\w.,=+-]", "_", label)


def score(label: str, seed: int, result: Result) -> Scored:
    """What a leaderboard needs of a run."""
    views = {}
    for view in result.views():
        picks = {"last": result.last()}
        if f"{view}_val_acc_mean" in result.last():
            picks = {"validation": result.best_on_validation(view), **picks}
        views[view] = {name: _chosen(result, view, row) for name, row in picks.items()}
    at = [row["round"] for row in result.rounds]
    trends = {view: trend(at, [row[f"{view}_acc_mean"] for row in result.rounds]) for view in views}
    down, up = (float(np.mean([row[name] for row in result.rounds])) for name in ("bytes_down", "bytes_up"))
    train = float(np.median([row["train_seconds"] for row in result.timings]))
    evaluation = float(np.median([row["eval_seconds"] for row in result.timings if row["round"] in set(at)]))
    return Scored(label, seed, views, trends, down, up, train, evaluation)


def _chosen(result: Result, view: str, row: Mapping[str, Any]) -> Chosen:
    clients = result.clients.filter(pc.field("round") == row["round"])
    ids, acc = clients["client"].to_numpy(), clients[f"{view}_acc"].to_numpy()  # NaN for those who are held out
    metrics, unseen = {m: row[f"{view}_{m}"] for m in METRICS}, {m: row[m] for m in UNSEEN if m in row}
    return Chosen(row["round"], metrics, ids, acc, unseen)
