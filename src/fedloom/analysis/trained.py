"""The models of a finished run together with its data, which analyses need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedloom.config.resolve import resolve
from fedloom.core.algorithm import Algorithm
from fedloom.core.errors import UserError, nearest, shown
from fedloom.core.federation import Federation
from fedloom.core.keys import rng
from fedloom.core.task import Task
from fedloom.core.tree import Tree, tree_map
from fedloom.nn.network import Network
from fedloom.runs.directory import AT_SITES
from fedloom.studies.build import make_data
from fedloom.studies.models import When, client_index
from fedloom.studies.result import Result

GLOBAL = "global model"
Runs = Mapping[str, Sequence[Result]]  # results by the label of their method, one per seed


class TrainedRun(NamedTuple):
    """A finished run, its method, and its task: the data and the model architecture."""

    result: Result
    algorithm: Algorithm
    task: Task


class TrainedModel(NamedTuple):
    """One model of a run."""

    name: str  # such as "client 3"
    tree: Tree  # weights, as `predict` accepts them
    predict: Callable[[Tree, Tensor], Tensor]  # weights and samples -> outputs
    train: Tensor  # rows of the samples on which it was trained
    client: int | None  # whose model; None for the global one
    round: int  # after which it was stored


def load_trained(result: Result, data: Federation | None = None) -> TrainedRun:
    """The run with its data, which are loaded and divided again as its configuration says, unless they are given.
    Raises a UserError if they are not those that the run was trained with."""
    if result.simulation is not None:
        return TrainedRun(result, result.simulation.alg, result.simulation.population)
    assert result.folder is not None
    if (result.folder / AT_SITES).exists():
        raise UserError(f"The samples of {result.folder} are at sites of their own, so its models cannot be analysed.")
    architecture = result.models.architecture()
    data = load_data(result) if data is None else data
    rows = data.splits["train"].flat[:2]
    sample = data.samples(rows.repeat(2)[:2])
    network: Any = Network(architecture.make, architecture.head, sample, data.dtype)
    return TrainedRun(result, architecture.algorithm, Task(data, network))


def load_data(result: Result) -> Federation:
    """The data of a run that has a folder."""
    if result.config["dataset"].get("own") is True:
        raise UserError(
            f"The data of {result.folder} were made in Python and cannot be loaded again; analyse the result of "
            "fedloom.run without out=FOLDER."
        )
    # data do not depend on method and model, which may have been made in Python
    config = resolve({**result.config, "algorithm": {"name": "fedavg"}, "model": {"name": "mlp"}})
    settings = dataclasses.replace(config.settings, device="auto")
    if settings.dtype != "float64":  # lower precision is for training
        settings = dataclasses.replace(settings, dtype="float32")
    data = make_data(dataclasses.replace(config, settings=settings))
    if data.digest() != result.partition:
        raise UserError(f"The data of {result.folder} are not those that the run was trained with; run it again.")
    return data


def load_all(runs: Runs) -> dict[str, list[TrainedRun]]:
    """All runs with their data, which are loaded once: runs of one study are on the same."""
    known: dict[tuple[str, str], Federation] = {}

    def load(result: Result) -> TrainedRun:
        key = result.partition, str(result.config["dtype"])
        found = load_trained(result, known.get(key))
        if result.simulation is None:
            known[key] = found.task.data
        return found

    return {label: [load(result) for result in results] for label, results in runs.items()}


def has_global_model(result: Result) -> bool:
    """True if the method has a global model."""
    return "global" in result.views()


def load_model(run: TrainedRun, client: int | str | None = None, when: When = "best") -> TrainedModel:
    """The model that a client predicts with or, without a client, the global model. The first was trained on the
    training samples of the client, the other on those of all clients together."""
    result, task = run.result, run.task
    if when not in ("best", "last"):
        raise UserError(f"when cannot be '{shown(when)}'; {nearest(str(when), ('best', 'last'))}")
    view = "global" if client is None else "pre"
    last = result.last()["round"]
    chosen = result.best_on_validation(view)["round"] if when == "best" else last
    best = chosen != last
    train = task.data.splits["train"]
    i = None
    if client is None:
        tree: Tree = result.models.shared(best)
        if tree is None:
            raise UserError(f"{run.algorithm.name} has no global model; name a client.")
        rows, name = train.joined(np.arange(task.data.clients)), GLOBAL

        def predict(model: Tree, x: Tensor) -> Tensor:
            return task.predict(model, x).logits

    else:
        i = client_index(client, result.models)
        tree, rows, name = result.models.client(i, best), train[i], f"client {client}"

        def predict(model: Tree, x: Tensor) -> Tensor:
            return run.algorithm.logits(task, model, x)

    return TrainedModel(name, tree_map(lambda v: v.to(task.data.device), tree), predict, rows, i, chosen)


def some_rows(rows: Tensor, most: int | None, seed: int = 0) -> Tensor:
    """The rows or, if there are more than `most`, a random sample of them."""
    if most is None or len(rows) <= most:
        return rows
    if most < 1:
        raise UserError(f"samples must be at least 1, not {most}.")
    picked = np.sort(rng("analysis", seed).choice(len(rows), most, replace=False))
    return rows[rows.new_tensor(picked)]
