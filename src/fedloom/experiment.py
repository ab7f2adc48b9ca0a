"""A run from its settings to its results: config -> task -> rounds -> records."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedloom.core.contract import ALGORITHMS, Algorithm
from fedloom.core.errors import UserError, nearest
from fedloom.core.federation import Federation
from fedloom.core.network import Network
from fedloom.core.settings import build, fields, setting
from fedloom.core.task import Task
from fedloom.core.tree import Tree
from fedloom.data.divide import divide
from fedloom.data.partitions import PARTITIONS, Partition
from fedloom.data.pool import DATASETS, Dataset
from fedloom.engines.plan import Plan
from fedloom.engines.rounds import Round, Rounds
from fedloom.metrics.scores import accuracies, convergence_round, summarize
from fedloom.models.zoo import MODELS, Model

log = logging.getLogger("fedloom")


@dataclass(frozen=True)
class Settings:
    """What every run has, whatever the method, data set, partition and model."""

    clients: int = setting(20, "N, number of clients (where the data set leaves it open)", low=1)
    rounds: int = setting(50, "T, communication rounds", low=1)
    participation: float = setting(1.0, "share of clients in a round, or their number if above 1", above=0)
    lr: float = setting(0.05, "eta, local learning rate", above=0)
    momentum: float = setting(0.0, "momentum of local SGD", low=0, high=0.9999)
    weight_decay: float = setting(0.0, "weight decay of local SGD", low=0)
    clip: float | None = setting(None, "gradient norm is clipped to this", above=0)
    batch_size: int = setting(10, "B, samples in a batch", low=1)
    local_epochs: int = setting(1, "E, passes over a client's data in a round", low=1)
    seed: int = setting(0, "of initial model, client sampling, batches", low=0)
    partition_seed: int = setting(1, "of the partition; the same for all seeds by default", low=0)
    split: tuple[float, float, float] = setting((0.7, 0.1, 0.2), "train/validation/test shares of a client's data")
    pool: Literal["merged", "train", "separate"] = setting("merged", "what is divided among clients")
    subset: int | None = setting(None, "keep so many clients of the partition, drawn at random", low=1)
    server_share: float = setting(0.0, "share of the samples that goes to the server (D_CS)", low=0, high=0.9)
    eval_every: int = setting(1, "rounds between evaluations", low=1)
    dtype: Literal["float32", "float64"] = setting("float32", "precision")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    engine: Literal["vectorized", "reference"] = setting("vectorized", "who runs the clients")
    plan: Literal["auto", "stacked", "per-client"] = setting("auto", "how the vectorized engine does it")


SECTIONS = ("algorithm", "dataset", "partition", "model")


@dataclass(frozen=True)
class Config:
    """Everything that was chosen, checked."""

    settings: Settings
    algorithm: Algorithm
    dataset: Dataset | Federation
    partition: Partition
    model: Model | nn.Module | Callable[[], nn.Module]
    head: str = "head"
    data_dir: Path | None = None


def configure(
    algorithm: str | Algorithm | type[Algorithm] = "ditto",
    dataset: str | Dataset | Federation = "digits",
    partition: str | Partition | None = None,
    model: str | Model | nn.Module | Callable[[], nn.Module] | None = None,
    head: str = "head",
    data_dir: str | Path | None = None,
    values: Mapping[str, Any] | None = None,
) -> Config:
    """Check names and values. A bare key belongs to the run, the method, the data set, the partition or the model,
    whichever has it; `partition.k` names one where two have the same."""
    values = dict(values or {})
    if isinstance(dataset, Federation):
        data_class: Any = None
        usual: dict[str, Any] = {}
    else:
        data_class = DATASETS[dataset] if isinstance(dataset, str) else type(dataset)
        usual = dict(data_class.usual)
    model = model if model is not None else ("mlp" if data_class is None else data_class.model)
    partition = partition if partition is not None else ("natural" if data_class is None else data_class.partition)
    owners: dict[str, Any] = {
        "algorithm": ALGORITHMS[algorithm] if isinstance(algorithm, str) else algorithm,
        "dataset": data_class if isinstance(dataset, str) else dataset,
        "partition": PARTITIONS[partition] if isinstance(partition, str) else partition,
        "model": MODELS[model] if isinstance(model, str) else model,
    }
    configurable = Algorithm | Dataset | Partition | Model
    classes: dict[str, Any] = {"run": Settings}
    classes |= {name: o for name, o in owners.items() if isinstance(o, type) and issubclass(o, configurable)}
    sorted_ = _sort(values, classes)
    settings = build(Settings, {**usual, **sorted_.pop("run")}, "a run")
    made = {name: build(classes[name], found, f"{name} '{classes[name].name}'") for name, found in sorted_.items()}
    folder = None if data_dir is None else Path(data_dir)
    return Config(settings, **{**owners, **made}, head=head, data_dir=folder)


def _sort(values: Mapping[str, Any], classes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    sorted_: dict[str, dict[str, Any]] = {name: {} for name in classes}
    for key, value in values.items():
        section, dot, bare = key.rpartition(".")
        if dot:
            if section not in classes or section == "run":
                raise UserError(
                    f"'{key}' does not name a section; {nearest(section, [s for s in classes if s != 'run'])}"
                )
            sorted_[section][bare] = value
            continue
        having = [name for name, cls in classes.items() if key in fields(cls)]
        if not having:
            known = [field for cls in classes.values() for field in fields(cls)]
            raise UserError(f"Unknown setting '{key}'; {nearest(key, known)}")
        if len(having) > 1:
            options = " or ".join(f"{name}.{key}" for name in having)
            raise UserError(f"'{key}' is a setting of both {' and '.join(having)}; write {options}.")
        sorted_[having[0]][key] = value
    return sorted_


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device cannot be '{name}'; use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device cannot be '{name}'; use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise UserError(f"device '{name}' is not there: this machine has {count} CUDA devices; use device=cpu.")
    return device


def make_task(config: Config) -> Task:
    """Load and divide the data, build the model, and check that method, data and model fit together."""
    s = config.settings
    device, dtype = find_device(s.device), torch.float64 if s.dtype == "float64" else torch.float32
    if isinstance(config.dataset, Federation):
        data = config.dataset
    else:
        pool = config.dataset.load(config.data_dir, s.clients, s.partition_seed)
        data = divide(
            pool, config.partition, s.clients,
            split=s.split, source=s.pool, subset=s.subset, server_share=s.server_share, seed=s.partition_seed,
        )  # fmt: skip
    data = data.to(device, dtype)
    for note in data.notes:
        log.warning("%s.", note)
    network = _network(config, data)
    task = Task(
        data, network, lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay, clip=s.clip,
        batch_size=s.batch_size, epochs=s.local_epochs, rounds=s.rounds, participation=s.participation,
    )  # fmt: skip
    check(config.algorithm, task)
    return task


def _network(config: Config, data: Federation) -> Network:
    rows = data.splits["train"].flat[:2]
    sample = data.prepare(data.x[rows])
    if len(sample) == 1:
        sample = torch.cat([sample, sample])
    shape, classes = tuple(sample.shape[1:]), data.classes
    model = config.model
    if isinstance(model, nn.Module):  # its values are where everybody starts, whatever the seed
        return Network(lambda: copy.deepcopy(model), config.head, sample, data.dtype)
    if isinstance(model, Model):
        return Network(lambda: model.build(shape, classes), "head", sample, data.dtype)
    return Network(model, config.head, sample, data.dtype)


def check(alg: Algorithm, task: Task) -> None:
    """Everything about a method and a task that can be wrong and shows before training."""
    n, ratio = task.clients, task.participation
    if task.network.outputs < task.classes:
        raise UserError(f"The model has {task.network.outputs} outputs, but the data has {task.classes} classes.")
    if ratio > 1 and ratio != int(ratio):
        raise UserError(f"participation must be a share up to 1 or a whole number of clients, not {ratio:g}.")
    if ratio > n:
        raise UserError(f"participation asks for {ratio:g} clients, but there are {n}; use a share such as 0.5.")
    everyone = math.floor(ratio * n + 1e-9) == n if ratio <= 1 else ratio == n
    if not alg.partial and not everyone:
        raise UserError(f"{alg.name} needs all clients in every round; set participation=1.")
    if alg.needs_server_data and task.data.server is None:
        raise UserError(f"{alg.name} needs data at the server; set server_share=0.1 or pool=train.")
    if alg.needs_split and not task.network.body and not getattr(alg, "allow_degenerate", False):
        raise UserError(
            f"{alg.name} shares the body of the model, but this model is a single layer; "
            "use another model, or set allow_degenerate=true to run it as Local."
        )
    small = int(task.data.splits["train"].sizes.min())
    need = alg.min_samples(task)
    if small < need:
        raise UserError(f"{alg.name} needs {need} training samples per client, but one has {small}; use fewer clients.")
    alg.check(task)


@dataclass
class Result:
    """The records of a run. `rounds` has a row per evaluated round, `clients` a row per client and evaluated round."""

    config: dict[str, Any]
    plan: dict[str, Any]
    partition: str
    rounds: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    server: Tree
    store: Tree
    seconds: float

    def last(self) -> dict[str, Any]:
        return self.rounds[-1]

    def best_on_validation(self, view: str = "pre") -> dict[str, Any]:
        """The evaluated round with the highest mean validation accuracy (the first of equals)."""
        return self._best(f"{view}_val_acc_mean")

    def best_on_test(self, view: str = "pre") -> dict[str, Any]:
        """The papers' protocol: selected on the very numbers it reports, so never quote it alone."""
        return self._best(f"{view}_acc_mean")

    def _best(self, column: str) -> dict[str, Any]:
        scored = [row for row in self.rounds if row.get(column) is not None]
        if not scored:
            return self.rounds[-1]
        return max(scored, key=lambda row: row[column])

    def convergence_round(self, view: str = "pre") -> int:
        """The round in which accuracy stopped rising, as far as it was evaluated."""
        return self.rounds[convergence_round([row[f"{view}_acc_mean"] for row in self.rounds]) - 1]["round"]


