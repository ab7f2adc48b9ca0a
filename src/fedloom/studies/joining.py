"""Clients that join a finished run with samples of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.config.settings import Settings
from fedloom.core.algorithm import Algorithm
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation, Ragged
from fedloom.core.settings import build, fields
from fedloom.core.targets import Number
from fedloom.core.task import Task
from fedloom.core.tree import take
from fedloom.data.user_data.new_samples import NewSamples, read_new_samples
from fedloom.engine.planning.choose import REFERENCE
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.nn.network import Network
from fedloom.runs import final
from fedloom.runs.directory import RunDirectory
from fedloom.runs.models import portable
from fedloom.studies.build import optimization
from fedloom.studies.client_model import ClientModel
from fedloom.studies.models import Architecture
from fedloom.studies.result import Result


def join(result: Result, path: str | Path) -> ClientModel:
    """The model of a new client that joins a finished run as its method prescribes: it receives what the server has for
    a new client, and trains with its own labelled samples, for `join_rounds` rounds.

    The training data of the others are not needed, and nothing in the run changes.

    Args:
        result: a run with a folder, see `fedloom.load`.
        path: labelled samples of the new client, as the run was trained with.
    """
    if result.folder is None:
        raise UserError("Only a run with a folder can be joined; give it one with out=FOLDER.")
    architecture = result.models.architecture()
    samples = read_new_samples(architecture.preprocessing, path)
    if samples.y is None or len(samples.known()) < len(samples.y):
        raise UserError(f"{path} must name the target of every sample, because the new client learns from them.")
    simulation = _simulation(result, architecture, samples)
    i = simulation.task.clients
    models = RunGroup([simulation], REFERENCE).models_of(0, np.array([i]))
    return architecture.module(portable(take(models, 0)))


def _simulation(result: Result, architecture: Architecture, samples: NewSamples) -> Simulation:
    """The run after its last round, with the new client as one that was held out."""
    assert result.folder is not None
    config = result.config
    s = build(Settings, {name: config[name] for name in fields(Settings) if name in config}, "a run")
    data = _federation(RunDirectory(result.folder), architecture, samples)
    rows = data.splits["train"][data.clients][:2]
    sample = data.samples(rows.repeat(2)[:2])
    network: Any = Network(architecture.make, architecture.head, sample, architecture.dtype)
    most = max(int(rows.sizes.max()) for rows in data.splits.values())  # no batch is larger
    task = Task(
        data, network, lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay, clip=s.clip,
        batch_size=min(s.batch_size, most), epochs=s.local_epochs, rounds=s.rounds,
        participation=s.participation, class_weights=s.class_weight == "balanced", **optimization(s),
    )  # fmt: skip
    need = _least_samples(architecture.algorithm, task)
    if len(samples.x) < need:
        name, count = architecture.algorithm.name, len(samples.x)
        raise UserError(f"{name} needs {need} samples of a new client, but there are {count}; give more.")
    run = Simulation(architecture.algorithm, task, s.seed, join_rounds=s.join_rounds, screening=False)
    final.restore_server(result.folder, run)
    return run


def _least_samples(alg: Algorithm, task: Task) -> int:
    """Samples without which a client does not train: some methods take batches in groups, and only complete ones."""
    groups = [phase for phase in alg.phases(task) if phase.group > 1 and not phase.halve]
    return max([alg.min_samples(task), *(phase.group * (phase.batch or task.batch_size) for phase in groups)])


def _federation(directory: RunDirectory, architecture: Architecture, samples: NewSamples) -> Federation:
    """The participants, of whom only the numbers of samples are known, and the new client with all its samples."""
    about = architecture.preprocessing
    x = about.scale(torch.from_numpy(samples.x), architecture.dtype)
    assert samples.y is not None
    y, targets = torch.from_numpy(samples.y), about.targets
    if isinstance(targets, Number):
        y = (y - targets.mean) / targets.std
    sizes = directory.split_sizes()
    mine = {"train": np.arange(len(x)), "val": np.zeros(0, np.int64), "test": np.zeros(0, np.int64)}
    splits = {name: Ragged.of([*(np.zeros(n, np.int64) for n in sizes[name]), mine[name]]) for name in mine}
    return Federation(
        x, y if about.target == "classes" else y.to(architecture.dtype), len(about.classes), splits, held_out=1,
        vocab=about.token_ids, dtype=architecture.dtype, targets=targets, preprocessing=about,
    )  # fmt: skip
