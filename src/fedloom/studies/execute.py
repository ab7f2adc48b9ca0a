"""Carrying out runs: a group of runs that differ in seeds and plain numbers is stacked, if that can be done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.cluster.actors import session
from fedloom.cluster.clients import ShardedClients
from fedloom.cluster.run import threads as actor_threads
from fedloom.config.resolve import Config, describe
from fedloom.config.settings import Settings
from fedloom.core.errors import UserError
from fedloom.core.federation import Federation
from fedloom.device.memory import available_memory, limited_memory
from fedloom.device.torch_settings import deterministic, precision, threads
from fedloom.engine.grouping import groups
from fedloom.engine.plan import Plan
from fedloom.engine.planning.choose import REFERENCE
from fedloom.engine.run_group import RunGroup
from fedloom.engine.stacked_settings import differing, numeric_settings
from fedloom.nn.kernels.dispatch import clear_decisions, decisions
from fedloom.runs.directory import RunDirectory
from fedloom.runs.interrupt import Stopped, StopRequest, graceful_stop
from fedloom.runs.records import Row
from fedloom.studies.build import check_more_rounds, make_data, make_task, memory_of_run
from fedloom.studies.callbacks import Callback, EarlyStopping, TrainingRun, checked
from fedloom.studies.recorded_run import MakeClients, RecordedRun
from fedloom.studies.result import Result, load_run

log = logging.getLogger("fedloom")

# rounds done, rounds in all, row of an evaluated round; returns True to end the runs
OnRound = Callable[[int, int, Row | None], bool | None]


def execute(config: Config, *, out: str | Path | None = None, **options: Any) -> Result:
    """Carry out one run: in memory, or in a directory (`out`); `options` are those of `execute_group`."""
    (result,) = execute_group([config], out=[out], **options)
    return result


def execute_group(
    configs: Sequence[Config],
    *,
    out: Sequence[str | Path | None] | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    callbacks: Sequence[Callback] = (),
    names: Sequence[str] | None = None,
    number: tuple[int, int] = (1, 1),
    data: Federation | None = None,
    make_clients: MakeClients | None = None,
) -> list[Result]:
    """Carry out runs of one of `study.stackable_groups`, stacked where that can be done.

    Each run has its own directory and can be continued by itself. `on_round` receives the number of rounds that are
    done, of all runs together. `names` are those of the runs in a study, in which this group has a `number`. Of a run
    whose clients are not in this process, `data` are what the server knows, and `make_clients` makes these clients.
    """
    callbacks = [*early_stopping(configs[0].settings), *checked(callbacks)]
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
            results[place] = load_run(directory.path)
    left = [place for place in range(len(configs)) if place not in results]
    if left:
        first = configs[0].settings
        with deterministic(first.deterministic), precision(first.dtype), session(), ExitStack() as stack:
            stack.enter_context(limited_memory(*memory_of_run(configs[0])))
            data = data if data is not None else make_data(configs[0])
            tasks = [make_task(configs[place], data) for place in left]
            labels = _labels([configs[place] for place in left])
            runs: list[RecordedRun] = []
            for place, task, label in zip(left, tasks, labels, strict=True):
                directory = directories[place]
                if directory is not None:
                    check_more_rounds(configs[place].algorithm, task, directory.rounds_before, directory.path)
                    stack.enter_context(directory.claimed(describe(configs[place]), resume))
                runs.append(RecordedRun(configs[place], task, directory, label, make_clients))
            titles = [names[place] if names else configs[place].algorithm.name for place in left]
            seen = [TrainingRun(run, name, number, len(runs)) for run, name in zip(runs, titles, strict=True)]
            results |= zip(left, _execute(runs, on_round, Callbacks(callbacks, seen)), strict=True)
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


class Callbacks:
    """Calls the callbacks of some runs."""

    def __init__(self, callbacks: Sequence[Callback], runs: Sequence[TrainingRun]) -> None:
        self.callbacks, self.runs = callbacks, runs

    def call(self, event: str, which: Iterable[int], *args: Any) -> None:
        """Call one of the functions of `Callback` for the runs at these positions."""
        for number in which:
            for callback in self.callbacks:
                getattr(callback, event)(self.runs[number], *args)


def early_stopping(s: Settings) -> list[Callback]:
    """The callback of the settings `early_stopping` and `min_delta`."""
    return [] if s.early_stopping is None else [EarlyStopping(s.early_stopping, s.min_delta)]


def _execute(runs: Sequence[RecordedRun], on_round: OnRound | None, callbacks: Callbacks) -> list[Result]:
    def report(rows: Sequence[Row | None]) -> None:
        total = len(runs) * runs[0].config.settings.rounds
        if on_round is not None and on_round(sum(run.done for run in runs), total, _mean_row(rows)) is True:
            for run in runs:
                run.stopped = "on_round returned True"

    found: dict[int, Result] = {}
    callbacks.call("on_setup", range(len(runs)))
    planned = next((run.plan.threads for run in runs if run.plan is not None), actor_threads(runs[0].config.settings))
    with threads(planned), graceful_stop() if runs[0].directory else nullcontext(StopRequest()) as stop:
        for places in _fitting_memory(runs):
            for group, plan in _groups([runs[place] for place in places]):
                mine = [places[place] for place in group]
                if found and stop.requested:
                    raise _stopped(runs)
                some = Callbacks(callbacks.callbacks, [callbacks.runs[place] for place in mine])
                found |= zip(mine, _advance([runs[place] for place in mine], plan, stop, report, some), strict=True)
            for place in places:
                del runs[place].simulation
    return [found[place] for place in range(len(runs))]


def _fitting_memory(runs: Sequence[RecordedRun]) -> Iterator[list[int]]:
    """Positions of runs in parts whose clients' state fits memory together; the runs of a part are started."""
    places = list(range(len(runs)))
    while places:
        first = runs[places[0]]
        first.start()
        free = available_memory(first.task.data.device) // 2
        most = max(1, free // max(1, first.bytes_in_memory()))
        if isinstance(first.simulation.clients, ShardedClients):
            most = 1  # actors serve one run at a time
        elif most < len(places):
            log.info("The clients' state of %d runs fits memory at once; there are %d.", most, len(places))
        some, places = places[:most], places[most:]
        for place in some[1:]:
            runs[place].start()
        yield some


def _groups(runs: Sequence[RecordedRun]) -> Iterator[tuple[list[int], Plan | str]]:
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
    elif rest and isinstance(clients := runs[rest[0]].simulation.clients, ShardedClients):
        yield rest, clients.make_plan(runs[rest[0]].simulation.driver, s.plan)  # it is a single run
    elif rest:
        for group in groups([runs[place].simulation for place in rest], s.plan):
            mine = [rest[place] for place in group]
            yield mine, next((plan for place in mine if (plan := runs[place].plan) is not None), s.plan)


def _advance(
    runs: Sequence[RecordedRun],
    plan: Plan | str,
    stop: StopRequest,
    report: Callable[[Sequence[Row | None]], None],
    callbacks: Callbacks,
) -> list[Result]:
    """Carry out runs as one, from their last checkpoints to the end."""
    clear_decisions()
    start = time.perf_counter()
    group = RunGroup(
        [run.simulation for run in runs], plan, lambda step: callbacks.call("on_planning", range(len(runs)), step)
    )
    planning = (time.perf_counter() - start) / len(runs)
    kernels = decisions(runs[0].task.data.device).get("all", "chosen as steps are traced, see below")
    log.info("Execution plan: %s (%s). Custom kernels: %s.", group.plan().summary(), group.plan().reason, kernels)
    up_to = None
    if len(runs) > 1:  # from a round that all of them have, so that they can be stacked again
        up_to = min((run.directory.checkpoints.newest() for run in runs if run.directory is not None), default=None)
    for number, run in enumerate(runs):
        run.begin(group.plan(number), up_to)
    callbacks.call("on_start", range(len(runs)))
    report([run.records.rounds[-1] for run in runs if run.records.rounds])
    while going := [number for number, run in enumerate(runs) if not run.ended]:
        t = min(runs[number].done for number in going)
        some = [number for number in going if runs[number].done == t]  # runs that are behind catch up first
        done = group.advance(any(runs[number].evaluates(t + 1) for number in some), some)
        rows = [runs[number].add(one, planning) for number, one in zip(some, done, strict=True)]
        planning = 0.0  # it is part of the first round's time
        callbacks.call("on_evaluation", [number for number, row in zip(some, rows, strict=True) if row is not None])
        callbacks.call("on_round", some)
        report(rows)
        stop.requested = stop.requested or any(run.paused for run in runs)
        saved = [(d, number) for number in some if (d := runs[number].directory) is not None]
        if any(stop.requested or runs[n].ended or d.checkpoints.due(runs[n].simulation) for d, n in saved):
            for directory, number in saved:
                directory.save_round(runs[number].simulation, group.plan(number), runs[number].records)
            cost = sum(directory.checkpoints.cost for directory, _ in saved)
            for directory, _ in saved:
                directory.checkpoints.cost = cost  # all make their checkpoints in the same rounds
        if stop.requested and not all(run.ended for run in runs):
            raise _stopped(runs)
    results = [run.result(group, number) for number, run in enumerate(runs)]
    for number, result in enumerate(results):
        callbacks.call("on_end", [number], result)
    return results


def _stopped(runs: Sequence[RecordedRun]) -> Stopped:
    directory = runs[0].directory
    assert directory is not None
    return Stopped(directory.path, min(run.done for run in runs), runs[0].config.settings.rounds)


def _mean_row(rows: Sequence[Row | None]) -> Row | None:
    """The row of an evaluated round; of several runs, the means of what progress shows."""
    found = [row for row in rows if row is not None]
    if len(found) < 2:
        return found[0] if found else None
    shown = [name for name in found[0] if name.startswith("pre_") and name.endswith(("_mean", "_low5"))]
    return {name: float(np.mean([row[name] for row in found])) for name in shown if all(name in row for row in found)}
