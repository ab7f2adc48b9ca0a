"""Choosing the execution plan: whether stacking pays for this task, how steps are replayed, how many clients fit."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch

from fedloom.core.algorithm import Algorithm
from fedloom.core.authors import describe_failure
from fedloom.core.task import Task
from fedloom.device.memory import available_memory, free_memory
from fedloom.engine.cohort import Cohort, Executor
from fedloom.engine.executors.per_client import PerClientExecutor
from fedloom.engine.executors.stacked import StackedExecutor
from fedloom.engine.plan import Plan, Replay
from fedloom.engine.planning.dry_run import dry_run
from fedloom.engine.planning.measure import (
    Option,
    Workload,
    comparable,
    faster_scoring,
    measure_per_client,
    measure_stacked,
)
from fedloom.engine.planning.plan_cache import find_plan, keep_plan, plan_inputs
from fedloom.engine.planning.tuning import candidates, fastest_algos
from fedloom.nn.kernels.convolution import Algo, ConvCase, convolutions
from fedloom.nn.kernels.dispatch import has_cuda_kernels

log = logging.getLogger("fedloom")

MEMORY_SHARE = 0.5  # of what is free now, for a chunk
MARGIN = 0.9  # stacking takes more memory, so it must save a tenth of the time
PER_CLIENT_GAIN = 1.5  # threads make one client after another at most so much faster than their number (2 for traces)
TRACE_PAYS = 2.0  # seconds of all rounds, below which nothing is traced
PER_CLIENT = Plan("per-client", scoring="per-client")
REFERENCE = replace(PER_CLIENT, reason="reference engine")
# What takes time to try must be expected to save a multiple of it. Measured on an H200:
SECONDS_PER_ALGO = 0.5  # to compile and time an algorithm of a convolution
TUNING_SAVES, COMPILER_SAVES = 1 / 5, 1 / 3  # of the steps' time, at most
REQUIRED_GAIN = 2.0  # the multiple


def make_executor(alg: Algorithm, task: Task, plan: Plan, population: Task | None = None) -> Executor:
    """The executor for a given plan."""
    plan = replace(plan, device=task.data.device.type, threads=torch.get_num_threads())
    return (PerClientExecutor if plan.mode == "per-client" else StackedExecutor)(alg, task, plan, population)


def choose_executor(
    alg: Algorithm,
    task: Task,
    population: Task,
    cohort: Cohort,
    eval_clients: int,
    mode: str = "auto",
    runs: int = 1,
    shards: int = 1,
    announce: Callable[[str], object] = str,
) -> Executor:
    """The executor, with its plan, for rounds with cohorts like this one in which `eval_clients` clients are scored.

    `mode` is auto, stacked, stacked-eager (without traced graphs) or per-client; `runs` is the number of stacked runs.
    `shards` is the number of such cohorts in a round, of which some may be computed at the same time by other
    processes of this machine. `announce` is told what is done next, because it may take some seconds.
    """
    load = Workload(alg, task, population, cohort, eval_clients, announce)
    inputs = plan_inputs(load, mode, runs, shards)
    known = find_plan(inputs)
    if known is not None and known.mode == "stacked" and known.chunk != _chunk_size(load, known.client_bytes, shards):
        known = None  # there is less memory now, or more
    if known is not None:
        return make_executor(alg, task, replace(known, reason=f"{known.reason} (in an earlier run)"), population)
    option = _choose(load, mode, shards)
    reason = option.plan.reason if runs == 1 else f"for {runs} runs; {option.plan.reason}"
    executor = option.executor
    device, threads = task.data.device.type, torch.get_num_threads()
    executor.plan = replace(option.plan, runs=runs, reason=reason, device=device, threads=threads)
    keep_plan(inputs, executor.plan)
    return executor


def _choose(load: Workload, mode: str, shards: int) -> Option:
    if mode.startswith("stacked"):
        return _stacked(load, mode, shards)
    load.announce("timing one client")
    simple = measure_per_client(load, PER_CLIENT)
    if mode == "per-client":
        return _because(_best_per_client(load, simple, shards), "set by the user")
    try:
        stacked, left_out = _stacked_options(load, simple, shards)
    except Exception as error:  # any operation of the method or the model may lack a vmap rule
        method = type(getattr(load.alg, "algs", (load.alg,))[0])  # of stacked runs, they have the same
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        found = describe_failure(error, method) or first_line
        log.warning("Clients are trained one by one, because they cannot be stacked: %s.", found)
        return _because(_best_per_client(load, simple, shards), f"cannot be stacked: {found}")
    return _best(load, simple, stacked, left_out, shards)


def _because(option: Option, reason: str) -> Option:
    """The option with the reason for its choice."""
    return replace(option, plan=replace(option.plan, reason=reason))


def _stacked(load: Workload, mode: str, shards: int) -> Option:
    """A plan that stacks, as the user has set it, without measuring it."""
    plan = replace(_stacking_plan(load, shards)[0], reason="set by the user")
    plan = replace(plan, replay="eager") if mode == "stacked-eager" else plan
    return Option(plan, make_executor(load.alg, load.task, plan, load.population), 0.0)


def _stacking_plan(load: Workload, shards: int) -> tuple[Plan, dict[str, ConvCase]]:
    """A plan that stacks as many clients as fit memory, and the convolutions for which there are several algorithms."""
    seen: dict[str, ConvCase] = {}
    load.announce("measuring memory")
    with convolutions(None, seen):
        chunk, each = _chunk(load, shards, {} if _custom_convolutions(load.task) else None)
    replay: Replay = "captured" if _captures(load.task) else "traced"
    return Plan("stacked", replay, chunk=chunk, client_bytes=each, convolutions={} if seen else None), seen


def _best(load: Workload, simple: Option, stacked: list[Option], left_out: str, shards: int) -> Option:
    """The fastest of the plans that stack, or that for one client after another if it is about as fast."""
    whole = _of_all_shards(load.task, shards)
    one, *several = (option.round_seconds for option in comparable([simple, *stacked]))
    clear = one > PER_CLIENT_GAIN * max(2, torch.get_num_threads()) * min(several)
    per_client, *stacked = comparable([simple if clear else _best_per_client(load, simple, shards), *stacked])
    best = min(stacked, key=lambda option: option.total(whole))
    if best.total(whole) > MARGIN * per_client.total(whole):
        best = per_client
    rates = ", ".join(f"{_label(o.plan)} {o.round_seconds:.3g} s" for o in (per_client, *stacked))
    return replace(best, plan=replace(best.plan, reason=f"expected per round: {rates}{left_out}"))


def _of_all_shards(task: Task, shards: int) -> Task:
    """The task with the rounds of all shards: what is traced once serves them all."""
    return replace(task, rounds=shards * task.rounds)


def _stacked_options(load: Workload, per_client: Option, shards: int) -> tuple[list[Option], str]:
    """Plans that stack, timed; and which ones were not tried, because they take longer to try than they could save."""
    task, captured = load.task, _captures(load.task)
    whole = _of_all_shards(task, shards)
    if captured:
        free_memory()  # that of measuring a single client
    plan, seen = _stacking_plan(load, shards)
    plan = replace(plan, scoring=faster_scoring(load))
    stacked: list[Option] = []
    left_out: list[str] = []

    def pays(name: str, price: float, share: float) -> bool:
        gain = share * stacked[-1].seconds * whole.rounds
        if gain < REQUIRED_GAIN * price:
            left_out.append(f"; not {name}: {price:.2g} s to save {gain:.2g} s at most")
        return gain >= REQUIRED_GAIN * price

    load.announce("timing stacked clients")
    if not captured:
        stacked.append(measure_stacked(load, replace(plan, replay="eager")))
    if captured or min(o.seconds for o in (per_client, *stacked)) * whole.rounds > TRACE_PAYS:
        stacked.append(_with_rest(measure_stacked(load, plan), stacked))
        if seen and pays("tuned", _tuning_seconds(seen.values()), TUNING_SAVES):
            load.announce("tuning convolutions")
            dtype = torch.bfloat16 if task.network.half else torch.float32
            found = fastest_algos(seen.values(), stacked[-1].plan.chunk, task.data.device, dtype)
            stacked.append(measure_stacked(load, replace(stacked[-1].plan, convolutions=found)))
        if captured and pays("compiled", stacked[-1].compiling, COMPILER_SAVES):
            load.announce("compiling steps")
            stacked.append(measure_stacked(load, replace(stacked[-1].plan, compiled=True)))
    return stacked, "".join(left_out)


def _with_rest(traced: Option, eager: Iterable[Option]) -> Option:
    """The option with what eager steps of the same clients leave beside them: what is traced are steps only."""
    return replace(traced, rest=next((option.rest for option in eager), None))


def _captures(task: Task) -> bool:
    """True if steps are captured as CUDA graphs."""
    return task.data.device.type == "cuda"


def _custom_convolutions(task: Task) -> bool:
    """True if stacked convolutions can use other algorithms than torch's."""
    return has_cuda_kernels(task.data.x) and task.dtype == torch.float32


