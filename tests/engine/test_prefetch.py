"""Batches of the clients that come next are worked out while a GPU is at work, and change nothing."""

import numpy as np
import pytest
from helpers import SingleRun, make_task, method

from fedloom.core.tree import leaves
from fedloom.engine import batching as schedule
from fedloom.engine.planning.plan import Plan
from fedloom.engine.run_group import RunGroup

SIZES = [12, 3, 9, 1, 7, 12]


@pytest.fixture
def built(monkeypatch):
    """The rounds for which schedules were made."""
    found, build = [], schedule.build

    def noted(task, phase, seeds, ids, t, *args, **more):
        found.append(t)
        return build(task, phase, seeds, ids, t, *args, **more)

    monkeypatch.setattr(schedule, "build", noted)
    return found


def bytes_of(runs):
    return [v.numpy().tobytes() for run in runs for v in leaves((run.server, run.store.everyone()))]


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "per-fedavg"])
@pytest.mark.parametrize("seeds", [1, 2])
def test_rounds_that_were_looked_ahead_to_change_no_byte(name, seeds, built):
    """Half of the clients train in a round; some have no step. FedRep has two phases, Per-FedAvg batches in groups."""
    task, found = make_task(SIZES, participation=0.5, batch_size=2, rounds=4), []
    for ahead in (False, True):
        runs = [SingleRun(method(name), task, seed, plan=None) for seed in range(seeds)]
        together = RunGroup(runs, Plan("stacked", "traced", chunk=6))
        together.executor.pool = object() if ahead else None  # as where graphs are captured
        for _ in range(3):
            together.advance(evaluate=False)
        found.append(bytes_of(runs))
        if ahead:
            assert together.executor.coming.t == 3
            phases = len(together.executor.phases["train"])
            assert sorted(built) == sorted([*range(3)] * phases + [3])  # once each, the last for nobody yet
        built.clear()
    assert found[0] == found[1]


def test_whoever_comes_instead_is_served(built):
    task = make_task(SIZES, participation=0.5, rounds=4)
    runs = [SingleRun(method("fedavg"), task, 0, plan=Plan("stacked", "traced", chunk=6)) for _ in range(2)]
    runs[1].executor.pool = object()
    for run in runs:
        run.advance(evaluate=False)
        for ids in ([0, 2, 4], [0, 2, 4]):
            run.advance(evaluate=False, cohort=np.array(ids))
    assert bytes_of(runs[:1]) == bytes_of(runs[1:])
