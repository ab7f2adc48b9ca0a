"""One client after another, one batch after another, without padding.

This is the reference that other executors must match, and the fastest one for models that gain nothing from stacking;
then several clients may train in parallel threads.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedloom.core.algorithm import Algorithm, Batch, Info, Phase, Slot
from fedloom.core.task import Task
from fedloom.core.tree import Params, Tree, take, tree_map
from fedloom.device.transfer import to_device
from fedloom.engine import batching
from fedloom.engine.batching import Schedule
from fedloom.engine.cohort import Cohort, Evaluated, Outcome, Scores, get_stats, global_slot, with_stats
from fedloom.engine.executors.phases import phases_of
from fedloom.engine.executors.scoring import logits_of_rows, score_rows
from fedloom.engine.graph.client_step import TracedClientStep, single_model_layout
from fedloom.engine.graph.function_cache import FunctionCache
from fedloom.engine.plan import PhaseId, Plan
from fedloom.engine.worker_threads import raise_if_stopped, run_in_threads

T = TypeVar("T")
Predict = Callable[[Tensor], Tensor]


class PerClientExecutor:
    """Runs the functions of an algorithm for one client at a time."""

    def __init__(self, alg: Algorithm, task: Task, plan: Plan, population: Task | None = None) -> None:
        """`task` is what the algorithm sees; `population` has the samples of all clients, also of held-out ones."""
        self.alg, self.task, self.plan = alg, task, plan
        self.population = population or task
        self.phases = phases_of(alg, task)
        self.traced_steps: dict[PhaseId, TracedClientStep] = {}
        self.call = FunctionCache(enabled=False)

    def _map_clients(self, cohort: Cohort, function: Callable[[int], T]) -> T:
        """The function's results for all rows of the cohort, stacked."""
        if not self.plan.workers:
            return _stack([function(j) for j in range(len(cohort))])
        sizes = self.population.data.splits["train"].sizes[cohort.ids]
        largest_first = np.argsort(-sizes, kind="stable").tolist()  # so that all workers end at about the same time
        return _stack(run_in_threads(function, largest_first, self.plan.workers))

    @torch.no_grad()
    def train(self, cohort: Cohort, splits: tuple[str, ...], models: bool = False) -> Outcome:
        self.prepare("train", cohort)

        def one(j: int) -> Outcome:
            down, state, info, work = self.start(cohort, j)
            visits = []
            for index, phase in enumerate(self.phases["train"]):
                work, visited = self._run_phase(("train", index), phase, work, down, info, cohort, j)
                visits.append(visited)
            report = self.alg.report(self.task, work, down, info)
            kept, up = self.alg.finish(self.task, work, down, state, info)
            nothing = torch.full((3,), torch.nan, dtype=self.task.dtype, device=self.task.data.device)
            scores, model = dict.fromkeys(splits, nothing), {}
            if cohort.scored[j] or models:
                trained = info._replace(first=torch.zeros_like(info.first))
                model = self.alg.model(self.task, work, down, trained)
            if cohort.scored[j]:
                scores = self._score(self._personal(model), int(cohort.ids[j]), splits)
            counts = to_device(self.task.data.device, np.concatenate(visits))
            return Outcome(kept, up, get_stats(work), report, scores, counts, model if models else {})

        return self._map_clients(cohort, one)

    @torch.no_grad()
    def score_personal(self, cohort: Cohort, splits: tuple[str, ...], models: bool = False) -> Evaluated:
        self.prepare("adapt", cohort)

        def one(j: int) -> Evaluated:
            down, _, info, work = self.start(cohort, j)
            for index, phase in enumerate(self.phases["adapt"]):
                work, _ = self._run_phase(("adapt", index), phase, work, down, info, cohort, j)
            model = self.alg.model(self.task, work, down, info)
            scores = self._score(self._personal(model), int(cohort.ids[j]), splits)
            return Evaluated(scores, model if models else {})

        return self._map_clients(cohort, one)

    @torch.no_grad()
    def score_global(self, params: Params, cohort: Cohort, splits: tuple[str, ...]) -> Scores:
        def one(j: int) -> Scores:
            model = global_slot(self.alg, self.task, params, take(cohort.stats, j))
            return self._score(self._global(model), int(cohort.ids[j]), splits)

        return self._map_clients(cohort, one)

    @torch.no_grad()
    def logits(self, models: Tree, ids: np.ndarray, split: str) -> Tensor:
        return self._logits((self._personal(take(models, j)) for j in range(len(ids))), ids, split)

    @torch.no_grad()
    def global_logits(self, params: Params, cohort: Cohort, split: str) -> Tensor:
        slots = (global_slot(self.alg, self.task, params, take(cohort.stats, j)) for j in range(len(cohort)))
        return self._logits((self._global(slot) for slot in slots), cohort.ids, split)

    def _logits(self, predict: Iterable[Predict], ids: np.ndarray, split: str) -> Tensor:
        lists = self.population.data.splits[split]
        pairs = zip(predict, ids.tolist(), strict=True)
        return torch.cat([logits_of_rows(self.task, one, lists[i]) for one, i in pairs])

    def start(self, cohort: Cohort, j: int) -> tuple[Tree, Tree, Info, Tree]:
        """Download, private state, info and initial work of the client in row j."""
        down = tree_map(single_model_layout, {**cohort.shared, **take(cohort.parts, j)})
        state, info = take(cohort.client_state, j), take(cohort.info, j)
        work = with_stats(self.alg.begin(self.task, down, state, info), take(cohort.stats, j))
        return down, state, info, tree_map(single_model_layout, work)

    def prepare(self, kind: str, cohort: Cohort) -> None:
        """Trace the steps of all phases if the plan says so; before any worker thread starts."""
        if self.plan.replay != "traced" or (kind, 0) in self.traced_steps:
            return
        down, _, info, work = self.start(cohort, 0)
        for index, phase in enumerate(self.phases[kind]):
            work = work if phase.enter is None else phase.enter(self.task, work, down, info)
            full = self._schedule(phase, cohort, 0, 1).full_batch(self.task)
            self.traced_steps[kind, index] = TracedClientStep(self.task, phase, work, full, down, info)

    def advance(
        self, phase_id: PhaseId, phase: Phase, work: Tree, batches: Iterable[Batch], down: Tree, info: Info
    ) -> Tree:
        """The work after a step for every batch."""
        if phase_id in self.traced_steps:
            return self.traced_steps[phase_id].run(work, batches, down, info)
        for batch in batches:
            raise_if_stopped()
            work = phase.step(self.task, work, batch, down, info)
        return work

    def _schedule(self, phase: Phase, cohort: Cohort, j: int, epochs: int, first: int = 0) -> Schedule:
        seeds, ids, run = (v[j : j + 1] for v in (cohort.seeds, cohort.ids, cohort.run))
        return batching.build(self.population, phase, seeds, ids, cohort.t, np.array([epochs]), first, run)

    def _run_phase(
        self, phase_id: PhaseId, phase: Phase, work: Tree, down: Tree, info: Info, cohort: Cohort, j: int
    ) -> tuple[Tree, np.ndarray]:
        """The work after a phase, and the client's visits (`Schedule.visits`)."""
        visits = np.zeros((1, 2), np.int64)
        if phase.enter is not None:
            work = phase.enter(self.task, work, down, info)
        epochs = phase.epochs if isinstance(phase.epochs, int) else int(phase.epochs(self.task, work, info))
        # all epochs at once, or one by one where a condition is asked in between
        spans = [(0, epochs)] if phase.until is None else [(e, 1) for e in range(epochs)]
        for first, count in spans:
            schedule = self._schedule(phase, cohort, j, count, first)
            work = self.advance(phase_id, phase, work, schedule.batches(self.task, 0), down, info)
            visits += schedule.visits()
            if phase.until is not None and bool(phase.until(work)):
                break
        return work, visits

    def _personal(self, model: Any) -> Predict:
        return lambda x: self.alg.logits(self.task, model, x)

    def _global(self, model: Slot) -> Predict:
        return lambda x: self.task.predict(model, x).logits

    def _score(self, predict: Predict, i: int, splits: tuple[str, ...]) -> Scores:
        return {split: score_rows(self.task, predict, self.population.data.splits[split][i]) for split in splits}


def _stack(trees: list[Any]) -> Any:
    return tree_map(lambda *rows: torch.stack(rows).contiguous(), *trees)
