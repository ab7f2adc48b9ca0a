"""A whole cohort in one batched step.

Clients are sorted by their number of steps, and a step runs for the prefix of clients that still have batches. The rows
of a client are saved when it finishes and never read again, so whatever is computed on them afterwards (prefixes are
rounded up to one of a few sizes) has no effect.
"""

import contextlib
import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.algorithm import Algorithm, Info, Phase
from fedloom.core.autodiff import vmap
from fedloom.core.errors import UserError
from fedloom.core.task import Task
from fedloom.core.tree import Params, Tree, take, tree_flatten, tree_map, tree_unflatten
from fedloom.device.memory import available_memory, free_memory, is_out_of_memory
from fedloom.device.transfer import to_device
from fedloom.engine import batching
from fedloom.engine.batching import BatchWindows, Schedule
from fedloom.engine.cohort import Cohort, Evaluated, Outcome, Scores, get_stats, with_stats
from fedloom.engine.executors.phases import phases_of
from fedloom.engine.executors.stacked_scoring import MIN_EVAL_ROWS, StackedScoring
from fedloom.engine.graph.cuda_graph_runner import CudaGraphRunner
from fedloom.engine.graph.function_cache import FunctionCache
from fedloom.engine.graph.stacked_step import FunctionalRunner, StackedStep, StepRunner, flat_inputs
from fedloom.engine.plan import PhaseId, Plan

log = logging.getLogger("fedloom")

WINDOW = 1 << 20  # samples whose positions are worked out ahead of their steps


class NextCohort(NamedTuple):
    """The clients that will probably train next, and their first batches."""

    t: int
    ids: np.ndarray
    seeds: np.ndarray
    run: np.ndarray
    windows: BatchWindows

    def matches(self, cohort: Cohort) -> bool:
        pairs = zip((self.ids, self.seeds, self.run), (cohort.ids, cohort.seeds, cohort.run), strict=True)
        return self.t == cohort.t and all(np.array_equal(mine, theirs) for mine, theirs in pairs)


