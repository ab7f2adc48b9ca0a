"""A run from its settings to its results: config -> task -> rounds -> records."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

from fedloom.config import Config, Request, configure, describe
from fedloom.core.contract import Algorithm
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.core.keys import rng
from fedloom.core.network import Network
from fedloom.core.task import Task
from fedloom.core.tree import Tree
from fedloom.data.divide import divide, hold_out, settled
from fedloom.data.partitions import Partition
from fedloom.data.pool import Dataset
from fedloom.engines.plan import Plan
from fedloom.engines.rounds import Rounds
from fedloom.engines.store import make_store
from fedloom.metrics.scores import convergence_round
from fedloom.models.zoo import Model
from fedloom.runs.directory import Directory
from fedloom.runs.interrupt import Stopped, stoppable
from fedloom.runs.records import Records, Row

log = logging.getLogger("fedloom")

VIEWS = ("pre", "post", "global")


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device cannot be '{name}'; use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device cannot be '{name}'; use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise UserError(f"device '{name}' is not there: this machine has {count} CUDA devices; use device=cpu.")
    return device


def make_data(config: Config) -> Federation:
    """Load and divide the data, on the device."""
    s = config.settings
    device, dtype = find_device(s.device), torch.float64 if s.dtype == "float64" else torch.float32
    if s.dtype == "tf32" and device.type != "cuda":
        raise UserError("dtype=tf32 is a format of NVIDIA GPUs, but this run is on the CPU; use dtype=float32.")
    notes: tuple[str, ...] = ()
    if isinstance(config.dataset, Federation):
        data = config.dataset
    else:
        pool = config.dataset.load(config.data_dir, s.clients, s.partition_seed)
        data = divide(
            pool, config.partition, s.clients,
            split=s.split, source=s.pool, subset=s.subset, server_share=s.server_share, seed=s.partition_seed,
        )  # fmt: skip
        if s.holdout_clients and pool.server is not None:
            notes = ("The data set gives samples of all clients to the server, also of those who are held out",)
    if s.holdout_clients:
        data = hold_out(data, s.holdout_clients, s.partition_seed)
    data = settled(data)
    for note in (*data.notes, *notes):
        log.warning("%s.", note)
    return data.to(device, dtype)


def make_task(config: Config, data: Federation | None = None) -> Task:
    """Data, model, and a check that method, data and model fit together. `data` saves dividing the same data again."""
    s = config.settings
    data = data if data is not None else make_data(config)
    task = Task(
        data, _network(config, data), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay, clip=s.clip,
        batch_size=s.batch_size, epochs=s.local_epochs, rounds=s.rounds, participation=s.participation,
    )  # fmt: skip
    check(config.algorithm, task)
    if s.eval_clients is not None and s.eval_clients > task.clients:
        raise UserError(f"eval_clients asks for {s.eval_clients} clients, but there are {task.clients}.")
    return task


def _network(config: Config, data: Federation) -> Network:
    rows = data.splits["train"].flat[:2]
    sample = data.prepare(data.x[rows])
    if len(sample) == 1:
        sample = torch.cat([sample, sample])
    shape, classes, vocab = tuple(sample.shape[1:]), data.classes, data.token_ids()
    model, half = config.model, config.settings.dtype == "bf16"
    if isinstance(model, nn.Module):  # its values are where everybody starts, whatever the seed
        return Network(lambda: copy.deepcopy(model), config.head, sample, data.dtype, half)
    if isinstance(model, Model):
        return Network(lambda: model.build(shape, classes, vocab), "head", sample, data.dtype, half)
    return Network(model, config.head, sample, data.dtype, half)


def check(alg: Algorithm, task: Task) -> None:
    """Everything about a method and a task that can be wrong and shows before training."""
    n, ratio = task.clients, task.participation
    tests = task.data.splits["test"].sizes
    if not tests[:n].sum():
        raise UserError("No client has test samples, so nothing could be evaluated.")
    if task.data.held_out and not tests[n:].sum():
        raise UserError("No client that is held out has test samples; hold out others, or set holdout_clients=0.")
    if task.network.outputs < task.classes:
        raise UserError(f"The model has {task.network.outputs} outputs, but the data has {task.classes} classes.")
    made, wanted = task.network.positions, tuple(task.data.y.shape[1:])
    if made != wanted:
        say = [f"a label at each of {shape[0]} positions" if shape else "one label" for shape in (made, wanted)]
        other = "lstm_so" if wanted else "lstm_shakes" if task.data.x.dtype == torch.int64 else "mlp"
        raise UserError(f"The model predicts {say[0]} of a sample, but the data has {say[1]}; use one such as {other}.")
    if ratio > 1 and ratio != int(ratio):
        raise UserError(f"participation must be a share up to 1 or a whole number of clients, not {ratio:g}.")
    if ratio > n:
        raise UserError(f"participation asks for {ratio:g} clients, but there are {n}; use a share such as 0.5.")
    everyone = math.floor(ratio * n + 1e-9) == n if ratio <= 1 else ratio == n
    if not alg.partial and not everyone:
        raise UserError(f"{alg.name} needs all clients in every round; set participation=1.")
    if alg.needs_server_data and task.data.server is None:
        raise UserError(f"{alg.name} needs data at the server; set server_share=0.1 or pool=train.")
    if alg.needs_split and not task.network.body and not getattr(alg, "allow_degenerate", False):
        raise UserError(
            f"{alg.name} shares the body of the model, but this model is a single layer; "
            "use another model, or set allow_degenerate=true to run it as Local."
        )
    small = int(task.data.splits["train"].sizes.min())
    need = alg.min_samples(task)
    if small < need:
        raise UserError(f"{alg.name} needs {need} training samples per client, but one has {small}; use fewer clients.")
    alg.check(task)


@dataclass
class Result:
    """The records of a run. `rounds` has a row per evaluated round, `clients` one per client and evaluated round."""

    config: Request
    plan: dict[str, Any]
    partition: str  # digest
    rounds: list[Row]
    clients: pa.Table
    reports: pa.Table  # what the method itself reports, a row per client of a round's cohort; the server is client -1
    timings: list[Row]
    folder: Path | None = None
    state: tuple[Tree, Tree] | None = field(default=None, repr=False)

    @property
    def server(self) -> Tree:
        """What the server has at the end."""
        return self._final[0]

    @property
    def store(self) -> Tree:
        """Private state of the clients at the end, a row each."""
        return self._final[1]

    @cached_property
    def _final(self) -> tuple[Tree, Tree]:
        if self.state is not None:
            return self.state
        assert self.folder is not None
        return Directory(self.folder).final()

    @property
    def seconds(self) -> float:
        return sum(row["train_seconds"] + row["eval_seconds"] for row in self.timings)

    def last(self) -> Row:
        return self.rounds[-1]

    def best_on_validation(self, view: str = "pre") -> Row:
        """The evaluated round with the highest mean validation accuracy; of equals, which few samples make many, the
        one with the lowest validation loss."""
        return self._best(f"{view}_val_acc_mean", f"{view}_val_loss")

    def best_on_test(self, view: str = "pre") -> Row:
        """The papers' protocol: selected on the very numbers it reports, so never quote it alone."""
        return self._best(f"{view}_acc_mean")

    def _best(self, column: str, loss: str | None = None) -> Row:
        scored = [row for row in self.rounds if row.get(column) is not None]
        if not scored:
            return self.rounds[-1]
        return max(
            scored, key=lambda row: (row[column], -row[loss] if loss and math.isfinite(row[loss]) else -math.inf)
        )

    def convergence_round(self, view: str = "pre") -> int:
        """The round in which accuracy stopped rising, as far as it was evaluated."""
        return self.rounds[convergence_round([row[f"{view}_acc_mean"] for row in self.rounds]) - 1]["round"]

    def views(self) -> list[str]:
        """Which models were scored: pre, post, global."""
        return [view for view in VIEWS if f"{view}_acc_mean" in self.last()]

    @property
    def unseen(self) -> list[int]:
        """Clients that were held out, as far as they were evaluated."""
        if "new_acc" not in self.clients.column_names:
            return []
        return self.clients.filter(pc.field("new_acc").is_valid())["client"].unique().to_pylist()

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {"partition": self.partition, "rounds": self.last()["round"], "last": self.last()}
        for name, pick in (("best_on_validation", self.best_on_validation), ("best_on_test", self.best_on_test)):
            found[name] = {view: pick(view) for view in self.views()}
        found["convergence_round"] = {view: self.convergence_round(view) for view in self.views()}
        return found


