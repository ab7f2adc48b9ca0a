"""How the papers' numbers of costs are measured: from the configuration of a cell, without training.

CIFAR's images are not read: sizes depend on their shape and number only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.page import PAGE
from fedloom.algorithms.parts import dense
from fedloom.algorithms.parts.ddpg import DDPG
from fedloom.algorithms.parts.private_hypernetwork import CHUNK, WIDTH
from fedloom.algorithms.pfedkt import PFedKT
from fedloom.config.resolve import Config
from fedloom.core.algorithm import Phase
from fedloom.core.federation import Federation, Ragged
from fedloom.core.task import Task
from fedloom.core.tree import mean, size_bytes, tree_map
from fedloom.data.dataset import Dataset
from fedloom.data.divide import split_sizes
from fedloom.engine import batching
from fedloom.engine.costs import Costs, ModelSize, model_size
from fedloom.engine.executors.per_client import PerClientExecutor
from fedloom.engine.plan import Plan
from fedloom.engine.planning.measure import seconds
from fedloom.engine.simulation import Simulation
from fedloom.studies.build import find_device, make_data, make_task
from fedloom.studies.costs import costs_of, on_cpu

CIFAR = {"cifar10": 10, "cifar100": 100}  # classes
IMAGES = {"merged": 60_000, "separate": 60_000, "train": 50_000}  # that are divided among clients
UPLOADS = 10  # that are averaged at a time


@dataclass(frozen=True)
class CostMetric:
    """How a metric of costs is measured."""

    about: str
    measure: Callable[[Config, str], float | None]  # of a configuration and the label of its row; None if it has none
    unusable: str = ""  # why no number of a paper is a target


# -- pFedKT's hypernetworks


class Generator(NamedTuple):
    """A hypernetwork that makes a model in one or several calls."""

    size: ModelSize
    calls: float  # parameters of the model by outputs of a call, not rounded


def hypernetwork(alg: PFedKT, parameters: int, outputs: int) -> Generator:
    """The hypernetwork of a client with so many outputs, for a model of this size."""
    widths = (alg.emb_dim, *[WIDTH] * (alg.n_hidden + 1), outputs)
    flops = 2 * sum(a * b for a, b in pairwise(widths))
    return Generator(ModelSize(dense.count(widths), flops), parameters / outputs)


def _generator(config: Config, outputs: int | None = None) -> Generator:
    """The hypernetwork of pFedKT, or one with so many outputs; 0 stands for the whole model."""
    alg, parameters = config.algorithm, _model(config).parameters
    assert isinstance(alg, PFedKT)
    outputs = (0 if alg.hn == "large" else CHUNK) if outputs is None else outputs
    return hypernetwork(alg, parameters, outputs or parameters)


@cache
def _model(config: Config) -> ModelSize:
    config = on_cpu(replace(config, algorithm=FedAvg()))
    return model_size(make_task(config, samples(config)))


def _size(config: Config) -> ModelSize:
    """Of pFedKT's hypernetwork, or of the model."""
    return _generator(config).size if isinstance(config.algorithm, PFedKT) else _model(config)


def _generation(config: Config, label: str) -> float | None:
    if not isinstance(config.algorithm, PFedKT):
        return None
    generator = _generator(config)
    return 4 * generator.calls * generator.size.flops / 2**30


def _ratio(config: Config, label: str) -> float:
    """The label has the number of outputs of the small hypernetwork: out=400."""
    small, large = _generator(config, int(label.removeprefix("out="))), _generator(config, 0)
    return math.ceil(small.calls) * small.size.flops / large.size.flops


def _clients(config: Config, label: str) -> float | None:
    one, large = _generator(config), _generator(config, 0)
    return None if one == large else large.size.parameters / one.size.parameters


# -- what clients compute and keep


@cache
def _costs(config: Config) -> Costs:
    return costs_of(config, samples(on_cpu(config)))


