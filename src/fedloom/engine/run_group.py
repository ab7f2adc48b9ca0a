"""Several runs of one method carried out as one: their clients are stacked along the same axis.

Each run keeps its own server, clients, sampling and records. What the runs ask of their clients at the same time is
merged into one cohort, computed once, and divided again. A single run is a group of one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fedloom.core.tree import Tree, take, tree_map
from fedloom.engine.clients import ClientReplies, ClientRequest
from fedloom.engine.cohort import Cohort, Executor
from fedloom.engine.driver import Evaluation, Round, Steps, T
from fedloom.engine.plan import Plan
from fedloom.engine.planning.choose import choose_executor, make_executor
from fedloom.engine.simulation import Simulation
from fedloom.engine.stacked_settings import VALUES, differing_settings, stacked_algorithm, values_tree
from fedloom.metrics.predictions import Predictions


class RunGroup:
    """Advances runs that are alike in everything but seeds and plain numbers."""

    def __init__(
        self, runs: Sequence[Simulation], plan: Plan | str = "auto", announce: Callable[[str], object] = str
    ) -> None:
        """`plan` is an execution plan, or how one is made: auto, stacked, stacked-eager or per-client. `announce` is
        told what is done while it is made."""
        self.runs, first = runs, runs[0]
        names = differing_settings(runs)
        self.values = [values_tree(run, names) for run in runs]
        alg = stacked_algorithm(runs, names)
        if isinstance(plan, Plan):
            executor = make_executor(alg, first.task, plan, first.population)
        else:
            cohort = self._merged(dict(enumerate(run.first_cohort() for run in runs)))
            eval_clients = sum(len(run.driver.eval_client_ids) for run in runs)
            executor = choose_executor(
                alg, first.task, first.population, cohort, eval_clients, plan, len(runs), announce=announce
            )
        stacked = executor.plan.mode == "stacked"
        self.stacked = stacked and len(runs) > 1
        self.executors: list[Executor] = [
            executor if stacked or len(runs) == 1 else make_executor(run.alg, run.task, executor.plan, run.population)
            for run in runs
        ]

    def plan(self, number: int = 0) -> Plan:
        """The execution plan of a run; it changes when memory turns out to be short."""
        return self.executors[number].plan

    @torch.no_grad()
    def advance(
        self, evaluate: bool = True, some: Sequence[int] | None = None, cohort: np.ndarray | None = None
    ) -> list[Round]:
        """Train one round. `evaluate`: score all models afterwards; `some`: positions of the runs to advance, which
        must be at the same round (default: all); `cohort`: client ids to train instead of the sampled ones."""
        which = range(len(self.runs)) if some is None else some
        drivers = [self.runs[number].driver for number in which]
        share = 1 / len(drivers)  # seconds are divided evenly among the runs
        start = time.perf_counter()
        trained = self._run_generators(which, [driver.train_round(evaluate, cohort) for driver in drivers])
        middle = time.perf_counter()
        found = self.evaluate(which) if evaluate else [Evaluation()] * len(drivers)
        end = time.perf_counter()
        return [
            Round(
                **vars(done),
                **vars(scored),
                eval_client_ids=driver.eval_client_ids,
                unseen=driver.unseen,
                metric=self.runs[number].clients.metric,
                kind=self.runs[number].task.data.kind,
                train_seconds=share * (middle - start),
                eval_seconds=share * (end - middle),
            )
            for number, driver, done, scored in zip(which, drivers, trained, found, strict=True)
        ]

    @torch.no_grad()
    def evaluate(self, some: Sequence[int] | None = None) -> list[Evaluation]:
        """Scores of everybody's models at the start of the next round."""
        which = range(len(self.runs)) if some is None else some
        size, count = self.runs[0].clients.bytes_per_client, len(self.runs)
        announce = self.runs[0].clients.trains_ahead
        steps = [self.runs[number].driver.evaluation(size, count, announce) for number in which]
        return self._run_generators(which, steps)

    @torch.no_grad()
    def models(self, number: int, best: bool = False) -> Iterator[tuple[np.ndarray, Tree]]:
        """Clients of one run in blocks, and their stacked models (`Driver.models`) after the last or the best round."""
        run = self.runs[number]
        for ids in run.driver.model_blocks(run.clients.bytes_per_client):
            yield ids, self.models_of(number, ids, best)

    @torch.no_grad()
    def models_of(self, number: int, ids: np.ndarray, best: bool = False) -> Tree:
        """The stacked models of some clients of one run, either all participants or all held out."""
        found = self._models(number, ids, best)
        return found["model"] if isinstance(found, dict) and VALUES in found else found

    def _models(self, number: int, ids: np.ndarray, best: bool) -> Tree:
        (found,) = self._run_generators([number], [self.runs[number].driver.models(ids, best)])
        return found

    @torch.no_grad()
    def predictions(self, number: int, best: bool = False) -> Iterator[tuple[np.ndarray, Predictions]]:
        """Evaluated clients of one run in blocks, and what their models after the last or the best round predict for
        their test samples."""
        run = self.runs[number]
        for block in run.driver.model_blocks(run.clients.bytes_per_client):
            ids = np.intersect1d(block, run.driver.eval_client_ids)
            if len(ids):
                logits = self.executors[number].logits(self._models(number, ids, best), ids, "test")
                yield ids, run.local.predictions(ids, "test", logits)

    def _run_generators(self, which: Sequence[int], steps: Sequence[Steps[T]]) -> list[T]:
        """What the generators of the runs return; requests of equal kind are carried out together."""
        results: dict[int, T] = {}
        replies: dict[int, Any] = dict.fromkeys(which)
        generators = dict(zip(which, steps, strict=True))
        while replies:
            requests: dict[int, ClientRequest] = {}
            for number, reply in replies.items():
                try:
                    requests[number] = generators[number].send(reply)
                except StopIteration as end:
                    results[number] = end.value
            replies = {}
            for kind in dict.fromkeys(request.kind for request in requests.values()):
                replies |= self._ask({number: r for number, r in requests.items() if r.kind == kind})
        return [results[number] for number in which]

    def _ask(self, requests: dict[int, ClientRequest]) -> dict[int, ClientReplies]:
        """The replies to requests of one kind, by the number of the run."""
        if not self.stacked:
            return {n: self.runs[n].clients.ask(request, self.executors[n]) for n, request in requests.items()}
        clients = {number: self.runs[number].local for number in requests}
        cohorts = {number: clients[number].cohort(request) for number, request in requests.items()}
        request, executor = next(iter(requests.values())), self.executors[0]
        needs_models = next(iter(clients.values())).needs_models(request)
        if request.job == "train":
            trained = self._on_merged_cohort(
                cohorts, lambda cohort: executor.train(cohort, request.splits, needs_models)
            )
            return {n: clients[n].training_replies(requests[n], cohorts[n], trained[n], executor) for n in requests}
        # the global model is scored in one pass over a run's samples, which stacking would not make faster
        shared = {n: clients[n].score_global(requests[n], cohorts[n], executor) for n in requests}
        scored = dict.fromkeys(requests)
        if request.splits or request.models:
            scored = self._on_merged_cohort(
                cohorts, lambda cohort: executor.score_personal(cohort, request.splits, needs_models)
            )
        return {
            n: clients[n].evaluation_replies(requests[n], cohorts[n], shared[n], scored[n], executor) for n in requests
        }

    def _on_merged_cohort(self, cohorts: dict[int, Cohort], function: Callable[[Cohort], Tree]) -> dict[int, Any]:
        """The function's result for the merged cohorts, divided by run."""
        done = function(self._merged(cohorts))
        ends = np.cumsum([0, *map(len, cohorts.values())]).tolist()
        return {number: take(done, slice(a, b)) for number, (a, b) in zip(cohorts, pairwise(ends), strict=True)}

    def _merged(self, cohorts: dict[int, Cohort]) -> Cohort:
        """The cohorts of some runs as one."""
        each = list(cohorts.values())
        if len(self.runs) == 1:
            return each[0]

        def stacked(name: str) -> Tree:
            return tree_map(lambda *rows: torch.cat(rows), *(getattr(cohort, name) for cohort in each))

        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(cohort, name) for cohort in each])

        return replace(
            each[0],
            ids=joined("ids"),
            shared={},
            **{name: stacked(name) for name in ("parts", "client_state", "stats", "info")},
            seeds=joined("seeds"),
            run=np.repeat(list(cohorts), [len(cohort) for cohort in each]),
            scored=joined("scored"),
            shared_by_run={number: {**cohort.shared, **self.values[number]} for number, cohort in cohorts.items()},
            next_ids=None if any(cohort.next_ids is None for cohort in each) else joined("next_ids"),
        )