OnRound = Callable[[int, int, Row | None], None]


def run(
    algorithm: str | Algorithm | type[Algorithm] = "ditto",
    dataset: str | Path | Dataset | Federation = "digits",
    *,
    partition: str | Partition | None = None,
    model: str | Model | nn.Module | Callable[[], nn.Module] | None = None,
    head: str = "head",
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    **values: Any,
) -> Result:
    """Train and evaluate one method.

    `model` is a name, a module (its values are where everybody starts) or a function that builds one (new values for
    every seed); `head` names its last layer. Settings are given by name; `partition__k=2` where two have the same one.
    `out` is a folder in which everything is kept; with `resume`, a run that is there is continued.

    >>> import fedloom
    >>> result = fedloom.run("fedrep", rounds=3, clients=5, seed=1)
    >>> sorted(result.last())[:3]
    ['bytes_down', 'bytes_up', 'cohort']
    """
    values = {key.replace("__", "."): value for key, value in values.items()}
    config = configure(algorithm, dataset, partition, model, head, data_dir, values)
    return execute(config, out=out, resume=resume, on_round=on_round)


def load(folder: str | Path) -> Result:
    """The results of a run directory; of one that is not finished, as far as they are recorded."""
    directory = Directory(Path(folder))
    config, plan, partition, records = directory.contents()
    return _result(config, plan, partition, records, folder=directory.path)


