"""Carrying out runs: a group of runs that differ in seeds and plain numbers is stacked, if that can be done."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.config.resolve import Config, describe, flat
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.core.task import Task
from fedloom.data.dataset import Dataset
from fedloom.device.memory import available_memory
from fedloom.engine.client_store import MemoryStore, make_store
from fedloom.engine.driver import Round
from fedloom.engine.grouping import groups
from fedloom.engine.plan import Plan
from fedloom.engine.planning.choose import REFERENCE
from fedloom.engine.run_group import RunGroup
from fedloom.engine.simulation import Simulation
from fedloom.engine.stacked_settings import differing, numeric_settings
from fedloom.models.zoo import Model
from fedloom.nn.kernels.dispatch import clear_decisions
from fedloom.runs.directory import RunDirectory
from fedloom.runs.interrupt import Stopped, StopRequest, graceful_stop
from fedloom.runs.records import Records, Row
from fedloom.studies.build import eval_client_ids, eval_unseen_ids, make_data, make_task
from fedloom.studies.result import Result, load, make_result

log = logging.getLogger("fedloom")

OnRound = Callable[[int, int, Row | None], None]  # rounds done, rounds in all, row of an evaluated round


def stackable_groups(configs: Sequence[Config]) -> list[list[int]]:
    """Positions of configurations that differ in nothing but seeds and plain numbers, so that they can be stacked."""
    found: dict[Any, list[int]] = {}
    for place, config in enumerate(configs):
        described = flat(describe(config)) | {"seed": 0}
        for owner, name in numeric_settings(config.algorithm, config.settings):
            described[f"algorithm.{name}" if owner == "algorithm" else name] = "a number"
        objects = [id(thing) for thing in (config.dataset, config.model) if not isinstance(thing, Dataset | Model)]
        key = type(config.algorithm), *objects, repr(sorted(described.items()))
        found.setdefault(key, []).append(place)
    return list(found.values())


def execute(
    config: Config,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    data: Federation | None = None,
) -> Result:
    """Carry out one run: in memory, or in a directory (`out`), where a run that was stopped is continued (`resume`)."""
    (result,) = execute_group([config], out=[out], resume=resume, on_round=on_round, data=data)
    return result


def execute_group(
    configs: Sequence[Config],
    *,
    out: Sequence[str | Path | None] | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    data: Federation | None = None,
) -> list[Result]:
    """Carry out runs of one of the `stackable_groups`, stacked where that can be done.

    Each run has its own directory and can be continued by itself. `on_round` receives the number of rounds that are
    done, of all runs together.
    """
    folders = out or [None] * len(configs)
    directories = [
        None if folder is None else RunDirectory(Path(folder), config.settings.checkpoint_every)
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
    if left:
        first = configs[0].settings
        with _deterministic(first.deterministic), _precision(first.dtype), ExitStack() as stack:
            data = data if data is not None else make_data(configs[0])
            tasks = [make_task(configs[place], data) for place in left]
            labels = _labels([configs[place] for place in left])
            runs = []
            for place, task, label in zip(left, tasks, labels, strict=True):
                directory = directories[place]
                if directory is not None:
                    stack.enter_context(directory.claimed(describe(configs[place]), resume))
                runs.append(_Run(configs[place], task, directory, label))
            results |= zip(left, _execute(runs, on_round), strict=True)
    return [results[place] for place in range(len(configs))]


def _labels(configs: Sequence[Config]) -> list[str]:
    """What distinguishes each run in messages: its seed and the numbers in which runs differ."""
    if len(configs) == 1:
        return [""]
    each = [numeric_settings(config.algorithm, config.settings) for config in configs]
    names = differing(each)
    return [
        ", ".join([f" of seed {config.settings.seed}", *(f"{name.name}={values[name]:g}" for name in names)])
        for config, values in zip(configs, each, strict=True)
    ]


class _Run:
    """A run of a group, with its directory and its records."""

    def __init__(self, config: Config, task: Task, directory: RunDirectory | None, label: str) -> None:
        self.config, self.task, self.directory, self.label = config, task, directory, label
        self.partition = directory.keep_partition(task.data) if directory else task.data.digest()
        self.plan = directory.plan(task.data.device) if directory else None  # of an earlier start
        self.records = Records()
        self.done = 0  # rounds

    def start(self) -> Simulation:
        """Make the initial state."""
        s, data = self.config.settings, self.task.data
        self.simulation = Simulation(
            self.config.algorithm,
            self.task,
            s.seed,
            eval_client_ids=eval_client_ids(s, data),
            make_store=partial(make_store, kind=s.store, folder=self.directory.store if self.directory else None),
            unseen=eval_unseen_ids(s, data),
            join_rounds=s.join_rounds,
            label=self.label,
        )
        return self.simulation

    def bytes_in_memory(self) -> int:
        """Memory of the private state of all clients."""
        store, size = self.simulation.store, self.simulation.clients.bytes_per_client
        return len(store) * size if isinstance(store, MemoryStore) else 0

    def begin(self, plan: Plan, up_to: int | None) -> None:
        """Continue from the newest checkpoint, if possible from none after round `up_to`."""
        if self.directory is not None:
            self.records = self.directory.begin(self.simulation, plan, up_to)
        self.done = self.simulation.t

    def add(self, done: Round) -> Row | None:
        """Record a round; returns its row if it was evaluated."""
        row = self.records.add(done)
        if row is not None:
            row |= self.config.algorithm.report_round(self.records.rounds)
        self.done = self.simulation.t
        return row

    @property
    def ended(self) -> bool:
        if self.done == self.config.settings.rounds:
            return True
        return bool(self.records.rounds) and self.config.algorithm.should_stop(self.records.rounds)

    def result(self, plan: Plan) -> Result:
        found = make_result(describe(self.config), plan.record(), self.partition, self.records)
        if self.directory is None:
            state = self.simulation.server, self.simulation.store.everyone()["own"]
            return dataclasses.replace(found, state=state)
        self.directory.finish(self.simulation, found.summary())
        return dataclasses.replace(found, folder=self.directory.path)


def _execute(runs: Sequence[_Run], on_round: OnRound | None) -> list[Result]:
    def report(rows: Sequence[Row | None]) -> None:
        if on_round is not None:
            on_round(sum(run.done for run in runs), len(runs) * runs[0].config.settings.rounds, _mean_row(rows))

    found: dict[int, Result] = {}
    threads = next((run.plan.threads for run in runs if run.plan is not None), 0)
    with _threads(threads), graceful_stop() if runs[0].directory else nullcontext(StopRequest()) as stop:
        for places in _fitting_memory(runs):
            for group, plan in _groups([runs[place] for place in places]):
                mine = [places[place] for place in group]
                if found and stop.requested:
                    raise _stopped(runs)
                found |= zip(mine, _advance([runs[place] for place in mine], plan, stop, report), strict=True)
            for place in places:
                del runs[place].simulation
    return [found[place] for place in range(len(runs))]


def _fitting_memory(runs: Sequence[_Run]) -> Iterator[list[int]]:
    """Positions of runs in parts whose clients' state fits memory together; the runs of a part are started."""
    places = list(range(len(runs)))
    while places:
        first = runs[places[0]]
        first.start()
        free = available_memory(first.task.data.device) // 2
        most = max(1, free // max(1, first.bytes_in_memory()))
        if most < len(places):
            log.info("The clients' state of %d runs fits memory at once; there are %d.", most, len(places))
        some, places = places[:most], places[most:]
        for place in some[1:]:
            runs[place].start()
        yield some


def _groups(runs: Sequence[_Run]) -> Iterator[tuple[list[int], Plan | str]]:
    """Positions of runs that are carried out as one, with their plan, or the mode by which it is made."""
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
        for group in groups([runs[place].simulation for place in rest], s.plan):
            mine = [rest[place] for place in group]
            yield mine, next((plan for place in mine if (plan := runs[place].plan) is not None), s.plan)


def _advance(
    runs: Sequence[_Run], plan: Plan | str, stop: StopRequest, report: Callable[[Sequence[Row | None]], None]
) -> list[Result]:
    """Carry out runs as one, from their last checkpoints to the end."""
    s = runs[0].config.settings
    clear_decisions()
    group = RunGroup([run.simulation for run in runs], plan)
    log.info("Execution plan: %s (%s)", group.plan().mode, group.plan().reason)
    kept = [run.directory.checkpoints.newest() for run in runs if run.directory is not None]
    for number, run in enumerate(runs):  # from a round that all of them have, so that they can be stacked again
        run.begin(group.plan(number), min(kept) if len(kept) > 1 else None)
    report([run.records.rounds[-1] for run in runs if run.records.rounds])
    while going := [number for number, run in enumerate(runs) if not run.ended]:
        t = min(runs[number].done for number in going)
        some = [number for number in going if runs[number].done == t]  # runs that are behind catch up first
        evaluate = (t + 1) % s.eval_every == 0 or t + 1 == s.rounds
        done = group.advance(evaluate, some)
        report([runs[number].add(one) for number, one in zip(some, done, strict=True)])
        saved = [(d, number) for number in some if (d := runs[number].directory) is not None]
        if any(stop.requested or runs[n].ended or d.checkpoints.due(runs[n].simulation) for d, n in saved):
            for directory, number in saved:
                directory.save_round(runs[number].simulation, group.plan(number), runs[number].records)
            cost = sum(directory.checkpoints.cost for directory, _ in saved)
            for directory, _ in saved:
                directory.checkpoints.cost = cost  # all make their checkpoints in the same rounds
        if stop.requested and not all(run.ended for run in runs):
            raise _stopped(runs)
    return [run.result(group.plan(number)) for number, run in enumerate(runs)]


def _stopped(runs: Sequence[_Run]) -> Stopped:
    directory = runs[0].directory
    assert directory is not None
    return Stopped(directory.path, min(run.done for run in runs), runs[0].config.settings.rounds)


def _mean_row(rows: Sequence[Row | None]) -> Row | None:
    """The row of an evaluated round; of several runs, the means of what progress shows."""
    found = [row for row in rows if row is not None]
    if len(found) < 2:
        return found[0] if found else None
    return {name: float(np.mean([row[name] for row in found])) for name in ("pre_acc_mean", "pre_acc_low5")}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Within this context torch uses so many threads, which change the last bits of a result; 0 leaves them as they
    are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """Within this context products of float32 are not rounded to TF32, unless the run's dtype allows it."""
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
    """Within this context torch uses deterministic algorithms, if wanted."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # no uninitialized memory is read here
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