def _tuning_seconds(cases: Iterable[ConvCase]) -> float:
    """Seconds for trying all algorithms of these convolutions."""
    return SECONDS_PER_ALGO * sum(len(candidates(case)) for case in cases)


def _best_per_client(load: Workload, best: Option, shards: int) -> Option:
    """With all threads for one client after another (`best`), or with clients in parallel threads; traced where it
    pays."""
    task = load.task
    workers = min(torch.get_num_threads(), len(load.cohort))
    if task.data.device.type != "cpu":
        return best
    if workers > 1:
        parallel = measure_per_client(load, replace(PER_CLIENT, workers=workers))
        alone, together = comparable([best, parallel])
        best = together if together.round_seconds < MARGIN * alone.round_seconds else alone
    whole = _of_all_shards(task, shards)
    if best.seconds * whole.rounds > TRACE_PAYS:
        try:
            traced = measure_per_client(load, replace(best.plan, replay="traced"))
        except Exception:  # any operation may lack what tracing needs
            log.info("A client's step cannot be traced.", exc_info=True)
            return best
        best = min(comparable([best, traced]), key=lambda option: option.total(whole))
    return best


def _label(plan: Plan) -> str:
    if plan.mode == "stacked":
        return f"stacked ({plan.replay}{', tuned' * bool(plan.convolutions)}{', compiled' * plan.compiled})"
    notes = [plan.replay] * (plan.replay != "eager") + [f"{plan.workers} worker threads"] * (plan.workers > 0)
    return f"per-client ({', '.join(notes)})" if notes else plan.mode


def _chunk(load: Workload, shards: int, conv_algos: dict[str, Algo] | None = None) -> tuple[int, int]:
    """How many clients fit memory together, and how many bytes each of them takes, from what two of them take."""
    few = load.cohort.rows(np.arange(min(2, len(load.cohort))))
    each = dry_run(load.alg, load.task, few, conv_algos) // len(few)
    return _chunk_size(load, each, shards), each


def _chunk_size(load: Workload, each: int, shards: int) -> int:
    """How many clients fit memory together that take so many bytes each. Main memory is shared with other shards: as if
    all were computed at once, so that results do not depend on how many are."""
    device = load.task.data.device
    share = MEMORY_SHARE / (shards if device.type == "cpu" else 1)
    fit = max(1, int(share * available_memory(device)) // max(1, each))
    chunks = -(-len(load.cohort) // fit)
    return -(-len(load.cohort) // chunks)
