"""Timing a few steps of an execution plan, and what else clients do, to predict how long a round takes."""

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.task import Task
from fedloom.core.tree import Tree, tree_flatten
from fedloom.device.memory import free_memory, is_out_of_memory
from fedloom.engine import batching
from fedloom.engine.batching import Schedule
from fedloom.engine.cohort import Cohort, Executor
from fedloom.engine.executors.per_client import PerClientExecutor
from fedloom.engine.executors.phases import phases_of
from fedloom.engine.executors.scoring import score_rows
from fedloom.engine.executors.stacked import StackedExecutor
from fedloom.engine.graph.stacked_step import StepRunner, flat_inputs
from fedloom.engine.plan import Mode, Plan
from fedloom.engine.worker_threads import run_in_threads

log = logging.getLogger("fedloom")

SHRINKS = (0.6, 0.7, 0.8, 0.9)
SAMPLE = 8  # clients, for each worker, whose whole round is timed
SHORT_ROUND = 0.25  # seconds of steps, beyond which what else clients do is not timed
PARALLEL_SECONDS = 0.05  # many times as long as a thread keeps Python's global lock (5 ms)
COMPILE_SECONDS = 0.12  # of torch's compiler per operation of a graph, on an H200: 8 s for 60, 20 s for 150


class Workload(NamedTuple):
    """The work that a plan is made for: an algorithm, a task, a cohort."""

    alg: Algorithm
    task: Task  # what the algorithm sees
    population: Task  # has the samples of all clients, also of held-out ones
    cohort: Cohort  # such as an executor will get
    eval_clients: int  # clients that are scored in a round
    announce: Callable[[str], object] = str  # is told what is done next, such as "tracing a step"

    def share(self, kind: str) -> float:
        """How often the cohort's work is done in a round: evaluation adapts all clients that it scores."""
        return 1.0 if kind == "train" else self.eval_clients / len(self.cohort)

    def phases(self) -> list[tuple[str, int, Phase]]:
        """The phases of training, and those of adaptation before evaluation."""
        kinds = phases_of(self.alg, self.task)
        return [(kind, index, phase) for kind, phases in kinds.items() for index, phase in enumerate(phases)]


@dataclass
class Option:
    """A plan with what is expected of it."""

    plan: Plan
    executor: Executor  # with what was traced and captured while it was measured
    seconds: float  # of the steps of a round
    once: float = 0.0  # of tracing and capturing
    compiling: float = 0.0  # of torch's compiler
    rest: float | None = None  # seconds of a round beside its steps: batches, uploads, scores; None if not measured

    @property
    def round_seconds(self) -> float:
        """Expected seconds of a round, as far as they were measured."""
        return self.seconds + (self.rest or 0.0)

    def total(self, task: Task) -> float:
        """Expected seconds of all rounds."""
        return self.round_seconds * task.rounds + self.once


def comparable(options: Iterable[Option]) -> list[Option]:
    """The options, without the seconds beside steps unless they are known for all."""
    options = list(options)
    known = all(option.rest is not None for option in options)
    return options if known else [replace(option, rest=None) for option in options]


