"""A run in one process: the server's driver and all its clients."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedloom.core.algorithm import Algorithm
from fedloom.core.task import Task
from fedloom.core.tree import Tree
from fedloom.engine.client_store import ClientStore, MemoryStore, Snapshot
from fedloom.engine.clients import LocalClients, MakeStore, initial_state
from fedloom.engine.cohort import Cohort
from fedloom.engine.driver import Driver
from fedloom.engine.screening import Directions, Screening


class State(NamedTuple):
    """Everything a run needs to go on after a round."""

    t: int
    server: Tree
    post: dict[str, np.ndarray]
    store: Snapshot
    recent: dict[str, np.ndarray]  # what screening knows of recent uploads


class Simulation:
    """The state of a run between rounds. `RunGroup` advances it, alone or stacked with others."""

    def __init__(
        self, alg: Algorithm, task: Task, seed: int, *, make_store: MakeStore = MemoryStore, **options: Any
    ) -> None:
        """`task` has all clients, those that are held out included; `options` are those of `Driver`."""
        self.population, self.alg, self.seed = task, alg, seed
        self.task = replace(task, data=task.data.participants())  # all that an algorithm ever sees
        self.driver = Driver(alg, self.task, seed, held_out=task.data.held_out, **options)
        initial = initial_state(alg, self.task, seed, self.driver.server)
        self.clients = LocalClients(alg, self.task, task, seed, initial, make_store)

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

    def first_cohort(self) -> Cohort:
        """A cohort such as an executor will get; the execution plan is made for it."""
        return self.clients.cohort(self.driver.first_request())

    def state(self) -> State:
        recent = {kind: screening.recent for kind, screening in self._screening().items()}
        return State(self.driver.t, self.driver.server, self.driver.post, self.store.snapshot(), recent)

    def restore(self, saved: State) -> None:
        self.driver.t, self.driver.server, self.driver.post = saved.t, saved.server, saved.post
        self.store.restore(saved.store)
        for kind, screening in self._screening().items():
            screening.recent = saved.recent.get(kind, screening.recent)

    def _screening(self) -> dict[str, Screening | Directions]:
        directions = self.driver.directions
        return {**self.driver.screening, **({} if directions is None else {"directions": directions})}
