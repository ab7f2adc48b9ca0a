"""One client after another, one batch after another, without padding: the oracle, and the plan for models that gain
nothing from stacking, for which several clients may train side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedloom.core.contract import Algorithm, Batch, Info, Phase, Slot
from fedloom.core.network import Params
from fedloom.core.task import Task
from fedloom.core.tree import Tree, take, tree_map
from fedloom.engines import schedule
from fedloom.engines.cohort import Cohort, Outcome, Scores, global_slot, keep_stats, put_stats, score_client, stack
from fedloom.engines.plan import Plan
from fedloom.engines.replayed import Replayed
from fedloom.engines.schedule import Schedule
from fedloom.engines.single import ClientStep, laid_out
from fedloom.engines.workers import proceed, side_by_side

Where = tuple[str, int]  # which phase: of training or of adaptation, and its index
T = TypeVar("T")
Predict = Callable[[Tensor], Tensor]


class PerClient:
    def __init__(self, alg: Algorithm, task: Task, plan: Plan | None = None) -> None:
        self.alg, self.task = alg, task
        self.plan = plan or Plan("per-client")
        self.population = task  # has the clients' samples; `task` is what the method sees
        self.phases = {"train": alg.phases(task), "adapt": alg.adapt(task)}
        self.programs: dict[Where, ClientStep] = {}
        self.replayed = Replayed(False)

    def serving(self, population: Task) -> PerClient:
        other = copy.copy(self)  # with the same programs
        other.population = population
        return other

    def _each(self, cohort: Cohort, job: Callable[[int], T]) -> T:
        """What `job` gives for every row of the cohort, stacked."""
        if not self.plan.workers:
            return stack([job(j) for j in range(len(cohort))])
        sizes = self.population.data.splits["train"].sizes[cohort.ids]
        longest_first = np.argsort(-sizes, kind="stable").tolist()  # so that all workers end at about the same time
        return stack(side_by_side(job, longest_first, self.plan.workers))

    @torch.no_grad()
    def train(self, cohort: Cohort, splits: tuple[str, ...]) -> Outcome:
        self.get_ready("train", cohort)

        def one(j: int) -> Outcome:
            down, own, info, work = self.start(cohort, j)
            for index, phase in enumerate(self.phases["train"]):
                work = self._pass(("train", index), phase, work, down, info, cohort, j)
            report = self.alg.report(self.task, work, down, info)
            kept, up = self.alg.finish(self.task, work, down, own, info)
            if not cohort.scored[j]:
                nothing = torch.full((3,), torch.nan, dtype=self.task.dtype, device=self.task.data.device)
                return Outcome(kept, up, keep_stats(work), report, dict.fromkeys(splits, nothing))
            trained = info._replace(first=torch.zeros_like(info.first))
            model = self.alg.model(self.task, work, down, trained)
            scores = self._score(self._personal(model), int(cohort.ids[j]), splits)
            return Outcome(kept, up, keep_stats(work), report, scores)

        return self._each(cohort, one)

    @torch.no_grad()
    def score_personal(self, cohort: Cohort, splits: tuple[str, ...]) -> Scores:
        self.get_ready("adapt", cohort)

        def one(j: int) -> Scores:
            down, _, info, work = self.start(cohort, j)
            for index, phase in enumerate(self.phases["adapt"]):
                work = self._pass(("adapt", index), phase, work, down, info, cohort, j)
            model = self.alg.model(self.task, work, down, info)
            return self._score(self._personal(model), int(cohort.ids[j]), splits)

        return self._each(cohort, one)

    @torch.no_grad()
    def score_global(self, params: Params, cohort: Cohort, splits: tuple[str, ...]) -> Scores:
        def one(j: int) -> Scores:
            model = global_slot(self.alg, self.task, params, take(cohort.stats, j))
            return self._score(self._global(model), int(cohort.ids[j]), splits)

        return self._each(cohort, one)

    def start(self, cohort: Cohort, j: int) -> tuple[Tree, Tree, Info, Tree]:
        down = tree_map(laid_out, {**cohort.shared, **take(cohort.parts, j)})
        own, info = take(cohort.own, j), take(cohort.info, j)
        work = put_stats(self.alg.begin(self.task, down, own, info), take(cohort.stats, j))
        return down, own, info, tree_map(laid_out, work)

    def get_ready(self, kind: str, cohort: Cohort) -> None:
        """Trace the steps that are traced; here, where no worker is at work."""
        if self.plan.replay != "traced" or (kind, 0) in self.programs:
            return
        down, _, info, work = self.start(cohort, 0)
        for index, phase in enumerate(self.phases[kind]):
            work = work if phase.enter is None else phase.enter(self.task, work, down, info)
            full = self._schedule(phase, cohort, 0, 1).full_batch(self.task)
            self.programs[kind, index] = ClientStep(self.task, phase, work, full, down, info)

    def advance(self, where: Where, phase: Phase, work: Tree, batches: Iterable[Batch], down: Tree, info: Info) -> Tree:
        if where in self.programs:
            return self.programs[where].run(work, batches, down, info)
        for batch in batches:
            proceed()
            work = phase.step(self.task, work, batch, down, info)
        return work

    def _schedule(self, phase: Phase, cohort: Cohort, j: int, epochs: int, first: int = 0) -> Schedule:
        seeds, ids, run = (v[j : j + 1] for v in (cohort.seeds, cohort.ids, cohort.run))
        return schedule.build(self.population, phase, seeds, ids, cohort.t, np.array([epochs]), first, run)

    def _pass(self, where: Where, phase: Phase, work: Tree, down: Tree, info: Info, cohort: Cohort, j: int) -> Tree:
        if phase.enter is not None:
            work = phase.enter(self.task, work, down, info)
        epochs = phase.epochs if isinstance(phase.epochs, int) else int(phase.epochs(self.task, work, info))
        # all epochs at once, or one by one where a condition is asked in between
        spans = [(0, epochs)] if phase.until is None else [(e, 1) for e in range(epochs)]
        for first, count in spans:
            batches = self._schedule(phase, cohort, j, count, first).batches(self.task, 0)
            work = self.advance(where, phase, work, batches, down, info)
            if phase.until is not None and bool(phase.until(work)):
                break
        return work

    def _personal(self, model: Any) -> Predict:
        return lambda x: self.alg.logits(self.task, model, x)

    def _global(self, model: Slot) -> Predict:
        return lambda x: self.task.predict(model, x).logits

    def _score(self, predict: Predict, i: int, splits: tuple[str, ...]) -> Scores:
        return {split: score_client(self.task, predict, self.population.data.splits[split][i]) for split in splits}