class StackedExecutor:
    """Runs the functions of an algorithm for many clients at once, under `vmap`, in chunks that fit memory."""

    def __init__(self, alg: Algorithm, task: Task, plan: Plan, population: Task | None = None) -> None:
        """`task` is what the algorithm sees; `population` has the samples of all clients, also of held-out ones."""
        self.alg, self.task, self.plan = alg, task, plan
        self.population = population or task
        self.phases = phases_of(alg, task)
        self.runners: dict[tuple[PhaseId, int], StepRunner] = {}  # by phase and chunk size
        self.next_cohort: NextCohort | None = None
        self.memory_pool = torch.cuda.graph_pool_handle() if plan.replay == "captured" else None
        data = self.population.data
        static = data.x, data.y, *(split.flat for split in data.splits.values())
        self.call = FunctionCache(plan.replay != "eager", self.memory_pool, static)
        self.scoring = StackedScoring(alg, task, self.population, self.call)

    @torch.no_grad()
    def train(self, cohort: Cohort, splits: tuple[str, ...], models: bool = False) -> Outcome:
        outcome = self._in_chunks(cohort, lambda chunk: self._train(chunk, splits, models))
        self._prefetch(cohort)
        return outcome

    @torch.no_grad()
    def score_personal(self, cohort: Cohort, splits: tuple[str, ...], models: bool = False) -> Evaluated:
        return self._in_chunks(cohort, lambda chunk: self._score_personal(chunk, splits, models))

    @torch.no_grad()
    def score_global(self, params: Params, cohort: Cohort, splits: tuple[str, ...]) -> Scores:
        if not cohort.stats:
            return self._with_less_memory(
                lambda: self.scoring.shared_model(params, cohort, splits, self.plan), len(cohort)
            )

        def job(chunk: Cohort) -> Scores:
            return {s: self.scoring.global_model(params, chunk, s, self.plan) for s in splits}

        return self._in_chunks(cohort, job)

    @torch.no_grad()
    def logits(self, models: Tree, ids: np.ndarray, split: str) -> Tensor:
        return self._with_less_memory(lambda: self.scoring.logits(models, ids, split, self.plan), len(ids))

    @torch.no_grad()
    def global_logits(self, params: Params, cohort: Cohort, split: str) -> Tensor:
        return self._with_less_memory(lambda: self.scoring.global_logits(params, cohort, split, self.plan), len(cohort))

    # -- chunks and memory ------------------------------------------------------------------------------------------

    def _in_chunks(self, cohort: Cohort, job: Callable[[Cohort], Any]) -> Any:
        return self._with_less_memory(lambda: self._all_chunks(cohort, job), len(cohort))

    def _with_less_memory(self, job: Callable[[], Any], clients: int) -> Any:
        """The job's result; when it runs out of memory, it starts again with fewer clients and samples at once."""
        while True:
            try:
                return job()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self._halve(clients)

    def _halve(self, clients: int) -> None:
        """Plan for half as many clients and samples at once."""
        before, rows = min(self.plan.chunk, clients), self.scoring.rows(self.plan)
        self.runners.clear()
        self.call.clear()
        self.scoring.clear()
        free_memory()
        if before == 1 and rows <= MIN_EVAL_ROWS:
            device = self.task.data.device
            raise UserError(
                f"The model of one client does not fit the memory of {device} "
                f"({available_memory(device) / 1e9:.1f} GB free); "
                "use a smaller batch_size, a smaller model, or another device."
            )
        self.plan = replace(self.plan, rows=max(MIN_EVAL_ROWS, rows // 2))
        if before > 1:
            self.plan = replace(self.plan, chunk=-(-before // 2))
            log.warning("Out of memory with %d clients at once: going on with %d.", before, self.plan.chunk)
        else:
            log.warning("Out of memory with one client: going on with %d samples scored at once.", self.plan.rows)

    def _all_chunks(self, cohort: Cohort, job: Callable[[Cohort], Any]) -> Any:
        """The job's results in the order of the cohort, on which they do not depend: chunks are equal parts of the
        clients by ascending id, in each the largest client first."""
        chunks = self._chunks(cohort.ids)
        if len(chunks) == 1 and not cohort.shared_by_run and np.array_equal(chunks[0], np.arange(len(cohort))):
            return job(cohort)
        done = [job(cohort.rows(chunk)) for chunk in chunks]
        back = to_device(self.task.data.device, np.argsort(np.concatenate(chunks)))
        return tree_map(lambda *rows: torch.cat(rows)[back], *done)

    def _chunks(self, ids: np.ndarray) -> list[np.ndarray]:
        """Positions of the clients of each chunk."""
        sizes = self.population.data.splits["train"].sizes[ids]
        chunks = np.array_split(np.argsort(ids, kind="stable"), -(-len(ids) // self.plan.chunk))
        return [chunk[np.argsort(-sizes[chunk], kind="stable")] for chunk in chunks]

    # -- what an algorithm does, for a chunk --------------------------------------------------------------------------

    def _train(self, cohort: Cohort, splits: tuple[str, ...], models: bool) -> Outcome:
        work, visits = self.begin(cohort), []
        for index, phase in enumerate(self.phases["train"]):
            work, visited = self._run_phase(("train", index), phase, work, cohort)
            visits.append(visited)
        client_state, up = self.finish(work, cohort)
        scores = self._score_trained(work, cohort, splits)
        trained = self.trained_model(work, cohort) if models else {}
        counts = to_device(self.task.data.device, np.stack(visits, 1))
        return Outcome(client_state, up, get_stats(work), self.report(work, cohort), scores, counts, trained)

    def _score_trained(self, work: Tree, cohort: Cohort, splits: tuple[str, ...]) -> Scores:
        """Scores of PM_post, NaN for clients that are not to be scored."""
        some, device = np.flatnonzero(cohort.scored), self.task.data.device
        nothing = torch.full((len(cohort), 3), torch.nan, dtype=self.task.dtype, device=device)
        if not splits or not len(some):
            return dict.fromkeys(splits, nothing)
        index = to_device(device, some)
        if len(some) < len(cohort):
            work, cohort = take(work, index), cohort.rows(some)
        model = self.trained_model(work, cohort)
        return {s: nothing.index_copy(0, index, self.scoring.personal(model, cohort, s, self.plan)) for s in splits}

    def _score_personal(self, cohort: Cohort, splits: tuple[str, ...], models: bool) -> Evaluated:
        work = self.begin(cohort)
        for index, phase in enumerate(self.phases["adapt"]):
            work, _ = self._run_phase(("adapt", index), phase, work, cohort)
        model = self._each("model", self.alg.model, cohort, work, cohort.info)
        scores = {s: self.scoring.personal(model, cohort, s, self.plan) for s in splits}
        return Evaluated(scores, model if models else {})

    def begin(self, cohort: Cohort) -> Tree:
        """The clients' working state at the start of a round."""

        def everyone(shared: Tree, *rows: Tree) -> Tree:
            def one(parts: Tree, state: Tree, stats: Tree, info: Info) -> Tree:
                return with_stats(self.alg.begin(self.task, {**shared, **parts}, state, info), stats)

            return _contiguous(vmap(one)(*rows))

        rows = cohort.parts, cohort.client_state, cohort.stats, cohort.info
        return self.call("begin", everyone, cohort.shared, *rows)

    def _each(self, name: Hashable, f: Callable[..., Any], cohort: Cohort, work: Tree, *rest: Tree) -> Any:
        """f(task, work, down, *rest) for every client."""

        def everyone(shared: Tree, *rows: Tree) -> Any:
            def one(work: Tree, parts: Tree, *rest: Tree) -> Any:
                return f(self.task, work, {**shared, **parts}, *rest)

            return _contiguous(vmap(one)(*rows))

        return self.call(name, everyone, cohort.shared, work, cohort.parts, *rest)

    def report(self, work: Tree, cohort: Cohort) -> Tree:
        """Numbers for the records."""
        if type(self.alg).report is Algorithm.report:  # the default reports nothing
            return {}
        return self._each("report", self.alg.report, cohort, work, cohort.info)

    def finish(self, work: Tree, cohort: Cohort) -> tuple[Tree, Tree]:
        """New private states, and uploads."""
        client_state, up = self._each("finish", self.alg.finish, cohort, work, cohort.client_state, cohort.info)
        return client_state, up

    def trained_model(self, work: Tree, cohort: Cohort) -> Any:
        """PM_post"""
        info = cohort.info._replace(first=torch.zeros_like(cohort.info.first))
        return self._each("model", self.alg.model, cohort, work, info)

    def enter(self, phase_id: PhaseId, phase: Phase, work: Tree, cohort: Cohort) -> Tree:
        """The work after the phase's `enter`, if it has one."""
        return work if phase.enter is None else self._each(phase_id, phase.enter, cohort, work, cohort.info)

    def epochs(self, phase: Phase, work: Tree, cohort: Cohort) -> np.ndarray:
        """Number of epochs of every client."""
        decide = phase.epochs
        if isinstance(decide, int):
            return np.full(len(cohort), decide)
        return vmap(lambda work, info: decide(self.task, work, info))(work, cohort.info).long().cpu().numpy()

    # -- batches ------------------------------------------------------------------------------------------------------

    def _run_phase(self, phase_id: PhaseId, phase: Phase, work: Tree, cohort: Cohort) -> tuple[Tree, np.ndarray]:
        """The work after a phase, and the visits of every client (`Schedule.visits`)."""
        task, work = self.task, self.enter(phase_id, phase, work, cohort)
        epochs = self.epochs(phase, work, cohort)
        if phase.until is None:
            schedule = self._schedule(phase, cohort, epochs)
            return self._run_steps(phase_id, phase, work, cohort, schedule), schedule.visits()
        epoch, going, visits = 0, epochs > 0, np.zeros((len(cohort), 2), np.int64)
        while going.any():
            some = np.flatnonzero(going)
            index = to_device(task.data.device, some)
            few = cohort.rows(some)
            schedule = self._schedule(phase, few, np.ones_like(some), epoch)
            rows = self._run_steps(phase_id, phase, take(work, index), few, schedule)
            work = tree_map(lambda mine, new: mine.index_copy(0, index, new), work, rows)  # noqa: B023
            visits[some] += schedule.visits()
            epoch += 1
            going[some[vmap(phase.until)(rows).cpu().numpy()]] = False
            going &= epochs > epoch
        return work, visits

    def _schedule(self, phase: Phase, cohort: Cohort, epochs: np.ndarray, first_epoch: int = 0) -> Schedule:
        if self.next_cohort and phase is self.phases["train"][0] and self.next_cohort.matches(cohort):
            return self.next_cohort.windows.schedule
        who = cohort.seeds, cohort.ids, cohort.t
        return batching.build(self.population, phase, *who, epochs, first_epoch, cohort.run, self._batching_call)

    @property
    def _batching_call(self) -> batching.Call:
        """Batches are computed by traced functions only where these are captured as CUDA graphs: on a CPU a trace of
        small integer operations is not faster."""
        return batching.call_directly if self.memory_pool is None else self.call

    def _prefetch(self, cohort: Cohort) -> None:
        """While a GPU is at work, prepare the first batches of the clients of the next round."""
        ids = cohort.next_ids
        if ids is None:  # joining clients: the batches that were prepared before are still to come
            return
        self.next_cohort = None
        if self.memory_pool is None or len(ids) != len(cohort) or len(ids) > self.plan.chunk:
            return
        phase = self.phases["train"][0]
        if phase.until is not None or not isinstance(phase.epochs, int):  # the batches depend on what clients compute
            return
        places, t = self._chunks(ids)[0], cohort.t + 1
        ids, seeds, run = ids[places], cohort.seeds[places], cohort.run[places]
        with contextlib.suppress(torch.OutOfMemoryError):  # then it is done when the round begins
            epochs = np.full(len(ids), phase.epochs)
            schedule = batching.build(self.population, phase, seeds, ids, t, epochs, run=run, call=self._batching_call)
            windows = self._windows(schedule)
            if schedule.steps[0]:
                windows.compute(self.plan.prefix(int((schedule.steps > 0).sum())))
                if runner := self.runners.get((("train", 0), self.plan.chunk)):
                    runner.load(windows.window)
            self.next_cohort = NextCohort(t, ids, seeds, run, windows)

    def _windows(self, schedule: Schedule) -> BatchWindows:
        prefetched = self.next_cohort
        if prefetched and prefetched.windows.schedule is schedule:
            self.next_cohort = None  # it serves once
            return prefetched.windows
        length = self._window_length(schedule.batch * schedule.group)
        return BatchWindows(self.task, schedule, length, self._batching_call)

    def _window_length(self, batch: int) -> int:
        return max(1, WINDOW // (self.plan.chunk * batch))

    def _run_steps(self, phase_id: PhaseId, phase: Phase, work: Tree, cohort: Cohort, schedule: Schedule) -> Tree:
        """The work after all steps of a schedule."""
        order = np.argsort(-schedule.steps, kind="stable")
        if not np.array_equal(order, np.arange(len(order))):
            index = to_device(self.task.data.device, order)
            done = self._run_steps(phase_id, phase, take(work, index), cohort.rows(order), schedule.rows(order))
            return take(done, torch.argsort(index))
        steps = schedule.steps
        if not steps[0]:
            return work
        state, spec = tree_flatten(work)
        runner = self.runner(phase_id, phase, work, cohort)
        runner.start(state, *flat_inputs(cohort))
        windows = self._windows(schedule)
        ragged = steps[-1] != steps[0]
        result = [v.clone() for v in state] if ragged else []
        for stop in np.unique(steps[steps > 0]).tolist():  # the steps after which some clients are done
            active, left = int((steps >= stop).sum()), int((steps > stop).sum())
            prefix = self.plan.prefix(active)
            for window, first, last in windows.until(stop, prefix):
                runner.advance(window, first, last, prefix)
            if ragged:
                for mine, new, changes in zip(result, runner.rows(left, active), runner.changes, strict=True):
                    if changes:
                        mine[left:active] = new
        return tree_unflatten(result if ragged else runner.rows(0, len(cohort)), spec)

    def runner(self, phase_id: PhaseId, phase: Phase, work: Tree, cohort: Cohort) -> StepRunner:
        """The runner of a phase's steps; made once per phase and chunk size."""
        key = phase_id, self.plan.chunk
        if key not in self.runners:
            step = StackedStep(self.task, phase, work, cohort, self.plan)
            if self.plan.replay == "captured":
                length = self._window_length((phase.batch or self.task.batch_size) * phase.group)
                self.runners[key] = CudaGraphRunner(step, self.plan, length, self.memory_pool)
            else:
                self.runners[key] = FunctionalRunner(step, traced=self.plan.replay == "traced")
        return self.runners[key]


def _contiguous(tree: Tree) -> Tree:
    """vmap returns values that are equal for all clients as expanded views; give them memory."""
    return tree_map(lambda x: x.contiguous(), tree)