OnRound = Callable[[int, int, dict[str, Any] | None], None]


def run(
    algorithm: str | Algorithm | type[Algorithm] = "ditto",
    dataset: str | Dataset | Federation = "digits",
    *,
    partition: str | Partition | None = None,
    model: str | Model | nn.Module | Callable[[], nn.Module] | None = None,
    head: str = "head",
    data_dir: str | Path | None = None,
    on_round: OnRound | None = None,
    **values: Any,
) -> Result:
    """Train and evaluate one method.

    `model` is a name, a module (its values are where everybody starts) or a function that builds one (new values for
    every seed); `head` names its last layer. Settings are given by name; `partition__k=2` where two have the same one.

    >>> import fedloom
    >>> result = fedloom.run("fedrep", rounds=3, clients=5, seed=1)
    >>> sorted(result.last())[:3]
    ['bytes_down', 'bytes_up', 'cohort']
    """
    values = {key.replace("__", "."): value for key, value in values.items()}
    config = configure(algorithm, dataset, partition, model, head, data_dir, values)
    return execute(config, on_round=on_round)


def execute(config: Config, on_round: OnRound | None = None, plan: Plan | None = None) -> Result:
    s = config.settings
    start = time.perf_counter()
    task = make_task(config)
    rounds = Rounds(config.algorithm, task, s.seed, s.engine, plan or s.plan)
    rows: list[dict[str, Any]] = []
    clients: list[dict[str, Any]] = []
    for t in range(s.rounds):
        evaluated = (t + 1) % s.eval_every == 0 or t == s.rounds - 1
        done = rounds.advance(evaluate=evaluated)
        if evaluated:
            rows.append(round_row(done))
            clients.extend(client_rows(done))
        if on_round is not None:
            on_round(t + 1, s.rounds, rows[-1] if evaluated else None)
    return Result(
        describe(config), rounds.plan.record(), task.data.digest(), rows, clients,
        rounds.server, rounds.store.rows["own"], time.perf_counter() - start,
    )  # fmt: skip


