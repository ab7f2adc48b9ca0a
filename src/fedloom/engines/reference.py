"""One client after another, one batch after another, without padding: the oracle, and the plan for models that gain
nothing from stacking, for which several clients may train side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedloom.core.contract import Algorithm, Info, Phase, Slot
from fedloom.core.network import Params
from fedloom.core.task import Task
from fedloom.core.tree import Tree, take
from fedloom.engines import schedule
from fedloom.engines.cohort import Cohort, Outcome, Scores, global_slot, keep_stats, put_stats, score_client, stack
from fedloom.engines.workers import proceed, side_by_side

T = TypeVar("T")
Predict = Callable[[Tensor], Tensor]


class PerClient:
    def __init__(self, alg: Algorithm, task: Task, population: Task | None = None, workers: int = 0) -> None:
        """`task` is what the method sees, `population` has the clients' samples where it is not the same; for
        `workers`, see `Plan`."""
        self.alg, self.task, self.population, self.workers = alg, task, population or task, workers

    def serving(self, population: Task) -> PerClient:
        return PerClient(self.alg, self.task, population, self.workers)

    def _each(self, cohort: Cohort, job: Callable[[int], T]) -> T:
        """What `job` gives for every row of the cohort, stacked."""
        if not self.workers:
            return stack([job(j) for j in range(len(cohort))])
        sizes = self.population.data.splits["train"].sizes[cohort.ids]
        longest_first = np.argsort(-sizes, kind="stable").tolist()  # so that all workers end at about the same time
        return stack(side_by_side(job, longest_first, self.workers))

    @torch.no_grad()
    def train(self, cohort: Cohort, splits: tuple[str, ...]) -> Outcome:
        def one(j: int) -> Outcome:
            down, own, info, work = self.start(cohort, j)
            for phase in self.alg.phases(self.task):
                work = self._pass(phase, work, down, info, cohort, j)
            report = self.alg.report(self.task, work, down, info)
            kept, up = self.alg.finish(self.task, work, down, own, info)
            trained = info._replace(first=torch.zeros_like(info.first))
            model = self.alg.model(self.task, work, down, trained)
            scores = self._score(self._personal(model), int(cohort.ids[j]), splits)
            return Outcome(kept, up, keep_stats(work), report, scores)

        return self._each(cohort, one)

    @torch.no_grad()
    def score_personal(self, cohort: Cohort, splits: tuple[str, ...]) -> Scores:
        def one(j: int) -> Scores:
            down, _, info, work = self.start(cohort, j)
            for phase in self.alg.adapt(self.task):
                work = self._pass(phase, work, down, info, cohort, j)
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
        down = {**cohort.shared, **take(cohort.parts, j)}
        own, info = take(cohort.own, j), take(cohort.info, j)
        work = put_stats(self.alg.begin(self.task, down, own, info), take(cohort.stats, j))
        return down, own, info, work

    def _pass(self, phase: Phase, work: Tree, down: Tree, info: Info, cohort: Cohort, j: int) -> Tree:
        seeds, ids, t, run = cohort.seeds[j : j + 1], cohort.ids[j : j + 1], cohort.t, cohort.run[j : j + 1]
        if phase.enter is not None:
            work = phase.enter(self.task, work, down, info)
        epochs = phase.epochs if isinstance(phase.epochs, int) else int(phase.epochs(self.task, work, info))
        # all epochs at once, or one by one where a condition is asked in between
        spans = [(0, epochs)] if phase.until is None else [(e, 1) for e in range(epochs)]
        for first, count in spans:
            timetable = schedule.build(self.population, phase, seeds, ids, t, np.array([count]), first, run)
            for batch in timetable.batches(self.task, 0):
                proceed()
                work = phase.step(self.task, work, batch, down, info)
            if phase.until is not None and bool(phase.until(work)):
                break
        return work

    def _personal(self, model: Any) -> Predict:
        return lambda x: self.alg.logits(self.task, model, x)

    def _global(self, model: Slot) -> Predict:
        return lambda x: self.task.predict(model, x).logits

    def _score(self, predict: Predict, i: int, splits: tuple[str, ...]) -> Scores:
        return {split: score_client(self.task, predict, self.population.data.splits[split][i]) for split in splits}
