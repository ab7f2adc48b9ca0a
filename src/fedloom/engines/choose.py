"""Making the execution plan: does stacking pay for this task, how, and how many clients fit at once?"""

from __future__ import annotations

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

from fedloom.core.autodiff import vmap
from fedloom.core.contract import Algorithm, Phase
from fedloom.core.memory import free_memory, let_go, out_of_memory
from fedloom.core.task import Task
from fedloom.core.tree import Tree, size_bytes, tree_flatten
from fedloom.engines import schedule
from fedloom.engines.cohort import Cohort, Executor, score_client
from fedloom.engines.plan import Mode, Plan, Replay
from fedloom.engines.reference import PerClient
from fedloom.engines.runners import Runner, StackedStep, flat_rest
from fedloom.engines.stacked import Stacked
from fedloom.engines.trace import peak_bytes, trace
from fedloom.engines.workers import side_by_side
from fedloom.kernels.convolution import Case, Way, convolutions
from fedloom.kernels.ours import ours
from fedloom.kernels.tune import fastest, ways

log = logging.getLogger("fedloom")

MEMORY_SHARE = 0.5  # of what is free now, for a chunk
MARGIN = 0.9  # stacking takes more memory: it must save a tenth of the time
TRACE_PAYS = 2.0  # seconds of all rounds, below which nothing is traced
ALONE = Plan("per-client", scoring="per-client")
STATE_COPIES = 6  # work, its result, what is kept, what is sent, one more of each while they change hands
SHRINKS = (0.6, 0.7, 0.8, 0.9)
# What is tried at a price must be expected to save a multiple of it. Measured on an H200, in seconds:
TRY_WAY = 0.5  # to compile and time a way of a convolution
COMPILE = 0.12  # for torch's compiler, per operation of a program: 8 s for 60, 20 s for 150
TUNING_SAVES, COMPILER_SAVES = 1 / 5, 1 / 3  # of the steps' time, at most
TIMES = 2.0  # the multiple
PARTS_COPIES = 2  # as they came, and where a step reads them


@dataclass
class Option:
    plan: Plan
    executor: Executor  # with what it got ready while it was measured
    seconds: float  # expected for the steps of a round
    once: float = 0.0  # expected for getting ready
    compiling: float = 0.0  # expected for torch's compiler


def make_executor(alg: Algorithm, task: Task, plan: Plan) -> Executor:
    if plan.mode == "per-client":
        return PerClient(alg, task, plan)
    return Stacked(alg, task, plan)


def choose(alg: Algorithm, task: Task, cohort: Cohort, evaluated: int, force: str = "auto") -> tuple[Plan, Executor]:
    """The plan for rounds with cohorts of this kind in which `evaluated` clients are scored, and who carries it out.
    `force` is auto, stacked, stacked-eager (without traces and graphs) or per-client."""
    why = "asked for"
    if force != "per-client":
        try:
            option = _best(alg, task, cohort, evaluated, force)
            return option.plan, option.executor
        except Exception as error:  # any operation of the method or the model may lack a batched form
            if force != "auto":
                raise
            found = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log.warning("Clients are trained one by one: this model and method cannot be stacked (%s).", found)
            why = f"cannot be stacked: {found}"
    option = _one_by_one(alg, task, cohort, evaluated)
    return replace(option.plan, reason=why), option.executor