def round_row(done: Round) -> dict[str, Any]:
    """Metrics of a round. Columns are `<view>_<metric>` on test data and `<view>_val_<metric>` on validation data."""
    row: dict[str, Any] = {"round": done.t + 1, "cohort": len(done.cohort)}
    row |= {"bytes_down": done.bytes_down, "bytes_up": done.bytes_up, "seconds": done.seconds}
    for view, splits in done.scores.items():
        row |= {f"{view}_{name}": value for name, value in summarize(splits["test"]).items()}
        row |= {f"{view}_val_{name}": value for name, value in summarize(splits["val"]).items()}
        if "train" in splits:
            row[f"{view}_train_loss"] = summarize(splits["train"])["loss"]
    if done.server is not None:
        row["acc_global"] = 100 * float(done.server[0] / done.server[2])
    return row


def client_rows(done: Round) -> list[dict[str, Any]]:
    columns: dict[str, np.ndarray] = {}
    for view, splits in done.scores.items():
        columns[f"{view}_acc"] = accuracies(splits["test"])
        columns[f"{view}_val_acc"] = accuracies(splits["val"])
    count = len(next(iter(columns.values())))
    present = np.isin(np.arange(count), done.cohort)
    return [
        {"round": done.t + 1, "client": i, "sampled": bool(present[i]), **{k: float(v[i]) for k, v in columns.items()}}
        for i in range(count)
    ]


def describe(config: Config) -> dict[str, Any]:
    """The resolved configuration in plain values: enough to repeat the run, unless data or model were objects."""
    described: dict[str, Any] = dataclasses.asdict(config.settings)
    described["split"] = list(config.settings.split)
    for section in SECTIONS:
        thing = getattr(config, section)
        if isinstance(thing, Algorithm | Dataset | Partition | Model):
            described[section] = {"name": thing.name, **dataclasses.asdict(thing)}
        else:
            described[section] = {"name": getattr(thing, "__name__", type(thing).__name__)}
    return described
