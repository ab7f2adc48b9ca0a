"""Batches of the clients of the next round are prefetched while a GPU is at work, which changes no result."""

import numpy as np
import pytest
from helpers import SingleRun, make_task, method, state_bytes

from fedloom.engine import batching, clients
from fedloom.engine.plan import Plan
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation

SIZES = [12, 3, 9, 1, 7, 12]


@pytest.fixture
def built(monkeypatch):
    """The rounds for which schedules were built, without the one for which a step's gradients are counted."""
    found, build = [], batching.build
    monkeypatch.setattr(clients, "step_costs", lambda alg, task, *_: [(1.0, 1.0)] * len(alg.phases(task)))

    def noted(task, phase, seeds, ids, t, *args, **more):
        found.append(t)
        return build(task, phase, seeds, ids, t, *args, **more)

    monkeypatch.setattr(batching, "build", noted)
    return found


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "per-fedavg"])
@pytest.mark.parametrize("seeds", [1, 2])
def test_prefetched_rounds_are_the_same_to_the_bit(name, seeds, built):
    """Half of the clients train in a round; some have no step. FedRep has two phases, Per-FedAvg batches in groups."""
    task, found = make_task(SIZES, participation=0.5, batch_size=2, rounds=4), []
    for prefetch in (False, True):
        runs = [Simulation(method(name), task, seed) for seed in range(seeds)]
        group = RunGroup(runs, Plan("stacked", "traced", chunk=6))
        executor = group.executors[0]
        executor.memory_pool = object() if prefetch else None  # batches are prefetched where steps are CUDA graphs
        for _ in range(3):
            group.advance(evaluate=False)
        found.append([state_bytes(run) for run in runs])
        if prefetch:
            assert executor.next_cohort.t == 3
            phases = len(executor.phases["train"])
            assert sorted(built) == sorted([*range(3)] * phases + [3])  # once each, and the first phase of round 3
        built.clear()
    assert found[0] == found[1]


def test_another_cohort_than_the_prefetched_one_gets_its_own_batches():
    task = make_task(SIZES, participation=0.5, rounds=4)
    runs = [SingleRun(method("fedavg"), task, 0, plan=Plan("stacked", "traced", chunk=6)) for _ in range(2)]
    runs[1].executor.memory_pool = object()
    for run in runs:
        run.advance(evaluate=False)
        for ids in ([0, 2, 4], [0, 2, 4]):
            run.advance(evaluate=False, cohort=np.array(ids))
    assert state_bytes(runs[0]) == state_bytes(runs[1])