def _best(alg: Algorithm, task: Task, cohort: Cohort, evaluated: int, force: str) -> Option:
    captured = _captures(task)
    replay: Replay = "captured" if captured else "traced"
    seen: dict[str, Case] = {}
    with convolutions(None, seen):
        chunk = _chunk(alg, task, cohort, {} if _own_kernels(task) else None)
    if force != "auto":
        replay = "eager" if force == "stacked-eager" else replay
        plan = Plan("stacked", replay, chunk=chunk, convolutions={} if seen else None, reason="asked for")
        return Option(plan, make_executor(alg, task, plan), 0.0)
    alone = _one_by_one(alg, task, cohort, evaluated)
    scoring = _scoring(alg, task, cohort)
    stacked: list[Option] = []
    left_out: list[str] = []

    def measure(plan: Plan) -> Option:
        return _measure_fitting(alg, task, cohort, evaluated, plan)

    def pays(name: str, price: float, share: float) -> bool:
        gain = share * stacked[-1].seconds * task.rounds
        if gain < TIMES * price:
            left_out.append(f"; not {name}: {price:.2g} s to save {gain:.2g} s at most")
        return gain >= TIMES * price

    if not captured:
        stacked.append(measure(Plan("stacked", "eager", scoring, chunk)))
    if captured or min(o.seconds for o in (alone, *stacked)) * task.rounds > TRACE_PAYS:
        stacked.append(measure(Plan("stacked", replay, scoring, chunk, convolutions={} if seen else None)))
        if seen and pays("tuned", _tuning_price(seen.values()), TUNING_SAVES):
            rounded = torch.bfloat16 if task.network.half else torch.float32
            found = fastest(seen.values(), stacked[-1].plan.chunk, task.data.device, rounded)
            stacked.append(measure(replace(stacked[-1].plan, convolutions=found)))
        if captured and pays("compiled", stacked[-1].compiling, COMPILER_SAVES):
            stacked.append(measure(replace(stacked[-1].plan, compiled=True)))
    best = min(stacked, key=partial(_whole, task=task))
    if _whole(best, task) > MARGIN * _whole(alone, task):
        best = alone
    rates = ", ".join(f"{_label(o.plan)} {o.seconds:.3g} s" for o in (alone, *stacked))
    return replace(best, plan=replace(best.plan, reason=f"expected per round: {rates}{''.join(left_out)}"))


def _captures(task: Task) -> bool:
    """Are steps captured as CUDA graphs?"""
    return task.data.device.type == "cuda"


def _tuning_price(cases: Iterable[Case]) -> float:
    """Seconds for trying all ways of these convolutions."""
    return TRY_WAY * sum(len(ways(case)) for case in cases)


def _compiler_price(plan: Plan, phases: list[_Timed]) -> float:
    """Seconds for compiling what is compiled: prefixes of more than half of the chunk, in as few sizes as may be."""
    few = replace(plan, shrink=min(SHRINKS))
    sizes = [{few.prefix(int(active)) for active in phase.active} for phase in phases]
    large = [sum(2 * size > plan.chunk for size in found) for found in sizes]
    return COMPILE * sum(phase.operations * count for phase, count in zip(phases, large, strict=True))


def _own_kernels(task: Task) -> bool:
    """Can stacked convolutions go other ways than torch's?"""
    return ours(task.data.x) and task.dtype == torch.float32


def _one_by_one(alg: Algorithm, task: Task, cohort: Cohort, evaluated: int) -> Option:
    """With all threads for one client after another, or with clients side by side; from a trace where it pays."""
    measure = partial(_measure_per_client, alg, task, cohort, evaluated)
    best, workers = measure(ALONE), min(torch.get_num_threads(), len(cohort))
    if task.data.device.type != "cpu":
        return best
    if workers > 1:
        together = measure(replace(ALONE, workers=workers))
        best = together if together.seconds < MARGIN * best.seconds else best
    if best.seconds * task.rounds > TRACE_PAYS:
        try:
            traced = measure(replace(best.plan, replay="traced"))
        except Exception:  # any operation may lack what tracing needs
            log.info("A client's step cannot be traced.", exc_info=True)
            return best
        best = min(best, traced, key=partial(_whole, task=task))
    return best


def _whole(option: Option, task: Task) -> float:
    """Expected seconds of all rounds."""
    return option.seconds * task.rounds + option.once


def _label(plan: Plan) -> str:
    if plan.mode == "stacked":
        return f"stacked ({plan.replay}{', tuned' * bool(plan.convolutions)}{', compiled' * plan.compiled})"
    notes = [plan.replay] * (plan.replay != "eager") + [f"{plan.workers} side by side"] * (plan.workers > 0)
    return f"per-client ({', '.join(notes)})" if notes else plan.mode


