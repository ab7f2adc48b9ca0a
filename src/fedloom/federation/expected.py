"""What uploads must look like, worked out by the server from a client that it makes up."""

from dataclasses import replace

import numpy as np
import torch

from fedloom.core.algorithm import Algorithm
from fedloom.core.federation import Federation, Ragged
from fedloom.core.task import Task
from fedloom.core.tree import Tree
from fedloom.engine import batching
from fedloom.engine.client_store import MemoryStore
from fedloom.engine.clients import ClientRequest, LocalClients, initial_state
from fedloom.engine.executors.per_client import PerClientExecutor
from fedloom.engine.plan import Plan


@torch.no_grad()
def upload_like(alg: Algorithm, task: Task, seed: int, request: ClientRequest) -> Tree:
    """An upload to a request: that of a client whose samples are zeros, after one step of each phase."""
    data = task.data
    phases = [*alg.phases(task), *alg.adapt(task)]
    count = max(alg.min_samples(task), *(phase.group * (phase.batch or task.batch_size) for phase in phases), 2)
    made = replace(task, data=made_up(data, count))
    one = replace(request.only(request.ids[:1]), ids=np.zeros(1, np.int64), splits=(), scored=None, next_ids=None)
    server = alg.init_server(task, seed)
    clients = LocalClients(alg, made, made, seed, initial_state(alg, made, seed, server), MemoryStore)
    cohort = clients.cohort(one)
    executor = PerClientExecutor(alg, made, Plan("per-client"))
    down, state, info, work = executor.start(cohort, 0)
    for phase in executor.phases["train"]:
        work = work if phase.enter is None else phase.enter(made, work, down, info)
        work = phase.step(made, work, batching.for_cohort(made, phase, cohort, 1).full_batch(made), down, info)
    return alg.finish(made, work, down, state, info)[1]


def made_up(data: Federation, count: int) -> Federation:
    """A federation in which every client has the same `count` samples of zeros."""
    rows = torch.arange(count, device=data.device)
    clients = len(data.splits["train"])
    lists = Ragged(rows.repeat(clients), np.arange(clients + 1) * count)
    return replace(
        data,
        x=data.x.new_zeros((count, *data.x.shape[1:])),
        y=data.y.new_zeros((count, *data.y.shape[1:])),
        splits={"train": lists, "val": lists, "test": lists},
        server=None if data.server is None else rows,
        server_holdout=None,
        mean_samples_of_all=float(count),
    )
