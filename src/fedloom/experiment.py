"""A run from its settings to its results: config -> task -> rounds -> records."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

from fedloom.config import Config, Request, Settings, configure, describe, flat
from fedloom.core.contract import Algorithm
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.core.keys import rng
from fedloom.core.memory import free_memory
from fedloom.core.network import Network
from fedloom.core.task import Task
from fedloom.core.tree import Tree, size_bytes
from fedloom.data.divide import divide, hold_out, settled
from fedloom.data.partitions import Partition
from fedloom.data.pool import Dataset
from fedloom.engines.plan import Plan
from fedloom.engines.rounds import REFERENCE, Round, Rounds
from fedloom.engines.store import MemoryStore, make_store
from fedloom.engines.together import Together, groups, numbers
from fedloom.metrics.scores import convergence_round
from fedloom.models.zoo import Model
from fedloom.runs.directory import Directory
from fedloom.runs.interrupt import Stopped, Wish, stoppable
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


def evaluated(s: Settings, data: Federation) -> np.ndarray | None:
    """Which clients are, where it is not all of them."""
    if s.eval_clients is None or s.eval_clients > data.clients:
        return None
    return rng("eval", s.partition_seed).choice(data.clients, s.eval_clients, replace=False)


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
    data: Federation | None = None,
) -> Result:
    """Carry out a run: in memory, or in a directory (`out`), where one that was stopped goes on (`resume`)."""
    (result,) = execute_together([config], out=[out], resume=resume, on_round=on_round, data=data)
    return result


def alike(configs: Sequence[Config]) -> list[list[int]]:
    """Which of the configurations differ in nothing but seeds and plain numbers, so that they can be one run."""
    found: dict[Any, list[int]] = {}
    for place, config in enumerate(configs):
        described = flat(describe(config)) | {"seed": 0}
        for owner, name in numbers(config.algorithm, config.settings):
            described[f"algorithm.{name}" if owner == "algorithm" else name] = "a number"
        objects = [id(thing) for thing in (config.dataset, config.model) if not isinstance(thing, Dataset | Model)]
        key = type(config.algorithm), *objects, repr(sorted(described.items()))
        found.setdefault(key, []).append(place)
    return list(found.values())


def execute_together(
    configs: Sequence[Config],
    *,
    out: Sequence[str | Path | None] | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    data: Federation | None = None,
) -> list[Result]:
    """Carry out runs that are `alike`, as one run where that can be done. Each has its own directory, and can be
    continued by itself. `on_round` is told how many rounds are done, of all runs together."""
    folders = out or [None] * len(configs)
    directories = [
        None if folder is None else Directory(Path(folder), config.settings.checkpoint_every)
        for config, folder in zip(configs, folders, strict=True)
    ]
    results: dict[int, Result] = {}
    for place, (config, directory) in enumerate(zip(configs, directories, strict=True)):
        if directory is None and resume:
            raise UserError("resume needs out, the folder of the run.")
        if directory is None and config.settings.store == "disk":
            raise UserError("store=disk keeps the clients' state in the folder of the run; give it one with out.")
        if directory is not None and directory.check(describe(config), resume):
            results[place] = load(directory.path)
    left = [place for place in range(len(configs)) if place not in results]
    first = configs[0].settings
    if left:
        with _deterministic(first.deterministic), _precise(first.dtype), ExitStack() as stack:
            data = data if data is not None else make_data(configs[0])
            tasks = [make_task(configs[place], data) for place in left]
            runs = []
            for place, task in zip(left, tasks, strict=True):
                directory = directories[place]
                if directory is not None:
                    stack.enter_context(directory.claimed(describe(configs[place]), resume))
                runs.append(_Run(configs[place], task, directory))
            results |= zip(left, _carry_out(runs, on_round), strict=True)
    return [results[place] for place in range(len(configs))]


class _Run:
    """One of the runs that are carried out together."""

    def __init__(self, config: Config, task: Task, directory: Directory | None) -> None:
        self.config, self.task, self.directory = config, task, directory
        self.partition = directory.keep_partition(task.data) if directory else task.data.digest()
        self.plan = directory.plan(task.data.device) if directory else None  # of an earlier start
        self.records = Records()
        self.done = 0  # rounds

    def start(self) -> None:
        """Makes its state, which then waits for a plan."""
        s, task = self.config.settings, self.task
        unseen, held_out = None, task.data.held_out
        if s.eval_clients is not None and s.eval_clients < held_out:
            few = rng("eval", s.partition_seed, 1).choice(held_out, s.eval_clients, replace=False)
            unseen = task.clients + few
        store = partial(make_store, kind=s.store, folder=self.directory.store if self.directory else None)
        self.rounds = Rounds(
            self.config.algorithm, task, s.seed, plan=None,
            evaluated=evaluated(s, task.data), store=store, unseen=unseen, join_rounds=s.join_rounds,
        )  # fmt: skip

    def bytes_in_memory(self) -> int:
        store = self.rounds.store
        return len(store) * size_bytes(store.like) if isinstance(store, MemoryStore) else 0

    def begin(self, up_to: int | None) -> None:
        if self.directory is not None:
            self.records = self.directory.begin(self.rounds, up_to)
        self.done = self.rounds.t

    def add(self, done: Round) -> Row | None:
        row = self.records.add(done)
        if row is not None and (rest := self.config.algorithm.equilibrium(self.records.rounds)) is not None:
            row["equilibrium"] = rest
        self.done = self.rounds.t
        return row

    @property
    def ended(self) -> bool:
        if self.done == self.config.settings.rounds:
            return True
        stops = getattr(self.config.algorithm, "stop_at_equilibrium", False)
        return bool(stops and self.records.rounds and self.records.rounds[-1]["equilibrium"])

    def result(self) -> Result:
        found = _result(describe(self.config), self.rounds.plan.record(), self.partition, self.records)
        if self.directory is None:
            return dataclasses.replace(found, state=(self.rounds.server, self.rounds.store.everyone()["own"]))
        self.directory.finish(self.rounds, found.summary())
        return dataclasses.replace(found, folder=self.directory.path)


def _carry_out(runs: Sequence[_Run], on_round: OnRound | None) -> list[Result]:
    def tell(rows: Sequence[Row | None]) -> None:
        if on_round is not None:
            on_round(sum(run.done for run in runs), len(runs) * runs[0].config.settings.rounds, _mean_row(rows))

    found: dict[int, Result] = {}
    threads = next((run.plan.threads for run in runs if run.plan is not None), 0)
    with _threads(threads), stoppable() if runs[0].directory else nullcontext(Wish()) as wish:
        for places in _in_memory(runs):
            for group, plan in _arranged([runs[place] for place in places]):
                mine = [places[place] for place in group]
                if found and wish.asked:
                    raise _stopped(runs)
                found |= zip(mine, _advance([runs[place] for place in mine], plan, wish, tell), strict=True)
            for place in places:
                del runs[place].rounds
    return [found[place] for place in range(len(runs))]


def _in_memory(runs: Sequence[_Run]) -> Iterator[list[int]]:
    """The runs in pieces whose clients' state fits memory together, started."""
    places = list(range(len(runs)))
    while places:
        first = runs[places[0]]
        first.start()
        free = free_memory(first.task.data.device) // 2
        most = max(1, free // max(1, first.bytes_in_memory()))
        if most < len(places):
            log.info("The clients' state of %d runs fits memory at once; there are %d.", most, len(places))
        some, places = places[:most], places[most:]
        for place in some[1:]:
            runs[place].start()
        yield some


def _arranged(runs: Sequence[_Run]) -> Iterator[tuple[list[int], Plan | str]]:
    """Which runs are one, with a plan for them, or how it is to be made."""
    s = runs[0].config.settings
    rest = []
    for place, run in enumerate(runs):
        if run.plan is not None and (run.plan.runs == 1 or len(runs) == 1):
            yield [place], run.plan  # it was started on its own, and stays so
        else:
            rest.append(place)
    if rest and s.engine == "reference":
        yield rest, REFERENCE
    elif rest:
        for group in groups([runs[place].rounds for place in rest], s.plan):
            mine = [rest[place] for place in group]
            yield mine, next((plan for place in mine if (plan := runs[place].plan) is not None), s.plan)


def _advance(
    runs: Sequence[_Run], plan: Plan | str, wish: Wish, tell: Callable[[Sequence[Row | None]], None]
) -> list[Result]:
    s = runs[0].config.settings
    together = Together([run.rounds for run in runs], plan)
    kept = [run.directory.checkpoints.newest() for run in runs if run.directory is not None]
    for run in runs:  # from a round that all of them have, so that what was one run is one again
        run.begin(min(kept) if len(kept) > 1 else None)
    tell([run.records.rounds[-1] for run in runs if run.records.rounds])
    while going := [number for number, run in enumerate(runs) if not run.ended]:
        t = min(runs[number].done for number in going)
        some = [number for number in going if runs[number].done == t]  # who is behind goes on until they meet
        now = (t + 1) % s.eval_every == 0 or t + 1 == s.rounds
        done = together.advance(now, some)
        tell([runs[number].add(one) for number, one in zip(some, done, strict=True)])
        places = [(d, run) for run in (runs[number] for number in some) if (d := run.directory) is not None]
        if any(wish.asked or run.ended or directory.checkpoints.due(run.rounds) for directory, run in places):
            for directory, run in places:
                directory.keep_round(run.rounds, run.records)
            cost = sum(directory.checkpoints.cost for directory, _ in places)
            for directory, _ in places:
                directory.checkpoints.cost = cost  # one is due when all are, and all of them take time
        if wish.asked and not all(run.ended for run in runs):
            raise _stopped(runs)
    return [run.result() for run in runs]


def _stopped(runs: Sequence[_Run]) -> Stopped:
    directory = runs[0].directory
    assert directory is not None
    return Stopped(directory.path, min(run.done for run in runs), runs[0].config.settings.rounds)


def _mean_row(rows: Sequence[Row | None]) -> Row | None:
    """What is told of an evaluated round: of one run all there is, of several the means."""
    found = [row for row in rows if row is not None]
    if len(found) < 2:
        return found[0] if found else None
    return {name: float(np.mean([row[name] for row in found])) for name in ("pre_acc_mean", "pre_acc_low5")}


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
