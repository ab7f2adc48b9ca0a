"""Runs whose clients are at actors, for tests."""

import os
import signal
from functools import partial

import torch
from helpers import SingleRun, make_task, method

from fedloom.cluster.actors import RayActors, pickled
from fedloom.cluster.clients import ShardedClients
from fedloom.cluster.worker import Worker
from fedloom.core.tree import leaves
from fedloom.engine.client_store import MemoryStore
from fedloom.engine.plan import Plan

SEED, SHARDS = 7, 3
SIZES = (7, 12, 21, 1, 10, 2, 15, 5, 11)
PLAN = Plan("stacked", "eager", chunk=2, shards=SHARDS)  # of a shard with 3 clients, so that there are two chunks
SETTINGS = {  # to be fast
    "dap-fl": {"ep_max": 2},
    "page": {"ep_max": 2},
    "fedrecon": {"query_epochs": 2},
    "fedala": {"start_epochs": 3},
}


class Actors(RayActors):
    """Actors that can be killed."""

    def __init__(self, count):
        super().__init__(count, on_gpus=False)
        self.kill_at = None  # (name of a call, actor): killed while it is at work

    def call(self, name, arguments):
        if self.kill_at is not None and self.kill_at[0] == name and self.kill_at[1] in arguments:
            victim, self.kill_at = self.kill_at[1], None
            process = self.processes()[victim]
            self.handles[victim].do.remote(name, *arguments[victim])
            os.kill(process, signal.SIGKILL)
        return super().call(name, arguments)


class LocalActors:
    """Actors in this process, for what does not need Ray."""

    def __init__(self, count):
        self.workers = [Worker() for _ in range(count)]
        self.ends = lambda name, *arguments: False  # whether an actor ends when it is called so; then never again

    def __len__(self):
        return len(self.workers)

    def put(self, value):
        return value

    def get(self, reference):
        return reference

    def call(self, name, arguments):
        results = {}
        for i, given in arguments.items():
            if self.ends(name, *given):
                self.ends = lambda name, *arguments: False
            else:
                results[i] = self.workers[i].do(name, *given)[0]
        return results

    def replace(self, i):
        self.workers[i].clear()
        self.workers[i] = Worker()


def algorithm(name, **settings):
    return method(name, **{**SETTINGS.get(name, {}), **settings})


def task_for(alg, sizes=SIZES, **settings):
    """A task that the method can run, with some of the clients in a round if it allows that."""
    share = settings.pop("participation", 0.6) if alg.partial else 1.0
    least = alg.min_samples(make_task((1,)))
    return make_task([max(n, least) for n in sizes], data={"server": 20}, participation=share, **settings)


def sharded_run(alg, task, actors, plan=PLAN, **options):
    """A run whose clients are at actors."""
    make_local = partial(
        ShardedClients, actors=actors, shards=plan.shards, pickled=pickled, threads=torch.get_num_threads()
    )
    return SingleRun(alg, task, SEED, plan=plan, make_local=make_local, make_best_store=MemoryStore, **options)


def ordinary_run(alg, task, **options):
    """The same run in this process."""
    plan = Plan("stacked", "eager", chunk=len(SIZES))
    return SingleRun(alg, task, SEED, plan=plan, make_best_store=MemoryStore, **options)


def bits(*trees):
    """Values, comparable to the bit."""
    arrays = [v.cpu().numpy() if isinstance(v, torch.Tensor) else v for v in leaves(trees)]
    return [(v.shape, v.dtype, v.tobytes()) if hasattr(v, "tobytes") else v for v in arrays]


def everything(run, records):
    """State and records of a run, comparable to the bit."""
    numbers = [
        (r.cohort, r.scores, r.reports, r.server_report, r.gradients, r.samples, r.unseen_scores) for r in records
    ]
    return bits(run.server, run.store.everyone(), run.driver.post, run.driver.stats, numbers)
