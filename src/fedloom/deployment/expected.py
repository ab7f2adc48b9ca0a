"""What uploads must look like, as the server works it out."""

from dataclasses import replace

import numpy as np
import torch

from fedloom.core.algorithm import Algorithm
from fedloom.core.keys import root
from fedloom.core.task import Task
from fedloom.core.tree import Tree
from fedloom.engine import batching
from fedloom.engine.client_store import ClientStore, InitialRows, MemoryStore
from fedloom.engine.clients import ClientRequest, LocalClients, initial_state
from fedloom.engine.executors.per_client import PerClientExecutor
from fedloom.engine.plan import Plan


@torch.no_grad()
def upload_like(alg: Algorithm, task: Task, seed: int, request: ClientRequest) -> Tree:
    """An upload to a request: that of its first client after one step of each phase, with the zeros that the server has
    in the place of its samples."""
    start = initial_state(alg, task, seed, alg.init_server(task, root(seed, "init")))
    clients = LocalClients(alg, task, task, seed, start, Initial)
    cohort = clients.cohort(replace(request.only(request.ids[:1]), splits=(), scored=None, next_ids=None))
    executor = PerClientExecutor(alg, task, Plan("per-client"))
    down, state, info, work = executor.start(cohort, 0)
    for phase in executor.phases["train"]:
        work = work if phase.enter is None else phase.enter(task, work, down, info)
        batch = batching.for_cohort(task, phase, cohort, 1).full_batch(task)
        work = phase.step(task, work, batch, down, info)
    return alg.finish(task, work, down, state, info)[1]


class Initial(MemoryStore):
    """A store of clients that never train, so it needs no memory for them."""

    def __init__(self, initial_rows: InitialRows, clients: int) -> None:
        ClientStore.__init__(self, initial_rows, clients)

    def _read(self, ids: np.ndarray) -> Tree:
        return self.initial_rows(ids)
