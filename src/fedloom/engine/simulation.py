"""A run in one process: the server's driver and all its clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedloom.core.algorithm import Algorithm
from fedloom.core.errors import UserError
from fedloom.core.server_optimizer import with_server_optimizer
from fedloom.core.task import Task
from fedloom.core.tree import Tree
from fedloom.engine.client_store import ClientStore, MemoryStore, Snapshot
from fedloom.engine.clients import Clients, LocalClients, MakeStore, initial_state
from fedloom.engine.cohort import Cohort
from fedloom.engine.driver import Driver, GlobalModel, ServerState
from fedloom.engine.screening import Directions, Screening
from fedloom.metrics.registry import Metric


class BestState(NamedTuple):
    """What the models of the best round are made from."""

    server: ServerState
    store: Snapshot


class State(NamedTuple):
    """Everything a run needs to go on after a round."""

    t: int
    server: Tree
    post: dict[str, np.ndarray]
    store: Snapshot
    recent: dict[str, np.ndarray]  # what screening knows of recent uploads
    stats: Tree  # mean running statistics of the clients
    best: BestState | None = None  # of the best round of personal models, if it is kept
    best_global: GlobalModel | None = None  # of its best round, if it is kept


class Simulation:
    """The state of a run between rounds. `RunGroup` advances it, alone or stacked with others."""

    def __init__(
        self,
        alg: Algorithm,
        task: Task,
        seed: int,
        *,
        make_store: MakeStore = MemoryStore,
        make_best_store: MakeStore | None = None,
        metric: Metric | None = None,
        clients: Clients | None = None,
        make_local: Callable[..., LocalClients] = LocalClients,
        **options: Any,
    ) -> None:
        """`task` has all clients, those that are held out included; `clients` are given if they are not in this
        process, and `make_local` makes them otherwise; `options` are those of `Driver`."""
        alg = with_server_optimizer(alg, task)
        self.population, self.alg, self.seed = task, alg, seed
        self.task = replace(task, data=task.data.participants())  # all that an algorithm ever sees
        self.driver = Driver(alg, self.task, seed, held_out=task.data.held_out, **options)
        if clients is None:
            initial = initial_state(alg, self.task, seed, self.driver.server)
            clients = make_local(alg, self.task, task, seed, initial, make_store, make_best_store, metric)
        self.clients: Clients = clients

    @property
    def t(self) -> int:
        """Number of rounds that are done."""
        return self.driver.t

    @property
    def server(self) -> Tree:
        return self.driver.server

    @property
    def store(self) -> ClientStore:
        return self.clients.store

    @property
    def local(self) -> LocalClients:
        """The clients of a run that has them in this process."""
        if not isinstance(self.clients, LocalClients):
            raise UserError("The clients of this run are at sites of their own, and so are their models and data.")
        return self.clients

    @property
    def is_local(self) -> bool:
        """True if the clients are in this process, False if they are at sites of their own."""
        return isinstance(self.clients, LocalClients)

    def first_cohort(self) -> Cohort:
        """A cohort such as an executor will get; the execution plan is made for it."""
        return self.local.cohort(self.driver.first_request())

    @property
    def stores(self) -> list[ClientStore]:
        """The private state of all clients now and, if it is kept, in the best round."""
        best = self.clients.best_store
        return [self.store] if best is None else [self.store, best]

    def keep_best(self, view: str) -> None:
        """Keep what the models of this round are made from, as the best one of personal models (`pre`) or of the global
        model (`global`)."""
        if self.clients.best_store is None:
            return
        if view == "global":
            self.driver.best_global = self.driver.global_model()
        else:
            self.driver.best = self.driver.now
            self.clients.keep_best()

    def state(self) -> State:
        driver, best_store = self.driver, self.clients.best_store
        best = None
        if driver.best is not None and best_store is not None:
            best = BestState(driver.best, best_store.snapshot())
        return State(
            driver.t, driver.server, driver.post, self.store.snapshot(), self.recent(), driver.stats, best,
            driver.best_global,
        )  # fmt: skip

    def recent(self) -> dict[str, np.ndarray]:
        """What screening knows of recent uploads."""
        return {kind: screening.recent for kind, screening in self._screening().items()}

    def restore(self, saved: State) -> None:
        driver, best_store = self.driver, self.clients.best_store
        driver.t, driver.server, driver.post, driver.stats = saved.t, saved.server, saved.post, saved.stats
        driver.best_global = saved.best_global
        self.store.restore(saved.store)
        if saved.best is not None and best_store is not None:
            driver.best = saved.best.server
            best_store.restore(saved.best.store)
        for kind, screening in self._screening().items():
            screening.recent = saved.recent.get(kind, screening.recent)

    def _screening(self) -> dict[str, Screening | Directions]:
        directions = self.driver.directions
        return {**self.driver.screening, **({} if directions is None else {"directions": directions})}