def _result(config: Request, plan: dict[str, Any], partition: str, records: Records, **more: Any) -> Result:
    return Result(config, plan, partition, records.rounds, records.clients, records.reports, records.timings, **more)


def execute(
    config: Config,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    plan: Plan | None = None,
    data: Federation | None = None,
) -> Result:
    """Carry out a run: in memory, or in a directory (`out`), where one that was stopped goes on (`resume`)."""
    directory = None if out is None else Directory(Path(out), config.settings.checkpoint_every)
    if directory is None and resume:
        raise UserError("resume needs out, the folder of the run.")
    if directory is None and config.settings.store == "disk":
        raise UserError("store=disk keeps the clients' state in the folder of the run; give it one with out.")
    if directory is not None and directory.check(describe(config), resume):
        return load(directory.path)
    with _deterministic(config.settings.deterministic), _precise(config.settings.dtype):
        task = make_task(config, data)
        if directory is None:
            return _advance(config, task, None, plan, on_round)
        with directory.claimed(describe(config), resume):
            return _advance(config, task, directory, plan, on_round)


def _advance(
    config: Config, task: Task, directory: Directory | None, plan: Plan | None, on_round: OnRound | None
) -> Result:
    s = config.settings
    partition = directory.keep_partition(task.data) if directory else task.data.digest()
    plan = plan or (directory.plan(task.data.device) if directory else None)
    evaluated = None
    if s.eval_clients is not None:
        evaluated = rng("eval", s.partition_seed).choice(task.clients, s.eval_clients, replace=False)
    unseen, held_out = None, task.data.held_out
    if s.eval_clients is not None and s.eval_clients < held_out:
        few = rng("eval", s.partition_seed, 1).choice(held_out, s.eval_clients, replace=False)
        unseen = task.clients + few
    store = partial(make_store, kind=s.store, folder=directory.store if directory else None)
    with _threads(plan.threads if plan else 0), stoppable() if directory else nullcontext() as wish:
        rounds = Rounds(
            config.algorithm, task, s.seed, s.engine, plan or s.plan, evaluated, store, unseen, s.join_rounds
        )
        records = directory.begin(rounds) if directory else Records()
        if on_round is not None:
            on_round(rounds.t, s.rounds, records.rounds[-1] if records.rounds else None)
        while not _ended(config, rounds, records):
            now = (rounds.t + 1) % s.eval_every == 0 or rounds.t + 1 == s.rounds
            row = records.add(rounds.advance(evaluate=now))
            if row is not None and (rest := config.algorithm.equilibrium(records.rounds)) is not None:
                row["equilibrium"] = rest
            if on_round is not None:
                on_round(rounds.t, s.rounds, row)
            if directory is not None and wish is not None:
                ended = _ended(config, rounds, records)
                directory.keep_round(rounds, records, at_once=wish.asked or ended)
                if wish.asked and not ended:
                    raise Stopped(directory.path, rounds.t, s.rounds)
        result = _result(describe(config), rounds.plan.record(), partition, records)
        if directory is None:
            return dataclasses.replace(result, state=(rounds.server, rounds.store.everyone()["own"]))
        directory.finish(rounds, result.summary())
        return dataclasses.replace(result, folder=directory.path)


def _ended(config: Config, rounds: Rounds, records: Records) -> bool:
    if getattr(config.algorithm, "stop_at_equilibrium", False) and records.rounds:
        return rounds.t == config.settings.rounds or bool(records.rounds[-1]["equilibrium"])
    return rounds.t == config.settings.rounds


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """The number of threads changes the last bits of a result, so a plan keeps it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _precise(dtype: str) -> Iterator[None]:
    """Products of float32 are what they are called, unless less is asked for."""
    places: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = dtype in ("tf32", "bf16")
        yield
    finally:
        for place, allowed in zip(places, before, strict=True):
            place.allow_tf32 = allowed


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first matrix product runs
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # nothing here reads what it has not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
