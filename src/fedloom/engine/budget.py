"""How much clients compute: gradients, and samples that gradients are taken of.

Gradients are counted by carrying out one step of each phase with a network that counts its forward passes. A method
cannot branch on data, so all steps of a phase compute as many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fedloom.core.algorithm import Algorithm, Output
from fedloom.core.autodiff import vmap_size
from fedloom.core.task import Network, Task
from fedloom.core.tree import Params
from fedloom.engine import batching
from fedloom.engine.cohort import Cohort
from fedloom.engine.executors.per_client import PerClientExecutor
from fedloom.engine.plan import Plan

MOST_CLIENTS = 1000  # from whom the computation of all is estimated


class StepCost(NamedTuple):
    """What one step of a phase computes."""

    gradients: float
    passes: float  # forward and backward passes per sample of the batch, weighted by the share of the model's
    # parameters that are differentiated: 2 for sharpness-aware minimization, 0.1 for a head with a tenth of them


class Computation(NamedTuple):
    """What a client computes in a round, on average."""

    gradients: float
    samples: float  # that gradients are taken of, weighted as in `StepCost.passes`
    exact: bool  # False if the method chooses its number of epochs while it trains


class CountingNetwork:
    """A network that counts the forward passes that are differentiated."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.gradients = 0
        self.weighted_rows = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def apply(self, params: Params, buffers: Params, x: Tensor, **how: Any) -> Output:
        differentiated = sum(v.numel() for v in params.values() if v.requires_grad)
        if differentiated:
            times = vmap_size()
            self.gradients += times
            self.weighted_rows += times * len(x) * differentiated / sum(v.numel() for v in params.values())
        return self._network.apply(params, buffers, x, **how)


@torch.no_grad()
def step_costs(alg: Algorithm, task: Task, cohort: Cohort, population: Task | None = None) -> list[StepCost]:
    """The cost of a step in each phase of local training, by a step of the cohort's first client; `population` has the
    samples of all clients, if `task` has not."""
    counting = CountingNetwork(task.network)
    counted = replace(task, network=cast(Network, counting))
    executor = PerClientExecutor(alg, counted, Plan("per-client"))
    down, _, info, work = executor.start(cohort, 0)
    one, found = cohort.rows(np.zeros(1, np.int64)), []
    for phase in executor.phases["train"]:
        work = work if phase.enter is None else phase.enter(counted, work, down, info)
        batch = batching.for_cohort(population or task, phase, one, 1).full_batch(population or task)
        counting.gradients, counting.weighted_rows = 0, 0.0
        work = phase.step(counted, work, batch, down, info)
        found.append(StepCost(counting.gradients, counting.weighted_rows / batch.mask.numel()))
    return found


@torch.no_grad()
def expected_computation(alg: Algorithm, task: Task, cohort: Cohort) -> Computation:
    """What a client of the task computes in a round, before any training."""
    visits, exact = expected_visits(alg, task)
    gradients, samples = (visits * np.array(step_costs(alg, task, cohort)).reshape(-1, 2)).sum(0)
    return Computation(float(gradients), float(samples), exact)


def expected_visits(alg: Algorithm, task: Task) -> tuple[np.ndarray, bool]:
    """Steps of a client in a round, and samples that it uses in them, on average over clients: (phases, 2). Epochs that
    the method chooses itself are taken to be as many as the task has, and one where it stops by a condition; whether
    there are none of these."""
    ids = np.unique(np.linspace(0, task.clients - 1, MOST_CLIENTS).astype(np.int64))
    visits, exact = [], True
    for phase in alg.phases(task):
        exact = exact and isinstance(phase.epochs, int) and phase.until is None
        epochs = 1 if phase.until is not None else phase.epochs if isinstance(phase.epochs, int) else task.epochs
        schedule = batching.build(task, phase, 0, ids, 0, np.full(len(ids), epochs))
        visits.append(schedule.visits().mean(0))
    return np.array(visits).reshape(-1, 2), exact