def seconds(function: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """The least of a few timings, after a warm-up."""
    function()
    times = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        function()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def faster_scoring(load: Workload) -> Mode:
    """How to score personal models: stacked if all test samples of a client take less than 3 times as long as one of
    them (overhead dominates), else per client."""
    task, cohort = load.task, load.cohort
    executor = PerClientExecutor(load.alg, task, Plan("per-client"))
    sizes = task.data.splits["test"].sizes[cohort.ids]
    median = int(np.argsort(sizes)[len(sizes) // 2])
    down, _, info, work = executor.start(cohort.rows(np.array([median])), 0)
    predict = partial(load.alg.logits, task, load.alg.model(task, work, down, info))
    rows = task.data.splits["test"][int(cohort.ids[median])]
    one, all_ = (seconds(partial(score_rows, task, predict, r), task.data.device) for r in (rows[:1], rows))
    return "stacked" if all_ < 3 * one else "per-client"


@torch.no_grad()
def measure_per_client(load: Workload, plan: Plan) -> Option:
    """Times a few steps of the largest client, with worker threads in all of them at once, and the whole round of a
    sample of clients if it is short."""
    alg, task, cohort = load.alg, load.task, load.cohort
    largest = int(np.argmax(task.data.splits["train"].sizes[cohort.ids]))
    one = cohort.rows(np.array([largest]))
    executor, started = PerClientExecutor(alg, task, plan, load.population), time.perf_counter()
    for kind in executor.phases:
        executor.prepare(kind, one)
    once = time.perf_counter() - started if plan.replay == "traced" else 0.0
    down, _, info, start = executor.start(one, 0)
    sample = _sample(load, SAMPLE * max(1, plan.workers))
    total, of_sample, work = 0.0, 0.0, start
    for kind, index, phase in load.phases():
        work = work if index else start
        if phase.enter is not None:
            work = phase.enter(task, work, down, info)
        epochs = phase.epochs if isinstance(phase.epochs, int) else int(phase.epochs(task, work, info))
        schedule = batching.for_cohort(task, phase, cohort, max(1, epochs))  # what is left out now comes later
        batches = list(itertools.islice(schedule.batches(task, largest), 5))
        if not batches:
            continue
        steps = partial(executor.advance, (kind, index), phase, work, batches, down, info)
        timed = _seconds_in_threads(steps, plan.workers) if plan.workers else seconds(steps, task.data.device)
        each = load.share(kind) * timed / len(batches)
        total += each * _steps_of_busiest(schedule.steps, max(1, plan.workers))
        of_sample += each * _steps_of_busiest(schedule.steps[sample], max(1, plan.workers))
    rest = None
    if task.data.device.type == "cpu" and of_sample < SHORT_ROUND:
        whole = _whole_round(load, executor, cohort.rows(sample))
        rest = max(0.0, whole * len(cohort) / len(sample) - total)
    return Option(plan, executor, total, once, rest=rest)


def _seconds_in_threads(function: Callable[[], object], workers: int) -> float:
    """Seconds of a call while all workers make such calls, until switches between their threads have their share."""

    def several() -> float:
        start, calls = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < PARALLEL_SECONDS:
            function()
            calls += 1
        return passed / calls

    function()
    return max(run_in_threads(lambda _: several(), range(workers), workers))


def _sample(load: Workload, most: int) -> np.ndarray:
    """Positions of at most so many clients, from the smallest to the largest."""
    order = np.argsort(load.task.data.splits["train"].sizes[load.cohort.ids], kind="stable")
    return order[np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int)]


def _whole_round(load: Workload, executor: Executor, some: Cohort) -> float:
    """Seconds in which these clients train, and their share of all that are scored afterwards. A method without
    personal models is scored as if it had them: that costs about as much as its global model."""

    def train() -> None:
        executor.train(some, ("val", "test"))

    def evaluate() -> None:
        executor.score_personal(some, ("train", "val", "test"))

    return _least_seconds(train) + load.share("adapt") * _least_seconds(evaluate)


def _least_seconds(function: Callable[[], object]) -> float:
    """Of up to three calls, of which slow ones are not repeated."""
    times: list[float] = []
    while len(times) < 3 and sum(times) < SHORT_ROUND / 2:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def _steps_of_busiest(steps: np.ndarray, workers: int) -> int:
    """Steps of the worker that has most of them, when each takes the largest client that is left."""
    load = [0] * workers
    for more in sorted(steps.tolist(), reverse=True):
        heapq.heapreplace(load, load[0] + more)
    return max(load)


def measure_stacked(load: Workload, plan: Plan) -> Option:
    """Times a stacked plan, with fewer clients at once should memory be short."""
    while True:
        try:
            return _measure_stacked(load, plan)
        except Exception as error:
            if not is_out_of_memory(error) or plan.chunk == 1:
                raise
        free_memory()
        log.warning("Out of memory with %d clients at once: trying %d.", plan.chunk, -(-plan.chunk // 2))
        plan = replace(plan, chunk=-(-plan.chunk // 2))


@torch.no_grad()
def _measure_stacked(load: Workload, plan: Plan) -> Option:
    """Times the largest and the smallest prefix and interpolates between them; the cohort's schedule says how often
    each prefix size runs."""
    task, cohort = load.task, load.cohort
    executor = StackedExecutor(load.alg, task, plan, load.population)
    sizes = task.data.splits["train"].sizes[cohort.ids]
    some = cohort.rows(np.argsort(-sizes, kind="stable")[: plan.chunk])
    work = start = executor.begin(some)
    chunks = -(-len(cohort) // plan.chunk)
    found = []
    for kind, index, phase in load.phases():
        work = executor.enter((kind, index), phase, work if index else start, some)
        schedule = batching.for_cohort(task, phase, some, np.maximum(1, executor.epochs(phase, work, some)))
        steps = np.sort(schedule.steps)[::-1]
        if not steps[0]:
            continue
        active = (steps > np.arange(steps[0])[:, None]).sum(1)
        runner = executor.runner((kind, index), phase, work, some)
        prefixes = sorted({plan.prefix(int(active[0])), plan.prefix(int(active[-1]))})
        timed = [_time_prefix(runner, task, schedule, work, some, prefix) for prefix in prefixes]
        found.append(_TimedPhase(load.share(kind) * chunks, active, prefixes, timed, runner.operations))
    trials = [replace(plan, shrink=shrink) for shrink in (SHRINKS if plan.replay != "eager" else (plan.shrink,))]
    compiling = _compiler_seconds(plan, found)
    options = [Option(trial, executor, *_expected(trial, found), compiling) for trial in trials]
    best = min(options, key=lambda option: option.total(task))
    executor.plan = best.plan
    if plan.replay == "eager" and best.seconds < SHORT_ROUND:
        best = replace(best, rest=max(0.0, _whole_round(load, executor, cohort) - best.seconds))
    return best


class _TimedPhase(NamedTuple):
    """What was measured of a phase."""

    times: float  # how often a chunk does it in a round
    active: np.ndarray  # clients that still have batches, by step
    prefixes: list[int]
    seconds: list[tuple[float, float]]  # by prefix: to trace or capture it, and per step
    operations: int  # of a step's graph


def _expected(plan: Plan, phases: list[_TimedPhase]) -> tuple[float, float]:
    """Expected seconds per round, and one-time seconds for tracing or capturing."""
    total = once = 0.0
    for phase in phases:
        prefixes = np.array([plan.prefix(int(a)) for a in phase.active])
        total += phase.times * float(np.interp(prefixes, phase.prefixes, [step for _, step in phase.seconds]).sum())
        if plan.replay != "eager":
            once += float(np.interp(np.unique(prefixes), phase.prefixes, [ready for ready, _ in phase.seconds]).sum())
    return total, once


def _compiler_seconds(plan: Plan, phases: list[_TimedPhase]) -> float:
    """Seconds of torch's compiler for what it compiles: prefixes of more than half of the chunk, in as few sizes as
    possible."""
    few = replace(plan, shrink=min(SHRINKS))
    sizes = [{few.prefix(int(active)) for active in phase.active} for phase in phases]
    large = [sum(2 * size > plan.chunk for size in found) for found in sizes]
    return COMPILE_SECONDS * sum(phase.operations * count for phase, count in zip(phases, large, strict=True))


def _time_prefix(
    runner: StepRunner, task: Task, schedule: Schedule, work: Tree, some: Cohort, prefix: int
) -> tuple[float, float]:
    """Seconds to trace or capture a prefix size, and seconds per step of it."""
    length = min(4, int(schedule.steps.max()))
    window = schedule.window(task, np.minimum(np.arange(prefix), len(some) - 1), 0, length)
    state, rest = tree_flatten(work)[0], flat_inputs(some)

    def steps() -> None:
        runner.start(state, *rest)
        runner.advance(window, 0, length, prefix)

    start = time.perf_counter()
    steps()
    _synchronize(task.data.device)
    ready = time.perf_counter() - start
    each = seconds(steps, task.data.device) / length
    return max(0.0, ready - each * length), each
