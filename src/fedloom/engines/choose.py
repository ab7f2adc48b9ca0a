"""Making the execution plan: does stacking pay for this task, how, and how many clients fit at once?"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fedloom.core.contract import Algorithm, Phase
from fedloom.core.task import Task
from fedloom.core.tree import Tree, size_bytes, take, tree_flatten
from fedloom.engines import schedule
from fedloom.engines.cohort import Cohort
from fedloom.engines.plan import Plan, Replay
from fedloom.engines.reference import PerClient
from fedloom.engines.runners import StackedStep
from fedloom.engines.stacked import Stacked
from fedloom.engines.trace import peak_bytes, trace

log = logging.getLogger("fedloom")

MEMORY_SHARE = 0.5  # of what is free now, for a chunk
STATE_COPIES = 6  # work, its result, what is kept, what is sent, one more of each while they change hands


def choose(alg: Algorithm, task: Task, seed: int, cohort: Cohort, force: str = "auto") -> Plan:
    """The plan for runs of this cohort's kind. `force` is auto, stacked or per-client."""
    if force == "per-client":
        return Plan("per-client", reason="asked for")
    captured = task.data.device.type == "cuda"
    replay: Replay = "captured" if captured else "traced"
    try:
        chunk = _chunk(alg, task, seed, cohort)
    except Exception as error:  # any operation of the method or the model may lack a batched form
        if force == "stacked":
            raise
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        log.warning("Clients are trained one by one: this model and method cannot be stacked (%s).", why)
        return Plan("per-client", reason=f"cannot be stacked: {why}")
    if force == "stacked":
        return Plan("stacked", replay, chunk, reason="asked for")
    options = [_measure_per_client(alg, task, seed, cohort)]
    if not captured:
        options.append(_measure_stacked(alg, task, seed, cohort, Plan("stacked", "eager", chunk)))
    if captured or min(o.seconds for o in options) * task.rounds > 2.0:  # below, a trace does not pay for itself
        options.append(_measure_stacked(alg, task, seed, cohort, Plan("stacked", replay, chunk)))
    best = min(options, key=lambda o: o.seconds * task.rounds + o.once)
    rates = ", ".join(f"{_label(o.plan)} {o.seconds * 1e3:.3g} ms" for o in options)
    return Plan(best.plan.mode, best.plan.replay, best.plan.chunk, reason=f"expected per round: {rates}")


def _label(plan: Plan) -> str:
    return plan.mode if plan.mode == "per-client" else f"stacked ({plan.replay})"


@dataclass
class Option:
    plan: Plan
    seconds: float  # expected for the steps of a round
    once: float  # expected for getting ready


def _chunk(alg: Algorithm, task: Task, seed: int, cohort: Cohort) -> int:
    """Clients that fit memory together, from the live memory of a traced step for two clients."""
    few = cohort.rows(np.arange(min(2, len(cohort))))
    stacked = Stacked(alg, task, seed, Plan("stacked", "eager", len(few)))
    with torch.no_grad():
        work = stacked.begin(few)
        need = STATE_COPIES * (size_bytes(work) + size_bytes(few.own))
        most = 0
        for phase in stacked.phases["train"]:
            if phase.enter is not None:
                work = stacked._each(phase.enter, few, work, few.info)
            step = StackedStep(task, phase, work, few.parts, few.info, few.shared)
            timetable = schedule.build(task, phase, seed, few.ids, few.t, np.ones(len(few), dtype=np.int64))
            window = timetable.window(task, np.arange(len(few)), np.arange(1))
            inputs = [tree_flatten(v)[0] for v in (work, (few.parts, few.info), few.shared)]
            flat = [*(v[0] for v in window), *inputs[0], *inputs[1], *inputs[2], task.data.x, task.data.y]
            most = max(most, peak_bytes(trace(step, flat)))
    per_client = (need + most) / len(few)
    fit = max(1, int(MEMORY_SHARE * free_memory(task.data.device) / per_client))
    pieces = -(-len(cohort) // fit)
    return -(-len(cohort) // pieces)


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not told on this system
        return 4 << 30


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


def _epochs(phase: Phase) -> int:
    return phase.epochs if isinstance(phase.epochs, int) else 1


@torch.no_grad()
def _measure_per_client(alg: Algorithm, task: Task, seed: int, cohort: Cohort) -> Option:
    executor = PerClient(alg, task, seed)
    largest = int(np.argmax(task.data.splits["train"].sizes[cohort.ids]))
    down, _, info, work = executor.start(cohort, largest)
    total = 0.0
    for phase in alg.phases(task):
        if phase.enter is not None:
            work = phase.enter(task, work, down, info)
        timetable = schedule.build(task, phase, seed, cohort.ids, cohort.t, np.full(len(cohort), _epochs(phase)))
        if not timetable.steps[largest]:
            continue

        def steps(phase: Phase = phase, timetable: schedule.Schedule = timetable, work: Tree = work) -> None:
            for batch in itertools.islice(timetable.batches(task, largest), 5):
                work = phase.step(task, work, batch, down, info)

        each = _seconds(steps, task.data.device) / min(5, int(timetable.steps[largest]))
        total += each * int(timetable.steps.sum())
    return Option(Plan("per-client"), total, 0.0)


@torch.no_grad()
def _measure_stacked(alg: Algorithm, task: Task, seed: int, cohort: Cohort, plan: Plan) -> Option:
    """Times two prefix sizes and draws a line between them; the cohort's own schedule says how often each size runs."""
    executor = Stacked(alg, task, seed, plan)
    sizes = task.data.splits["train"].sizes[cohort.ids]
    some = cohort.rows(np.argsort(-sizes, kind="stable")[: plan.chunk])
    work = executor.begin(some)
    pieces = -(-len(cohort) // plan.chunk)
    total, once = 0.0, 0.0
    for index, phase in enumerate(executor.phases["train"]):
        if phase.enter is not None:
            work = executor._each(phase.enter, some, work, some.info)
        timetable = schedule.build(task, phase, seed, some.ids, some.t, np.full(len(some), _epochs(phase)))
        timetable = timetable.rows(np.argsort(-timetable.steps, kind="stable"))
        if not timetable.steps[0]:
            continue
        active = (timetable.steps[None, :] > np.arange(timetable.steps[0])[:, None]).sum(1)
        prefixes = np.array([plan.prefix(int(a), len(some)) for a in active])
        points: dict[int, float] = {}
        for prefix in {int(prefixes[0]), int(prefixes[-1])}:
            start = time.perf_counter()
            runner = executor._runner(("train", index), phase, work, some)
            length = min(4, int(timetable.steps[0]))
            window = timetable.window(task, np.minimum(np.arange(prefix), len(some) - 1), np.arange(length))

            def steps(prefix: int = prefix, window: schedule.Window = window, length: int = length) -> None:
                runner.start(tree_flatten(work)[0], tree_flatten((some.parts, some.info))[0], tree_flatten(some.shared)[0])  # noqa: B023, E501
                runner.advance(window, 0, length, prefix)  # noqa: B023

            steps()
            ready = time.perf_counter() - start
            points[prefix] = _seconds(steps, task.data.device) / length
            if plan.replay != "eager":
                once += max(0.0, ready - points[prefix] * length) * len(np.unique(prefixes)) / 2
        grid = sorted(points)
        total += pieces * float(np.interp(prefixes, grid, [points[g] for g in grid]).sum())
        work = take(work, slice(None))
    return Option(plan, total, once)
