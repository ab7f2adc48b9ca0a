"""The models of a run, from memory or from its directory, as modules to be used outside of FedLoom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import nn

from fedloom.config.files import ConfigDict
from fedloom.config.resolve import described
from fedloom.core.algorithm import Algorithm, Slot
from fedloom.core.errors import UserError, nearest, shown
from fedloom.core.preprocessing import Preprocessing
from fedloom.core.tree import Tree, take, tree_map
from fedloom.engine.cohort import global_slot
from fedloom.engine.planning.choose import REFERENCE
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.runs.directory import RunDirectory
from fedloom.runs.models import portable
from fedloom.studies.build import module_maker
from fedloom.studies.client_model import ClientModel

When = Literal["best", "last"]
NOT_KEPT = "The run has not kept its best round; ask for the last one (when=last), or run it with keep=best."


@dataclass(frozen=True)
class Architecture:
    """How a run's models are built: what a `ClientModel` needs besides weights."""

    algorithm: Algorithm
    make: Callable[[], nn.Module]
    head: str
    preprocessing: Preprocessing
    dtype: torch.dtype

    def module(self, tree: Tree) -> ClientModel:
        """A model with these weights, on the CPU."""
        weights = tree_map(lambda v: v.detach().cpu().to(self.dtype) if v.is_floating_point() else v.cpu(), tree)
        return ClientModel(self.algorithm, self.make, self.head, weights, self.preprocessing, self.dtype)


class Models(Protocol):
    """Where the weights of a run's models are."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the clients; empty if they have none."""

    @property
    def clients(self) -> int:
        """Number of clients, those that are held out included."""

    def architecture(self) -> Architecture: ...

    def client(self, i: int, best: bool) -> Tree:
        """The model of a client, as its method's `logits` accepts it, after the last or the best round."""

    def shared(self, best: bool) -> Slot | None:
        """The global model after the last or its best round; None for methods without one."""


class ModelsInMemory:
    """The models of a run that has no directory."""

    def __init__(self, run: Simulation) -> None:
        self.run = run
        data = run.population.data
        self.names, self.clients = data.client_names, data.clients + data.held_out

    def architecture(self) -> Architecture:
        network: Any = self.run.task.network
        data = self.run.population.data
        return Architecture(self.run.alg, network.make, network.head_name, data.preprocessing_or_default(), data.dtype)

    def client(self, i: int, best: bool) -> Tree:
        if best and self.run.driver.best is None:
            raise UserError(NOT_KEPT)
        group = RunGroup([self.run], REFERENCE)
        return portable(take(group.models_of(0, np.array([i]), best), 0))

    def shared(self, best: bool) -> Slot | None:
        if best and self.run.driver.best_global is None:
            raise UserError(NOT_KEPT)
        found = self.run.driver.global_model(best)
        return None if found is None else global_slot(self.run.alg, self.run.task, found.params, found.stats)


class ModelsOnDisk:
    """The models of a run directory. The training data are not needed."""

    def __init__(self, directory: RunDirectory, config: ConfigDict, own: dict[str, Any] | None = None) -> None:
        """`own` may have the algorithm and the model, if they were made in Python."""
        self.directory, self.config, self.own = directory, config, own or {}
        self.names = directory.client_names()
        self.clients = directory.clients()

    def architecture(self) -> Architecture:
        algorithm: Any = self.own.get("algorithm") or described("algorithm", self.config)
        model: Any = self.own.get("model") or described("model", self.config)
        inputs = self.directory.preprocessing()
        head = self.config.get("head", "head")
        make, head = module_maker(model, head, inputs.shape, len(inputs.classes), inputs.token_ids)
        dtype = torch.float64 if self.config["dtype"] == "float64" else torch.float32
        return Architecture(algorithm, make, head, inputs, dtype)

    def client(self, i: int, best: bool) -> Tree:
        return self.directory.models(best).client(i)

    def shared(self, best: bool) -> Slot | None:
        return self.directory.global_model(best) if self.directory.has_global_model() else None


def client_index(client: int | str, models: Models) -> int:
    """The number of a client that is given by its name or its number."""
    if isinstance(client, str) and client in models.names:
        return list(models.names).index(client)
    number = int(client) if isinstance(client, str) and client.isdigit() else client
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < models.clients:
        return number
    known = nearest(str(client), models.names) if models.names else f"clients are 0 to {models.clients - 1}."
    raise UserError(f"There is no client '{shown(client)}'; {known}")