def samples(config: Config) -> Federation:
    """The samples of a configuration. In place of CIFAR's images, zeros, of which all clients have equally many."""
    s = config.settings
    name = config.dataset.name if isinstance(config.dataset, Dataset) else ""
    if name not in CIFAR:
        return make_data(config)
    sizes = split_sizes(IMAGES[s.pool] // s.clients, s.split)
    rows = np.arange(sum(sizes))
    parts = zip(("train", "val", "test"), np.split(rows, np.cumsum(sizes)[:-1]), strict=True)
    data = Federation(
        x=torch.zeros(len(rows), 3, 32, 32, dtype=torch.uint8),
        y=torch.from_numpy(rows % CIFAR[name]),
        classes=CIFAR[name],
        splits={split: Ragged.of([mine] * s.clients) for split, mine in parts},
        server=torch.from_numpy(rows),
    )
    return data.to(find_device(s.device), torch.float64 if s.dtype == "float64" else torch.float32)


# -- the time of PAGE's operations


def _ms_per_byte(config: Config, label: str) -> float:
    """The label is the operation."""
    task = make_task(config, samples(config))
    alg = config.algorithm
    assert isinstance(alg, PAGE)
    operation = {
        "local_training": _local_training,
        "model_aggregation": _aggregation,
        "local_DDPG_training": lambda alg, task: _update(alg.client_agent(task), task),
        "global_DDPG_training": lambda alg, task: _update(alg.server_agent(task), task),
    }[label]
    with torch.no_grad():
        taken, size = operation(alg, task)
    return 1000 * taken / size


def _local_training(alg: PAGE, task: Task) -> tuple[float, int]:
    """Seconds of a client's training in a round, which are those of a step times the number of steps; bytes of the
    model."""
    run, phase = Simulation(alg, task, 0), Phase(alg.step, task.epochs)
    cohort = run.first_cohort()
    batch = batching.for_cohort(run.task, phase, cohort.rows(np.zeros(1, np.int64)), 1).full_batch(run.task)
    down, _, info, work = PerClientExecutor(alg, run.task, Plan("per-client")).start(cohort, 0)
    step = seconds(lambda: phase.step(run.task, work, batch, down, info), task.data.device)
    steps = -(-task.data.splits["train"].sizes.mean() // task.batch_size) * task.epochs
    return float(steps * step), size_bytes(task.init(0))


def _aggregation(alg: PAGE, task: Task) -> tuple[float, int]:
    """Seconds and bytes of averaging some uploads."""
    uploads = tree_map(lambda v: torch.stack([v] * UPLOADS), task.init(0))
    weights = torch.ones(UPLOADS, device=task.data.device)
    return seconds(lambda: mean(uploads, weights), task.data.device), size_bytes(uploads)


def _update(agent: DDPG, task: Task) -> tuple[float, int]:
    """Seconds of an update of an agent, and bytes of its networks."""
    key = torch.zeros((), dtype=torch.int64, device=task.data.device)
    state, wanted = agent.init(key, task.dtype), torch.ones_like(key, dtype=torch.bool)
    return seconds(lambda: agent.update(state, key, wanted), task.data.device), size_bytes(state["nets"])


COST_METRICS = {
    "params": CostMetric("parameters", lambda config, label: _size(config).parameters),
    "flops_forward": CostMetric("FLOPs of a forward pass", lambda config, label: _size(config).flops),
    "storage_MB": CostMetric(
        "4 bytes per parameter, in 2^20 bytes", lambda config, label: 4 * _size(config).parameters / 2**20
    ),
    "generation_cost_GB": CostMetric(
        "4 bytes times the FLOPs of parameters / outputs calls, in 2^30 bytes", _generation
    ),
    "flops_ratio": CostMetric(
        "FLOPs of generating the model in whole calls, relative to one call of the large one", _ratio
    ),
    "clients": CostMetric("how many of them have as many parameters as the large one", _clients),
    "client_GFLOP": CostMetric(
        "FLOPs of a client in a round, in 10^9", lambda config, label: _costs(config).flops / 1e9
    ),
    "times_FedAvg": CostMetric(
        "relative to FedAvg",
        lambda config, label: _costs(config).flops / _costs(replace(config, algorithm=FedAvg())).flops,
    ),
    "state_MB": CostMetric(
        "private state of a client, in 2^20 bytes", lambda config, label: _costs(config).client_bytes / 2**20
    ),
    "ms_per_byte": CostMetric(
        "milliseconds per byte of the model, the uploads, or the agent's networks",
        _ms_per_byte,
        "depends on the machine",
    ),
}