def _chunk(alg: Algorithm, task: Task, cohort: Cohort, own: dict[str, Way] | None = None) -> int:
    """Clients that fit memory together, by what two of them take."""
    few = cohort.rows(np.arange(min(2, len(cohort))))
    each = rehearse(alg, task, few, own) / len(few)
    fit = max(1, int(MEMORY_SHARE * free_memory(task.data.device) / each))
    pieces = -(-len(cohort) // fit)
    return -(-len(cohort) // pieces)


@torch.no_grad()
def rehearse(alg: Algorithm, task: Task, few: Cohort, own: dict[str, Way] | None = None) -> int:
    """Bytes that these clients take together, from the live memory of traced steps. Every function of the method is
    called, so that whatever cannot be stacked shows here."""
    plan = Plan("stacked", "eager", chunk=len(few), convolutions=own)
    stacked = Stacked(alg, task, plan)
    work = start = stacked.begin(few)
    most = 0
    for kind in ("adapt", "train"):
        work = start
        for index, phase in enumerate(stacked.phases[kind]):
            work = stacked.enter((kind, index), phase, work, few)
            stacked.epochs(phase, work, few)
            if phase.until is not None:
                vmap(phase.until)(work)
            timetable = _schedule(task, phase, few, 1)
            tables = timetable.window(task, np.arange(len(few)), 0, 1)
            sides, shared = flat_rest(few)
            inputs = [*(v[0] for v in tables), *tree_flatten(work)[0], *sides, *shared, task.data.x, task.data.y]
            most = max(most, peak_bytes(trace(StackedStep(task, phase, work, few, plan), inputs)))
    stacked.report(work, few)
    stacked.finish(work, few)
    model = stacked.trained(work, few)
    x = task.data.prepare(task.data.x[task.data.splits["train"].flat[:1]])
    vmap(lambda mine: alg.logits(task, mine, x))(model)
    state = STATE_COPIES * (size_bytes(work) + size_bytes(few.own)) + PARTS_COPIES * size_bytes(few.parts)
    return state + most


def _seconds(f: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """The least of a few timings, after one that warms up."""
    f()
    times = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        f()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _all_phases(alg: Algorithm, task: Task) -> list[tuple[str, int, Phase]]:
    """What a round consists of: the phases of training, and those of adaptation before evaluation."""
    kinds = {"train": alg.phases(task), "adapt": alg.adapt(task)}
    return [(kind, index, phase) for kind, phases in kinds.items() for index, phase in enumerate(phases)]


def _share(kind: str, evaluated: int, cohort: Cohort) -> float:
    """How often the cohort's work is done in a round: evaluation adapts all clients that it scores."""
    return 1.0 if kind == "train" else evaluated / len(cohort)


def _epochs(phase: Phase) -> int:
    return phase.epochs if isinstance(phase.epochs, int) else 1


def _schedule(task: Task, phase: Phase, cohort: Cohort, epochs: int) -> schedule.Schedule:
    passes = np.full(len(cohort), epochs)
    return schedule.build(task, phase, cohort.seeds, cohort.ids, cohort.t, passes, run=cohort.run)


@torch.no_grad()
def _scoring(alg: Algorithm, task: Task, cohort: Cohort) -> Mode:
    """Stacked where a client's test samples take little longer than one of them, so that overhead is what is saved."""
    executor = PerClient(alg, task)
    sizes = task.data.splits["test"].sizes[cohort.ids]
    middle = int(np.argsort(sizes)[len(sizes) // 2])
    down, _, info, work = executor.start(cohort.rows(np.array([middle])), 0)
    predict = partial(alg.logits, task, alg.model(task, work, down, info))
    rows = task.data.splits["test"][int(cohort.ids[middle])]
    one, all_ = (_seconds(partial(score_client, task, predict, r), task.data.device) for r in (rows[:1], rows))
    return "stacked" if all_ < 3 * one else "per-client"


@torch.no_grad()
def _measure_per_client(alg: Algorithm, task: Task, cohort: Cohort, evaluated: int, plan: Plan = ALONE) -> Option:
    """Times a few steps of the largest client; with workers, as many of it at once as there are."""
    largest = int(np.argmax(task.data.splits["train"].sizes[cohort.ids]))
    one = cohort.rows(np.array([largest]))
    executor, started = PerClient(alg, task, plan), time.perf_counter()
    for kind in executor.phases:
        executor.get_ready(kind, one)
    once = time.perf_counter() - started if plan.replay == "traced" else 0.0
    down, _, info, start = executor.start(one, 0)
    total, work = 0.0, start
    for kind, index, phase in _all_phases(alg, task):
        work = work if index else start
        if phase.enter is not None:
            work = phase.enter(task, work, down, info)
        timetable = _schedule(task, phase, cohort, _epochs(phase))
        batches = list(itertools.islice(timetable.batches(task, largest), 5))
        if not batches:
            continue
        steps = partial(executor.advance, (kind, index), phase, work, batches, down, info)
        seconds = partial(_seconds, steps, task.data.device)
        crew = range(plan.workers)
        each = max(side_by_side(lambda _: seconds(), crew, len(crew)) if crew else [seconds()]) / len(batches)  # noqa: B023
        total += _share(kind, evaluated, cohort) * each * _longest(timetable.steps, max(1, plan.workers))
    return Option(plan, executor, total, once)


def _longest(steps: np.ndarray, workers: int) -> int:
    """Steps of the worker that has most of them, when each takes the largest client that is left."""
    load = [0] * workers
    for more in sorted(steps.tolist(), reverse=True):
        heapq.heapreplace(load, load[0] + more)
    return max(load)


def _measure_fitting(alg: Algorithm, task: Task, cohort: Cohort, evaluated: int, plan: Plan) -> Option:
    """With as many clients as memory has room for, should that be fewer than expected."""
    while True:
        try:
            return _measure_stacked(alg, task, cohort, evaluated, plan)
        except Exception as error:
            if not out_of_memory(error) or plan.chunk == 1:
                raise
        let_go()
        log.warning("Out of memory with %d clients at once: trying %d.", plan.chunk, -(-plan.chunk // 2))
        plan = replace(plan, chunk=-(-plan.chunk // 2))


@torch.no_grad()
def _measure_stacked(alg: Algorithm, task: Task, cohort: Cohort, evaluated: int, plan: Plan) -> Option:
    """Times the largest and the smallest prefix and draws a line between them; the cohort's own schedule says how often
    each size runs."""
    executor = Stacked(alg, task, plan)
    sizes = task.data.splits["train"].sizes[cohort.ids]
    some = cohort.rows(np.argsort(-sizes, kind="stable")[: plan.chunk])
    work = start = executor.begin(some)
    pieces = -(-len(cohort) // plan.chunk)
    found = []
    for kind, index, phase in _all_phases(alg, task):
        work = executor.enter((kind, index), phase, work if index else start, some)
        timetable = _schedule(task, phase, some, _epochs(phase))
        steps = np.sort(timetable.steps)[::-1]
        if not steps[0]:
            continue
        active = (steps > np.arange(steps[0])[:, None]).sum(1)
        runner = executor.runner((kind, index), phase, work, some)
        grid = sorted({plan.prefix(int(active[0])), plan.prefix(int(active[-1]))})
        timed = [_time_prefix(runner, task, timetable, work, some, prefix) for prefix in grid]
        times = _share(kind, evaluated, cohort) * pieces
        found.append(_Timed(times, active, grid, timed, runner.operations))
    trials = [replace(plan, shrink=shrink) for shrink in (SHRINKS if plan.replay != "eager" else (plan.shrink,))]
    compiling = _compiler_price(plan, found)
    options = [Option(trial, executor, *_expected(trial, found), compiling) for trial in trials]
    best = min(options, key=lambda o: o.seconds * task.rounds + o.once)
    executor.plan = best.plan
    return best


class _Timed(NamedTuple):
    """What was measured of a phase."""

    times: float  # how often a chunk does it in a round
    active: np.ndarray  # clients that still have work, by step
    grid: list[int]  # prefix sizes
    seconds: list[tuple[float, float]]  # to get one ready, and per step
    operations: int  # of a step's program


def _expected(plan: Plan, phases: list[_Timed]) -> tuple[float, float]:
    """Seconds of a round, and once."""
    total = once = 0.0
    for phase in phases:
        prefixes = np.array([plan.prefix(int(a)) for a in phase.active])
        total += phase.times * float(np.interp(prefixes, phase.grid, [step for _, step in phase.seconds]).sum())
        if plan.replay != "eager":
            once += float(np.interp(np.unique(prefixes), phase.grid, [ready for ready, _ in phase.seconds]).sum())
    return total, once


def _time_prefix(
    runner: Runner, task: Task, timetable: schedule.Schedule, work: Tree, some: Cohort, prefix: int
) -> tuple[float, float]:
    """Seconds to get a prefix size ready, and seconds per step of it."""
    length = min(4, int(timetable.steps.max()))
    window = timetable.window(task, np.minimum(np.arange(prefix), len(some) - 1), 0, length)
    state, rest = tree_flatten(work)[0], flat_rest(some)

    def steps() -> None:
        runner.start(state, *rest)
        runner.advance(window, 0, length, prefix)

    start = time.perf_counter()
    steps()
    _wait(task.data.device)
    ready = time.perf_counter() - start
    each = _seconds(steps, task.data.device) / length
    return max(0.0, ready - each * length), each
